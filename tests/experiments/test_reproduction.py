"""The rows of MODEL_ZOO.md are run one after the other, and listed with their AP."""

import json
from pathlib import Path

import pytest

from experiments import reproduce, zoo_rows
from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError
from gw_detectron.model_zoo import get_config_file

from ..coco_rows import LAYOUTS
from ..tiny_run import ROOT

CONFIG = "quick_schedules/faster_rcnn_R_18_FPN_GW_instant.yaml"
OTHER = "quick_schedules/retinanet_R_18_FPN_GW_instant.yaml"
PAGE = f"""# Zoo

## Quick rows (Table 9)

| Config, one GPU | AP, paper |
| --- | --- |
| [B](configs/{CONFIG}) | 1.00 |

## Masks

| Config | AP, paper |
| --- | --- |
| [M](configs/{OTHER}) | - |
"""


def cfg_of(*options, config=CONFIG):
    return read_config(get_config_file(config), [str(option) for option in options]).dump()


def make_run(folder, config=None):
    """Write the files of a finished run that trained nothing."""
    folder.mkdir(parents=True)
    (folder / "model_final.pth").touch()
    (folder / "config.yaml").write_text(config or cfg_of())
    last = {"iteration": 10, "bbox/AP": 12.3456, "bbox/AP50": float("nan"), "bbox/APs": 1.0}
    (folder / "metrics.json").write_text(f'{{"iteration": 4}}\n{{"iteration": 9}}\n{json.dumps(last)}\n')


TRAIN = """
import os, shutil, sys
words = sys.argv[1:]
folder = words[words.index("OUTPUT_DIR") + 1]
print(*words)
if os.environ["BAD_ROW"] in folder:
    sys.exit("the row is bad")
shutil.copytree(os.path.join(os.environ["FINISHED"], os.path.basename(folder)), folder, dirs_exist_ok=True)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A page of two rows, and a train_net.py that copies the files of a finished run."""
    (tmp_path / "ZOO.md").write_text(PAGE)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setattr(zoo_rows, "_TRAIN", ("-S", str(tmp_path / "train.py")))
    for config in (CONFIG, OTHER):
        make_run(tmp_path / "finished" / Path(config).stem, cfg_of(config=config))
    monkeypatch.setenv("FINISHED", str(tmp_path / "finished"))
    monkeypatch.setenv("BAD_ROW", "nothing")
    return tmp_path


def main(place, *words):
    places = ["--zoo", place / "ZOO.md", "--output", place / "out"]
    return reproduce.main(reproduce.get_parser().parse_args([str(word) for word in (*places, *words)]))


def test_a_failed_row_is_named_and_the_others_go_on(place, monkeypatch, capsys):
    monkeypatch.setenv("BAD_ROW", "faster")
    assert not main(place, "--table", "", "--gpus", 8)
    printed = capsys.readouterr().out
    assert f"FAILED {CONFIG[:-5]}: exit status 1" in printed and f"done {OTHER[:-5]}" in printed
    monkeypatch.setenv("BAD_ROW", "retinanet")  # it is finished and not run again
    assert main(place, "--table", "", "--gpus", 8)
    log = (place / "out" / CONFIG[:-5] / "process.txt").read_text()
    assert log.count("--num-gpus 1 --resume") == 2  # a row of one GPU
    assert "--num-gpus 8 --resume" in (place / "out" / OTHER[:-5] / "process.txt").read_text()


def test_the_state_of_a_row_has_its_ap_and_its_changed_options(place, capsys):
    same = ("SEED", 5, "DATALOADER.NUM_WORKERS", 3)
    make_run(place / "out" / CONFIG[:-5], cfg_of(*same, "SOLVER.BASE_LR", 0.01))
    (place / "out" / OTHER[:-5]).mkdir()
    (place / "out" / OTHER[:-5] / "last_checkpoint").write_text("model_0000004.pth")
    assert main(place, "--table", "", "--dry-run")
    finished, continued = capsys.readouterr().out.splitlines()
    assert finished.endswith("finished: box AP 12.35; changed: SOLVER.BASE_LR") and "model_0000004.pth" in continued
    assert main(place, "--table", "9", "--dry-run")
    assert capsys.readouterr().out.splitlines() == [finished]
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER"):  # the folder has other options
        main(place, "--table", "9", "--gpus", 0, "SOLVER.MAX_ITER", 5)


def test_every_coco_config_is_a_row():
    rows = {row.config for _, row in zoo_rows.zoo_rows((ROOT / "MODEL_ZOO.md").read_text())}
    assert {f"{name}.yaml" for name in LAYOUTS} <= rows
