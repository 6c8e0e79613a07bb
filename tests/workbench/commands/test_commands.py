"""gw-detectron: overview, exit statuses, examples in the help, and the commands that have no test elsewhere."""

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
from gw_detectron.workbench.run.train import run_config

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
    module = importlib.import_module(f"gw_detectron.workbench.commands.{COMMANDS[name].module}")
    return module.get_parser(**COMMANDS[name].options)


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_overview_names_every_command(gw, words):
    status, printed, errors = gw(*words)
    assert status == 0 and not errors
    assert {line.split()[0] for line in printed.splitlines() if line.startswith("  ")} == set(
        COMMANDS
    )


def test_an_unknown_command_is_refused(gw):
    status, printed, errors = gw("trian")
    assert status == 2 and not printed and "trian" in errors


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_example_in_the_help_is_accepted(name, monkeypatch):
    parser = get_parser(name, monkeypatch)
    prompt = f"gw-detectron {name}"
    lines = [line.strip() for line in parser.format_help().replace("\\\n", "").splitlines()]
    examples = [line for line in lines if line.startswith(prompt)]
    assert examples
    for example in examples:
        parser.parse_args(shlex.split(example.removeprefix(prompt)))


def test_eval_is_train_with_eval_only(monkeypatch):
    seen = []
    train = importlib.import_module("gw_detectron.workbench.commands.train")
    monkeypatch.setattr(train, "main", seen.append)
    for name in ("eval", "train"):
        monkeypatch.setattr(
            sys, "argv", ["gw-detectron", name, "--config-file", CONFIG, "SEED", "1"]
        )
        commands.main()
    assert [args.eval_only for args in seen] == [True, False]
    assert seen[0].config_file == CONFIG and seen[0].opts == ["SEED", "1"]
    assert "--val-fraction" not in train.get_parser(evaluation=True).epilog


def test_the_module_is_the_command_and_the_end_of_its_pipe_is_quiet():
    command = f"{sys.executable} -m gw_detectron list norms --config-file {CONFIG} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_configs_are_listed_and_searched(gw):
    assert [
        line for line in gw("list", "configs")[1].splitlines() if line[0] != " "
    ] == list_configs()
    found = gw("list", "configs", "GW", "r_101")[1].splitlines()[::2]
    assert found and all("GW" in name and "R_101" in name for name in found)
    assert (
        "instant.yaml\n    A few iterations of"
        in gw("list", "configs", "on a cpu", "instant")[1]
    )
    lazy = next(name for name in list_configs() if name.endswith(".py"))
    for words, named in (
        (("configs", "no-such-model"), "no-such-model"),
        (("norms", "--config-file", lazy), "LazyC"),
    ):
        status, _, errors = gw("list", *words)
        assert status == 1 and named in errors


def test_norms_are_listed_with_their_defaults_and_found_in_a_model(gw):
    printed = gw("list", "norms")[1]
    assert all(name in printed for name in ("BW", "FrozenBN", "zca_entropy"))
    (row,) = [line for line in printed.splitlines() if line.startswith("GW ")]
    assert row.split()[1:3] == ["groups=64,iters=5,eps=1e-05,solver=newton", "groups,"]
    layers = gw("list", "norms", "--config-file", CONFIG)[1].splitlines()
    (stem,) = [line for line in layers if "backbone.bottom_up.stem.conv1.norm" in line]
    assert "GW" in stem


@pytest.mark.parametrize(
    "name",
    [
        "mask_rcnn_R_18_FPN_BN_GW_demo.yaml",
        "mask_rcnn_R_18_FPN_BN_GW_demo",
        f"configs/{DEMO}",
        DEMO,
    ],
)
def test_the_folder_of_a_config_may_be_left_out(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config_file(name) == str(shipped_configs()[DEMO])
    (tmp_path / "quick_schedules").mkdir()
    (tmp_path / DEMO).write_text("SEED: 5\n")  # a file of the user comes first
    assert read_config(DEMO, ["SOLVER.MAX_ITER", 5, "SOLVER.STEPS", (1, 2)]).SOLVER.STEPS == (
        1,
        2,
    )
    assert read_config(DEMO).SEED == 5


def test_similar_configs_and_words_that_are_no_pairs_are_named():
    with pytest.raises(
        FileNotFoundError, match="Similar: quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"
    ):
        read_config("mask_rcnn_R_18_FPN_BN_GV_demo.yaml")
    for words in (
        ["SOLVER.BASE_LR=0.1"],
        ["SEED=3", "SOLVER.MAX_ITER=4"],
        ["SEED", "3", "weights.pth"],
    ):
        with pytest.raises(UserError, match=words[-1] if len(words) == 3 else words[0]):
            read_config(CONFIG, words)
    assert (
        read_config(CONFIG, ["MODEL.FPN.NORM", "GW:groups=32"]).MODEL.FPN.NORM == "GW:groups=32"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", 50),
        ("SOLVER.WEIGHT_DECAY", 0),
        ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 1),
    ],
)
def test_a_whole_number_for_a_rate_is_explained(key, value):
    with pytest.raises(UserError, match=rf"{key}.*Fix: .*\.0"):
        read_config(CONFIG, [key, str(value)])
    assert get_value(read_config(CONFIG, [key, f"{value}.0"]), key) == value  # the fix


@pytest.mark.parametrize(
    "base", [DEMO, f"configs/{DEMO}", "mask_rcnn_R_18_FPN_BN_GW_demo", "['{}', local.yaml]"]
)
def test_a_base_may_be_the_name_of_a_shipped_config(tmp_path, base):
    (tmp_path / "local.yaml").write_text("SOLVER: {MAX_ITER: 5}\n")
    (tmp_path / "middle.yaml").write_text(f"_BASE_: {base.format(DEMO)}\nSEED: 3\n")
    (tmp_path / "mine.yaml").write_text("_BASE_: middle.yaml\nVERSION: 2\n")
    cfg = read_config(tmp_path / "mine.yaml")
    assert (
        cfg.SEED == 3
        and cfg.MODEL.RESNETS.DEPTH == 18
        and (cfg.SOLVER.MAX_ITER == 5) == ("local" in base)
    )
    keys = given_keys(str(tmp_path / "mine.yaml"))
    assert "SEED" in keys and "MODEL.RESNETS.DEPTH" not in keys
    (tmp_path / "middle.yaml").write_text(
        "_BASE_: ../mask_rcnn_R_18_FPN_BN_GW_demo.yaml\n"
    )  # a file that is gone
    with pytest.raises(UserError, match="mask_rcnn_R_18"):
        read_config(tmp_path / "mine.yaml")


def test_flags_may_stand_between_words(monkeypatch):
    args = get_parser("predict", monkeypatch).parse_args(
        ["run", "--tiles", "9", "a", "--output", "x", "--opts", "A"]
    )
    assert (args.model, args.inputs, args.tiles, args.opts) == ("run", ["a"], 9, ["A"])
    assert get_parser("report", monkeypatch).parse_args(
        ["a", "--output", "x", "b"]
    ).run_folders == ["a", "b"]
    with pytest.raises(SystemExit):
        get_parser("export", monkeypatch).parse_args(
            ["--format", "onnx", "tests", "--output", "x"]
        )


def test_a_run_is_named_in_the_same_way_everywhere(gw, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(f"_BASE_: {CONFIG}\nOUTPUT_DIR: elsewhere\n")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    (tmp_path / "model_final.pth").touch()
    assert find_config_file(tmp_path) == str(tmp_path / "config.yaml")
    for run in (str(tmp_path), f"{tmp_path}/model_final.pth"):
        args = get_parser("eval", monkeypatch).parse_args([run, "--num-gpus", "0", "SEED", "5"])
        cfg = run_config(args)
        assert (str(tmp_path), f"{tmp_path}/model_final.pth", 5) == (
            cfg.OUTPUT_DIR,
            cfg.MODEL.WEIGHTS,
            cfg.SEED,
        )
        args = get_parser("train", monkeypatch).parse_args([run, "--resume", "--num-gpus", "0"])
        assert (str(tmp_path), "gw://imagenet/R-50") == (
            run_config(args).OUTPUT_DIR,
            run_config(args).MODEL.WEIGHTS,
        )
        assert (
            get_parser("export", monkeypatch)
            .parse_args([run, "--output", "x", "SEED", "5"])
            .run
            == run
        )
    assert (
        f"{tmp_path}/model_final.pth" in gw("weights", "describe", str(tmp_path))[2]
    )  # an empty file
    with pytest.raises(FileNotFoundError, match="no/run"):
        run_config(get_parser("eval", monkeypatch).parse_args(["no/run", "--num-gpus", "0"]))
    args = get_parser("eval", monkeypatch).parse_args(["MODEL.WEIGHTS", "x"])
    assert args.run is None and args.opts == ["MODEL.WEIGHTS", "x"]
