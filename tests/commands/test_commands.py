"""gw-detectron: overview, exit statuses, examples in the help, and the commands that have no test elsewhere."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gw_detectron import commands
from gw_detectron.commands import COMMANDS
from gw_detectron.config import read_config
from gw_detectron.errors import UserError
from gw_detectron.model_zoo import get_config_file, list_configs
from gw_detectron.shipped_configs import find_config_file

CONFIG = "COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml"


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
    return importlib.import_module(f"gw_detectron.commands.{COMMANDS[name].module}").get_parser()


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_overview_names_every_command(gw, words):
    status, printed, errors = gw(*words)
    assert status == 0 and not errors
    assert {line.split()[0] for line in printed.splitlines() if line.startswith("  ")} == set(COMMANDS)


def test_an_unknown_command_is_refused(gw):
    status, printed, errors = gw("trian")
    assert status == 2 and not printed and "command ('trian'): unknown. Fix: give one of these." in errors


def test_the_version_is_that_of_the_package(gw):
    from gw_detectron import __version__

    assert gw("--version") == (0, f"gw-detectron {__version__}\n", "")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_example_in_the_help_is_accepted(name, monkeypatch):
    parser = get_parser(name, monkeypatch)
    prompt = f"gw-detectron {name}"
    lines = [line.strip().removeprefix("$ ") for line in parser.format_help().replace("\\\n", "").splitlines()]
    examples = [line for line in lines if line.startswith((f"{prompt} ", prompt)) and "usage" not in line]
    assert len(examples) >= 2
    for example in examples:
        parser.parse_args([*COMMANDS[name].flags, *shlex.split(example.removeprefix(prompt))])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_unknown_flags_have_status_2(gw, name):
    status, _, errors = gw(name, "--no-such-flag")
    assert status == 2 and f"gw-detectron {name}" in errors


def test_eval_is_train_with_eval_only(monkeypatch):
    seen = []
    evaluate = importlib.import_module("gw_detectron.commands.evaluate")
    monkeypatch.setattr(evaluate, "main", lambda args: seen.append(args))
    monkeypatch.setattr(sys, "argv", ["gw-detectron", "eval", "--config-file", CONFIG, "SEED", "1"])
    commands.main()
    assert "output/mine" in evaluate.get_parser().epilog and "--val-fraction" not in evaluate.get_parser().epilog
    assert seen[0].eval_only and seen[0].config_file == CONFIG and seen[0].opts == ["SEED", "1"]


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "gw_detectron", "configs", "list", "R_101_FPN_1x"], capture_output=True
    )
    assert done.returncode == 0 and b"faster_rcnn_R_101_FPN_1x_GW.yaml" in done.stdout and not done.stderr


def test_configs_are_listed_and_searched(gw):
    assert [line for line in gw("configs")[1].splitlines() if line[0] != " "] == list_configs()
    found = gw("configs", "list", "GW", "r_101")[1].splitlines()[::2]
    assert found and all("GW" in name and "R_101" in name for name in found)
    assert "instant.yaml\n    A few iterations of" in gw("configs", "list", "on a cpu", "instant")[1]
    row = json.loads(gw("configs", "list", "--json", "R_101_FPN_1x_GW")[1])[CONFIG.replace("50", "101")]
    assert row["description"].startswith("Faster R-CNN, R-101") and row["file"] == get_config_file(
        CONFIG.replace("50", "101")
    )
    status, _, errors = gw("configs", "list", "no-such-model")
    assert status == 1 and "Fix: give fewer words" in errors


@pytest.mark.parametrize("name", [CONFIG, f"configs/{CONFIG}", get_config_file(CONFIG)])
def test_a_config_is_shown_with_all_keys(gw, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, printed, _ = gw("configs", "show", name, "SOLVER.BASE_LR", "0.5")
    assert status == 0 and yaml.safe_load(printed) == yaml.safe_load(
        read_config(CONFIG, ["SOLVER.BASE_LR", "0.5"]).dump()
    )
    assert (
        json.loads(gw("configs", "show", "--json", name)[1])["SOLVER"]["BASE_LR"] == read_config(CONFIG).SOLVER.BASE_LR
    )


@pytest.mark.parametrize("words", [["--json"], ["SEED", "3", "--json"], ["--json", "SEED", "3"]])
def test_json_may_come_after_the_name(gw, words):
    assert json.loads(gw("configs", "show", CONFIG, *words)[1])["SEED"] == (3 if "SEED" in words else -1)


def test_a_lazy_config_is_no_yaml(gw):
    name = next(name for name in list_configs() if name.endswith(".py"))
    errors = gw("norms", "--config-file", name)[2]
    assert "is a LazyConfig. Fix: train it with Detectron2's tools/lazyconfig_train_net.py" in errors


def test_python_values_as_options():
    cfg = read_config(Path(get_config_file(CONFIG)), ["SOLVER.MAX_ITER", 5, "SOLVER.STEPS", (1, 2)])
    assert cfg.SOLVER.MAX_ITER == 5 and cfg.SOLVER.STEPS == (1, 2)


def test_a_lazy_config_is_shown_as_python(gw):
    name = next(name for name in list_configs() if name.endswith(".py"))
    assert "cfg.train.seed = 3" in gw("configs", "show", name, "train.seed=3")[1]
    assert "Fix: leave --json out" in gw("configs", "show", "--json", name)[2]
    status, _, errors = gw("configs", "show", name, "train.")
    assert status == 1 and "Traceback" not in errors and "Fix: see the file" in errors


def test_an_unknown_config_is_refused(gw):
    status, _, errors = gw("configs", "show", "no/such.yaml")
    assert (
        status == 1
        and "config ('no/such.yaml'): unknown." in errors
        and " Fix: give one of `gw-detectron configs`" in errors
    )
    assert "quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml" in gw("configs", "show", "R_18_FPN_GW_demo")[2]


def test_a_file_of_the_user_comes_before_a_shipped_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "COCO-Detection").mkdir()
    (tmp_path / CONFIG).write_text("SEED: 5\n")
    assert read_config(CONFIG).SEED == 5


def test_norms_are_listed_described_and_found_in_a_model(gw):
    printed = gw("norms")[1]
    assert all(name in printed for name in ("GW", "BW", "FrozenBN", "zca_entropy"))
    (row,) = json.loads(gw("norms", "--json", "GW:groups=16")[1])
    assert row["in full"] == "GW:groups=16,iters=5,eps=1e-05,solver=newton" and row["parameters"] == 512
    layers = {row["layer"]: row["spec"] for row in json.loads(gw("norms", "--json", "--config-file", CONFIG)[1])}
    assert layers["backbone.bottom_up.stem.conv1.norm"].startswith("GW")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["GX"], "unknown norm"),
        (["GW:groups=3", "--channels", "64"], "does not divide 64"),
        (["GW", "--channels", "0"], "--channels (0): too few"),
        (["GW", "--config-file", CONFIG], "give one of the two"),
    ],
)
def test_bad_norms_are_refused(gw, words, message):
    status, _, errors = gw("norms", *words)
    assert status == 1 and message in errors and "Fix: " in errors


def test_a_folder_is_no_checkpoint(gw, tmp_path):
    status, _, errors = gw("describe", str(tmp_path))
    assert status == 1 and "a folder. Fix: give a checkpoint in it, e.g. model_final.pth." in errors


def test_the_end_of_a_pipe_is_quiet():
    command = f"{sys.executable} -m gw_detectron configs show {CONFIG} | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_errors_of_an_unreadable_installation(monkeypatch, tmp_path):
    from gw_detectron import shipped_configs

    monkeypatch.setattr(shipped_configs.importlib.resources, "files", lambda name: tmp_path / name)
    with pytest.raises(FileNotFoundError, match="Fix: install gw_detectron again"):
        shipped_configs.shipped_configs()


@pytest.mark.parametrize("name", ["mask_rcnn_R_18_FPN_GW_demo.yaml", "mask_rcnn_R_18_FPN_GW_demo"])
def test_the_folder_of_a_config_may_be_left_out(name):
    assert find_config_file(name) == get_config_file("quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml")
    assert read_config(name).MODEL.META_ARCHITECTURE == "GeneralizedRCNN"


def test_similar_configs_and_joined_keys_are_named():
    with pytest.raises(UserError, match=r"Similar: quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml"):
        read_config("mask_rcnn_R_18_FPN_GV_demo.yaml")
    with pytest.raises(UserError, match=r"'SOLVER.BASE_LR=0.1': '=' in a key. Fix: write SOLVER.BASE_LR 0.1"):
        read_config(CONFIG, ["SOLVER.BASE_LR=0.1"])
    with pytest.raises(UserError, match=r"'SEED=3': '=' in a key. Fix: write SEED 3"):
        read_config(CONFIG, ["SEED=3", "SOLVER.MAX_ITER=4"])
    with pytest.raises(UserError, match=rf"not pairs of KEY VALUE. Fix: write MODEL.WEIGHTS {__file__}\."):
        read_config(CONFIG, ["SEED", "3", __file__])
    assert read_config(CONFIG, ["MODEL.FPN.NORM", "GW:groups=32"]).MODEL.FPN.NORM == "GW:groups=32"
