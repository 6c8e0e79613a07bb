"""gw-detectron: overview, exit statuses, help, and commands without a test elsewhere."""

import importlib
import shlex
import subprocess
import sys

import pytest

from gw_detectron.config import (
    find_config_file,
    get_value,
    given_keys,
    list_configs,
    read_config,
    shipped_configs,
)
from gw_detectron.errors import UserError
from gw_detectron.workbench import commands
from gw_detectron.workbench.commands import COMMANDS

from ...tiny_run import config_of

CONFIG = "COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml"
DEMO = "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"


@pytest.fixture
def gw(monkeypatch, capsys):
    """Run `gw-detectron` in this process; return exit status, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["gw-detectron", *words])
        try:
            commands.main()
        except SystemExit as ended:
            status = ended.code
        else:
            status = 0
        return status, *capsys.readouterr()

    return run


def get_parser(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"gw-detectron {name}"])
    module = importlib.import_module(
        f"gw_detectron.workbench.commands.{COMMANDS[name].module}"
    )
    return module.get_parser(**COMMANDS[name].options)


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_overview_names_every_command(gw, words):
    status, printed, errors = gw(*words)

    assert status == 0
    assert not errors
    names = {line.split()[0] for line in printed.splitlines() if line.startswith("  ")}
    assert names == set(COMMANDS)


def test_an_unknown_command_is_refused(gw):
    status, printed, errors = gw("trian")

    assert status == 2
    assert not printed
    assert "trian" in errors


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_example_in_the_help_is_accepted(name, monkeypatch):
    parser = get_parser(name, monkeypatch)
    prompt = f"gw-detectron {name}"
    lines = parser.format_help().replace("\\\n", "").splitlines()
    examples = [line.strip() for line in lines if line.strip().startswith(prompt)]

    assert examples
    for example in examples:
        parser.parse_args(shlex.split(example.removeprefix(prompt)))


def test_eval_is_train_with_eval_only(gw, monkeypatch):
    seen = []
    train = importlib.import_module("gw_detectron.workbench.commands.train")
    monkeypatch.setattr(train, "main", seen.append)
    for name in ("eval", "train"):
        gw(name, "--config-file", CONFIG, "SEED", "1")

    evaluated, trained = seen
    assert evaluated.eval_only
    assert not trained.eval_only
    assert evaluated.config_file == CONFIG
    assert evaluated.opts == ["SEED", "1"]
    assert "--val-fraction" not in train.get_parser(evaluation=True).epilog


def test_the_module_is_the_command_and_the_end_of_its_pipe_is_quiet():
    command = (
        f"{sys.executable} -m gw_detectron list norms --config-file {CONFIG} | head -1"
    )
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )

    assert done.stdout.count("\n") == 1
    assert not done.stderr


def test_help_on_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gw_detectron", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert done.stderr.startswith("<stdout>: No space left on device. ")
    assert "Traceback" not in done.stderr


def test_configs_are_listed_and_searched(gw):
    _, printed, _ = gw("list", "configs")
    names = [line for line in printed.splitlines() if line[0] != " "]
    assert names == list_configs()

    _, printed, _ = gw("list", "configs", "GW", "r_101")
    names = printed.splitlines()[::2]
    assert names
    assert all("GW" in name and "R_101" in name for name in names)

    _, printed, _ = gw("list", "configs", "on a cpu", "instant")
    assert "instant.yaml\n    A few iterations of" in printed


def test_a_search_without_a_config_and_a_lazy_config_are_refused(gw):
    lazy = next(name for name in list_configs() if name.endswith(".py"))
    for words in (("configs", "no-such-model"), ("norms", "--config-file", lazy)):
        status, _, errors = gw("list", *words)
        assert status == 1
        assert words[-1] in errors


def test_norms_are_listed_with_their_defaults_and_found_in_a_model(gw):
    _, printed, _ = gw("list", "norms")
    assert all(name in printed for name in ("BW", "FrozenBN", "zca_entropy"))
    (row,) = [line for line in printed.splitlines() if line.startswith("GW ")]
    assert row.split()[1:3] == ["groups=64,iters=5,eps=1e-05,solver=newton", "groups,"]

    _, printed, _ = gw("list", "norms", "--config-file", CONFIG)
    name = "backbone.bottom_up.stem.conv1.norm"
    (stem,) = [line for line in printed.splitlines() if name in line]
    assert "GW" in stem


@pytest.mark.parametrize(
    "name",
    [
        "mask_rcnn_R_18_FPN_BN_GW_demo.yaml",
        "mask_rcnn_R_18_FPN_BN_GW_demo",
        f"configs/{DEMO}",
        DEMO,
        DEMO.removesuffix(".yaml"),
    ],
)
def test_the_folder_of_a_config_may_be_left_out(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config_file(name) == str(shipped_configs()[DEMO])


def test_a_file_of_the_user_comes_before_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick_schedules").mkdir()
    (tmp_path / DEMO).write_text("SEED: 5\n")

    assert read_config(DEMO).SEED == 5
    cfg = read_config(DEMO, ["SOLVER.MAX_ITER", 5, "SOLVER.STEPS", (1, 2)])
    assert cfg.SOLVER.STEPS == (1, 2)


def test_similar_configs_are_named():
    with pytest.raises(FileNotFoundError, match="mask_rcnn_R_18_FPN_BN_GW_demo.yaml"):
        read_config("mask_rcnn_R_18_FPN_BN_GV_demo.yaml")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["SOLVER.BASE_LR=0.1"], "SOLVER.BASE_LR=0.1"),
        (["SEED=3", "SOLVER.MAX_ITER=4"], "SEED=3"),
        (["SEED", "3", "weights.pth"], "weights.pth"),
    ],
)
def test_words_that_are_no_pairs_are_named(words, named):
    with pytest.raises(UserError, match=named):
        read_config(CONFIG, words)


def test_a_value_may_have_an_equals_sign():
    cfg = read_config(CONFIG, ["MODEL.FPN.NORM", "GW:groups=32"])
    assert cfg.MODEL.FPN.NORM == "GW:groups=32"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", 50),
        ("SOLVER.WEIGHT_DECAY", 0),
        ("SOLVER.EMA", 0),
        ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 1),
    ],
)
def test_a_whole_number_is_a_rate(tmp_path, key, value):
    *nodes, name = key.split(".")
    text = f"{name}: {value}"
    for node in reversed(nodes):
        text = f"{node}: {{{text}}}"
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"_BASE_: {CONFIG}\n{text}\n")

    assert get_value(read_config(CONFIG, [key, str(value)]), key) == value
    assert get_value(read_config(mine), key) == value
    with pytest.raises(UserError, match=key):
        read_config(CONFIG, [key, "high"])


@pytest.mark.parametrize(
    "base",
    [DEMO, f"configs/{DEMO}", "mask_rcnn_R_18_FPN_BN_GW_demo", "['{}', local.yaml]"],
)
def test_a_base_may_be_the_name_of_a_shipped_config(tmp_path, base):
    mine = tmp_path / "mine.yaml"
    mine.write_text("_BASE_: middle.yaml\nVERSION: 2\n")
    (tmp_path / "local.yaml").write_text("SOLVER: {MAX_ITER: 5}\n")
    (tmp_path / "middle.yaml").write_text(f"_BASE_: {base.format(DEMO)}\nSEED: 3\n")
    cfg = read_config(mine)

    assert cfg.SEED == 3
    assert cfg.MODEL.RESNETS.DEPTH == 18
    assert (cfg.SOLVER.MAX_ITER == 5) == ("local" in base)
    keys = given_keys(str(mine))
    assert "SEED" in keys
    assert "MODEL.RESNETS.DEPTH" not in keys


def test_flags_may_stand_between_words(tmp_path, monkeypatch, capsys):
    predict = get_parser("predict", monkeypatch)
    args = predict.parse_args(
        ["run", "--tiles", "9", "a", "--output", "x", "--opts", "A"]
    )
    assert args.inputs == ["a"]
    assert args.tiles == 9
    assert args.opts == ["A"]

    report = get_parser("report", monkeypatch)
    assert report.parse_args(["a", "--output", "x", "b"]).runs == ["a", "b"]

    export = get_parser("export", monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").mkdir()
    with pytest.raises(SystemExit):
        export.parse_args(["--format", "onnx", "my run", "--output", "x"])
    assert "put it first: gw-detectron export 'my run' ..." in capsys.readouterr().err


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "config.yaml").write_text(f"_BASE_: {CONFIG}\nOUTPUT_DIR: elsewhere\n")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    (tmp_path / "model_final.pth").touch()
    return tmp_path


@pytest.mark.parametrize("file", ["", "model_final.pth"])
def test_a_run_is_named_in_the_same_way_everywhere(run_folder, monkeypatch, file):
    run = str(run_folder / file)
    evaluation = get_parser("eval", monkeypatch)
    cfg = config_of(evaluation.parse_args([run, "--num-gpus", "0", "SEED", "5"]))
    assert str(run_folder) == cfg.OUTPUT_DIR
    assert str(run_folder / "model_final.pth") == cfg.MODEL.WEIGHTS
    assert cfg.SEED == 5

    training = get_parser("train", monkeypatch)
    cfg = config_of(training.parse_args([run, "--resume", "--num-gpus", "0"]))
    assert str(run_folder) == cfg.OUTPUT_DIR
    assert cfg.MODEL.WEIGHTS == "gw://imagenet/R-50"

    export = get_parser("export", monkeypatch)
    assert export.parse_args([run, "--output", "x", "SEED", "5"]).run == run


def test_a_run_folder_is_described_by_its_weights(gw, run_folder):
    _, _, errors = gw("weights", "describe", str(run_folder))

    assert find_config_file(run_folder) == str(run_folder / "config.yaml")
    assert str(run_folder / "model_final.pth") in errors  # an empty file


def test_a_run_that_does_not_exist_is_named_and_a_key_is_no_run(monkeypatch):
    evaluation = get_parser("eval", monkeypatch)
    with pytest.raises(FileNotFoundError, match="no/run"):
        config_of(evaluation.parse_args(["no/run", "--num-gpus", "0"]))

    args = evaluation.parse_args(["MODEL.WEIGHTS", "x"])
    assert args.run is None
    assert args.opts == ["MODEL.WEIGHTS", "x"]
