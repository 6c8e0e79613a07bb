"""Yaml files: read without running code, and refused with the file or the key."""

import pytest
from detectron2 import model_zoo

from gw_detectron.config import changed_config, read_config
from gw_detectron.errors import ConfigError

from .tiny_run import CONFIG

MERGE = "a: &a\n  b: 1\nMODEL:\n  <<: *a\n"


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder / f"{next(iter(files))}.yaml")


def run_tag(marker):
    return f"VERSION: 2\nMODEL:\n  WEIGHTS: !!python/object/apply:os.mkdir ['{marker}']\n"


@pytest.mark.parametrize(
    "base", ["{name}", "{folder}/{name}", "~/{name}", "{upper}", "[{name}]"]
)
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_python_tags_are_refused_and_not_run(tmp_path, monkeypatch, base, levels):
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {}
    for level in range(levels):
        below = f"{tmp_path.name}{level + 1}.yaml"
        upper = f"../{tmp_path.name}/{below}"
        files[f"{tmp_path.name}{level}"] = (
            f"_BASE_: {base.format(name=below, folder=tmp_path, upper=upper)}\n"
        )
    files[f"{tmp_path.name}{levels}"] = run_tag(tmp_path / "harm")
    path = write(tmp_path, **files)
    with pytest.raises(ConfigError, match=r"os\.mkdir"):
        read_config(path)
    assert not (tmp_path / "harm").exists()


def test_detectron2s_retinanet_computes_its_anchors_by_code():
    with pytest.raises(ConfigError, match="eval"):
        read_config(model_zoo.get_config_file("COCO-Detection/retinanet_R_50_FPN_1x.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "a: !!python/name:os.system",
            "a: !!python/tuple [1]",
            "a: !mine 3",
            "SEED: 2026-01-01",
            "SEED: !!set {1, 2}",
        ),
        *(
            "",
            "3",
            "- SEED",
            "1: 2",
            "? [1, 2]\n: 3",
            b"SEED: \xff\xfe",
            "VERSION: abc",
            "VERSION: 3",
        ),
        *("MODEL: 3", "SOLVER:  # all keys are commented out", "SOLVER:\n  MAX_ITER: many"),
        *("_BASE_: none.yaml", "_BASE_: 3", "_BASE_: a.yaml", "_BASE_: ."),
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        read_config(write(tmp_path, a=text))


def test_unknown_keys_are_named_with_similar_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"SOLVER\.MAXITER.*SOLVER\.MAX_ITER"):
        read_config(write(tmp_path, a="SOLVER:\n  MAXITER: 3\n"))
    with pytest.raises(ConfigError, match="unknown config key 'a'"):
        read_config(write(tmp_path, a=MERGE))


def test_good_files_are_read_as_before(tmp_path):
    text = f"_BASE_: {CONFIG}\nMODEL:\n  PIXEL_MEAN: &mean [1.0, 2.0, 3.0]\n  PIXEL_STD: *mean\n  MASK_ON: off\n"
    cfg = read_config(write(tmp_path, a="_BASE_: b.yaml\nSEED: 3\n", b=text), ["SEED", "4"])
    assert (cfg.MODEL.PIXEL_STD, cfg.MODEL.MASK_ON, cfg.SEED) == ([1.0, 2.0, 3.0], False, 4)
    assert cfg.MODEL.RESNETS.DEPTH == 18  # from the package's config


@pytest.mark.parametrize(
    "code", ["__import__('os').mkdir('{}')", "!!python/object/apply:os.mkdir ['{}']"]
)
def test_values_of_the_command_line_are_not_run(tmp_path, code):
    value = code.format(tmp_path / "harm")
    assert value == read_config(str(CONFIG), ["MODEL.WEIGHTS", value]).MODEL.WEIGHTS
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["MODEL.LOAD_PROPOSALS", "True"],
            "LOAD_PROPOSALS",
        ),  # Detectron2 unpickles proposal files
        (["SEED", "3", "--config-file", "x.yaml"], "--config-file"),
        (
            ["OUTPUT_DIR", "2024"],
            "OUTPUT_DIR",
        ),  # a text that reads as a number; "'2024'" is one that does not
        *(
            ([key, "1"], "Arguments")
            for key in ("", ".", "MODEL", "MODEL.", "MODEL.DEVICE.c", "_BASE_", "MODEL.X")
        ),
    ],
)
def test_words_of_the_command_line_that_are_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        read_config(CONFIG, words)


def test_words_of_the_command_line_that_are_read():
    assert read_config(CONFIG, ["--", "SEED", "3"]).SEED == 3
    assert read_config(CONFIG, ["OUTPUT_DIR", "'2024'"]).OUTPUT_DIR == "2024"


def test_a_changed_config_is_a_copy():
    cfg = read_config(CONFIG)
    cfg.freeze()
    changed = changed_config(cfg, {"SEED": 3, "MODEL.FPN.NORM": "GW"})
    assert (changed.SEED, changed.MODEL.FPN.NORM, changed.is_frozen()) == (3, "GW", False)
    assert (cfg.SEED, cfg.MODEL.FPN.NORM) == (
        read_config(CONFIG).SEED,
        read_config(CONFIG).MODEL.FPN.NORM,
    )
