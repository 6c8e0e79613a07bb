"""Yaml files: read without running code, and refused with the file or the key."""

import pytest
from detectron2 import model_zoo

from gw_detectron import config
from gw_detectron.config import (
    changed_config,
    list_configs,
    parse_config,
    read_config,
    shipped_configs,
)
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.dataset.datasets_yaml import read_datasets

from .tiny_run import CONFIG

MERGE = "a: &a\n  b: 1\nMODEL:\n  <<: *a\n"


def write(folder, text, name="a.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def run_tag(marker):
    return (
        f"VERSION: 2\nMODEL:\n  WEIGHTS: !!python/object/apply:os.mkdir ['{marker}']\n"
    )


def test_a_config_of_an_earlier_version_is_read_without_its_removed_keys(tmp_path):
    earlier = write(
        tmp_path, "TRACKER: wandb\nINPUT: {SCALE_PER_BATCH: true}\nSEED: 3\n"
    )

    cfg = read_config(earlier)

    assert cfg.SEED == 3
    assert "TRACKER" not in cfg
    with pytest.raises(ConfigError, match="TRACKER"):
        read_config(earlier, ["TRACKER", "wandb"])


@pytest.mark.parametrize(
    "base", ["{name}", "{folder}/{name}", "~/{name}", "{upper}", "[{name}]"]
)
@pytest.mark.parametrize("levels", [0, 1, 3])
def test_python_tags_are_refused_and_not_run(tmp_path, monkeypatch, base, levels):
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "harm.yaml"
    write(tmp_path, run_tag(tmp_path / "harm"), name)
    for level in range(levels):
        upper = f"../{tmp_path.name}/{name}"
        below = base.format(name=name, folder=tmp_path, upper=upper)
        name = f"{tmp_path.name}{level}.yaml"
        write(tmp_path, f"_BASE_: {below}\n", name)

    with pytest.raises(ConfigError, match=r"os\.mkdir"):
        read_config(tmp_path / name)

    assert not (tmp_path / "harm").exists()


def test_detectron2s_retinanet_computes_its_anchors_by_code():
    path = model_zoo.get_config_file("COCO-Detection/retinanet_R_50_FPN_1x.yaml")
    with pytest.raises(ConfigError, match="eval"):
        read_config(path)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/name:os.system",
        "a: !!python/tuple [1]",
        "a: !mine 3",
        "SEED: 2026-01-01",
        "SEED: !!set {1, 2}",
        "",
        "3",
        "- SEED",
        "1: 2",
        "? [1, 2]\n: 3",
        b"SEED: \xff\xfe",
        "VERSION: abc",
        "VERSION: 3",
        "MODEL: 3",
        "SOLVER:  # all keys are commented out",
        "SOLVER:\n  MAX_ITER: many",
        "_BASE_: none.yaml",
        "_BASE_: 3",
        "_BASE_: a.yaml",
        "_BASE_: .",
        "a: &a [*a]",
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        read_config(path)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("MODEL.WEIGHTS", "MODEL: {WEIGHTS: null}"),
        ("OUTPUT_DIR", "OUTPUT_DIR: null"),
    ],
)
def test_none_is_no_text(tmp_path, key, text):
    for config_file, opts in [(CONFIG, [key, "None"]), (write(tmp_path, text), [])]:
        with pytest.raises(ConfigError, match=f'{key} .None.: .* Fix: write ""'):
            read_config(config_file, opts)


def billion_laughs():
    """400 bytes that stand for a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 9):
        below = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{below}]")
    lines.append("TRACKER: *a8")
    return "\n".join(lines)


@pytest.mark.parametrize("read", [read_config, read_datasets])
def test_aliases_that_stand_for_a_billion_values_are_refused(tmp_path, read):
    path = write(tmp_path, billion_laughs())
    with pytest.raises(ConfigError, match="alias"):
        read(path)


def test_aliases_count_as_what_they_stand_for():
    many = ", ".join(["*a"] * 400_000)

    assert len(parse_config(f"a: &a 1\nb: [{many}]", "name")["b"]) == 400_000
    with pytest.raises(ConfigError, match="alias"):
        parse_config(f"a: &a [1, 2]\nb: [{many}]", "name")


@pytest.mark.parametrize("values", ["[{}]", "{{x: [{}]}}", "[[{}]]"])
def test_aliases_to_a_long_text_are_refused(values):
    text = "x" * 300_000
    few, many = (", ".join(["*a"] * count) for count in (30, 40))

    assert parse_config(f"a: &a {text}\nb: [{few}]", "name")["b"] == [text] * 30
    with pytest.raises(ConfigError, match=r"'name'.*alias"):
        parse_config(f"a: &a {text}\nb: {values.format(many)}", "name")


@pytest.mark.parametrize(
    "number", ["0x" + "f" * 20_000, ":".join(["59"] * 3000), "9" * 4000]
)
@pytest.mark.parametrize("read", [read_config, read_datasets])
def test_integers_that_python_does_not_print_are_refused(tmp_path, number, read):
    path = write(tmp_path, f"SEED: {number}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml'.*an integer"):
        read(path)


def test_a_wrong_value_of_datasets_yaml_is_shown_in_short(tmp_path):
    path = write(tmp_path, f"train: {{photos: {[['x'] * 99] * 99}}}")
    with pytest.raises(ConfigError, match=r"train\.photos") as raised:
        read_datasets(path)
    assert len(str(raised.value)) < 500


def test_unknown_keys_are_named_with_similar_ones(tmp_path):
    unknown = write(tmp_path, "SOLVER:\n  MAXITER: 3\n")
    with pytest.raises(ConfigError, match=r"SOLVER\.MAXITER.*SOLVER\.MAX_ITER"):
        read_config(unknown)

    merged = write(tmp_path, MERGE)
    with pytest.raises(ConfigError, match="unknown config key 'a'"):
        read_config(merged)


def test_a_yaml_over_its_bases_and_under_the_command_line(tmp_path):
    pixels = "PIXEL_MEAN: &mean [1.0, 2.0, 3.0]\n  PIXEL_STD: *mean\n"
    write(tmp_path, f"_BASE_: {CONFIG}\nMODEL:\n  MASK_ON: off\n  {pixels}", "b.yaml")
    path = write(tmp_path, "_BASE_: b.yaml\nSEED: 3\n")

    cfg = read_config(path, ["SEED", "4"])

    assert cfg.SEED == 4
    assert cfg.MODEL.PIXEL_STD == [1.0, 2.0, 3.0]
    assert not cfg.MODEL.MASK_ON
    assert cfg.MODEL.RESNETS.DEPTH == 18  # from the package's config


def test_a_base_may_be_a_list_and_the_name_of_a_shipped_config(tmp_path):
    write(tmp_path, "SEED: 3\nSOLVER:\n  MAX_ITER: 9\n", "b.yaml")
    path = write(
        tmp_path, "_BASE_: [mask_rcnn_R_18_FPN_BN_GW_demo.yaml, b.yaml]\nSEED: 4\n"
    )

    cfg = read_config(path)

    assert cfg.SEED == 4
    assert cfg.SOLVER.MAX_ITER == 9
    assert cfg.MODEL.RESNETS.DEPTH == 18


def test_bases_of_lists_are_read_in_their_order(tmp_path):
    for name, bases in {"a": "[b, c]", "b": "[d, e]", "c": "[f]"}.items():
        write(tmp_path, f"_BASE_: {bases}\nSEED: 1\n", name)
    for number, name in enumerate("def"):
        write(tmp_path, f"SEED: {number}\n", name)

    layers = config._layers(str(tmp_path / "a"))

    assert "".join(path[-1] for path, _ in layers) == "debfca"


def test_bases_that_are_read_a_billion_times_are_refused(tmp_path, monkeypatch):
    read = []
    parse = config.parse_config
    monkeypatch.setattr(
        config,
        "parse_config",
        lambda text, name: read.append(name) or parse(text, name),
    )
    write(tmp_path, "SEED: 1\n", "b0.yaml")
    for level in range(1, 10):
        below = ", ".join([f"b{level - 1}.yaml"] * 10)
        write(tmp_path, f"_BASE_: [{below}]\n", f"b{level}.yaml")

    with pytest.raises(ConfigError, match=r"b9\.yaml.*100 files by _BASE_.* Fix: "):
        read_config(tmp_path / "b9.yaml")

    assert len(read) <= 100


@pytest.mark.parametrize("base", ["5", "{a: b}", "[[a.yaml]]", "[3]", ""])
def test_a_base_that_is_no_file_is_refused(tmp_path, base):
    path = write(tmp_path, f"_BASE_: {base}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml': _BASE_ .* Fix: "):
        read_config(path)


@pytest.mark.parametrize(
    "code", ["__import__('os').mkdir('{}')", "!!python/object/apply:os.mkdir ['{}']"]
)
def test_values_of_the_command_line_are_not_run(tmp_path, code):
    value = code.format(tmp_path / "harm")

    cfg = read_config(CONFIG, ["MODEL.WEIGHTS", value])

    assert value == cfg.MODEL.WEIGHTS
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["MODEL.LOAD_PROPOSALS", "True"],
            "LOAD_PROPOSALS",
        ),  # Detectron2 unpickles proposal files
        (["SEED", "3", "--config-file", "x.yaml"], "--config-file"),
        (["SEED"], "SEED"),
        (
            ["OUTPUT_DIR", "2024"],
            "OUTPUT_DIR",
        ),  # a text that reads as a number; "'2024'" is one that does not
        *(
            ([key, "1"], "Arguments")
            for key in (
                "",
                ".",
                "MODEL",
                "MODEL.",
                "MODEL.DEVICE.c",
                "_BASE_",
                "MODEL.X",
            )
        ),
    ],
)
def test_words_of_the_command_line_that_are_refused(words, named):
    with pytest.raises(ConfigError, match=named):
        read_config(CONFIG, words)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--", "SEED", "3"], "SEED", 3),
        (["OUTPUT_DIR", "'2024'"], "OUTPUT_DIR", "2024"),
    ],
)
def test_words_of_the_command_line_that_are_read(words, key, value):
    assert read_config(CONFIG, words)[key] == value


def test_a_changed_config_is_a_copy():
    cfg = read_config(CONFIG)
    seed, norm = cfg.SEED, cfg.MODEL.FPN.NORM
    cfg.freeze()

    changed = changed_config(cfg, {"SEED": 3, "MODEL.FPN.NORM": "GW"})

    assert changed.SEED == 3
    assert changed.MODEL.FPN.NORM == "GW"
    assert not changed.is_frozen()
    assert seed == cfg.SEED
    assert norm == cfg.MODEL.FPN.NORM


def test_configs_that_train_are_listed_without_their_parts():
    parts = shipped_configs().keys() - set(list_configs())

    assert list_configs() == sorted(list_configs())
    assert "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml" in list_configs()
    assert "Base-RCNN-FPN.yaml" in parts
    for name in parts:
        assert name.startswith("common/") or "Base-" in name
