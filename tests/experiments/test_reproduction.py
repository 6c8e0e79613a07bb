"""The rows of MODEL_ZOO.md are run, and only the numbers of unchanged runs become those of a row."""

import json
from pathlib import Path

import pytest
import torch

from experiments import reproduce
from experiments.reproduction import zoo_rows
from experiments.reproduction.run_result import read_run
from experiments.reproduction.zoo_page import fill_page, table_rows
from experiments.reproduction.zoo_rows import read_records
from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, DataError
from gw_detectron.model_zoo import get_config_file

from ..coco_rows import LAYOUTS
from ..tiny_run import ROOT

CONFIG = "quick_schedules/faster_rcnn_R_18_FPN_GW_instant.yaml"
OTHER = "quick_schedules/retinanet_R_18_FPN_GW_instant.yaml"
PAGE = f"""# Zoo

## Quick rows (Table 9)

| Config, one GPU | AP, ours, one GPU |
| --- | --- |
| [B](configs/{CONFIG}) | |

## Masks

| Config | AP, ours |
| --- | --- |
| [M](configs/{OTHER}) | |
"""


def cfg_of(*options, config=CONFIG):
    return read_config(get_config_file(config), [str(option) for option in options]).dump()


def make_run(folder, config=None, *, norms="GW", **record):
    """Write the files of a finished run that trained nothing."""
    folder.mkdir(parents=True)
    config = config or cfg_of()
    versions = {"commit": "c" * 40, "torch": "2", "detectron2": "0.5"}
    entries = {"config": config, "versions": versions, "processes": 1, "seed": 3, "start_weights": {}, **record}
    torch.save({"model": {"a": torch.zeros(1)}, "record": entries, "norms": {"a": norms}}, folder / "model_final.pth")
    (folder / "config.yaml").write_text(config)
    lines = ['{"iteration": 4, "time": 2.5}', '{"iteration": 9, "time": 4.0}', '{"iteration": 9, "time": 2.5}']
    evaluation = {"iteration": 10, "bbox/AP": 12.3456, "bbox/AP50": float("nan"), "bbox/APs": 1.0}
    (folder / "metrics.json").write_text("\n".join([*lines, json.dumps(evaluation), ""]))
    return folder


def changes_of(folder, gpus=1):
    return read_run(CONFIG, gpus, folder, "log.txt")["changes"]


def test_the_record_of_a_run_has_its_changed_options(tmp_path):
    same = ("OUTPUT_DIR", "there", "SEED", 5, "DATALOADER.NUM_WORKERS", 3, "SOLVER.CHECKPOINT_PERIOD", 7)
    found = read_run(CONFIG, 1, make_run(tmp_path / "run", cfg_of(*same)), "log.txt")
    assert (found["bbox/AP"], found["bbox/AP50"], found["changes"]) == (12.346, 0.0, {})
    assert found["seconds"] == 25 and found["commits"] == ["c" * 40] and "bbox/APs" not in found
    changes = changes_of(make_run(tmp_path / "other", cfg_of("SOLVER.BASE_LR", 0.01, "DATASETS.TEST", "('mine',)")))
    assert changes.keys() == {"SOLVER.BASE_LR", "DATASETS.TEST"}


@pytest.mark.parametrize(
    ("norms", "processes", "changed"),
    [
        ("BN", 2, True),
        ("BN", 1, False),
        ("BW:channels=64,sync=True", 2, False),
        ("GN", 2, False),
    ],
)
def test_the_number_of_gpus_belongs_to_a_row_with_batch_statistics(tmp_path, norms, processes, changed):
    folder = make_run(tmp_path / "run", norms=norms, processes=processes)
    assert changes_of(folder) == ({"--num-gpus": f"1 in the row, {processes} here"} if changed else {})


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
    places = ["--zoo", place / "ZOO.md", "--records", place / "data" / "r.jsonl", "--output", place / "out"]
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


def test_finished_rows_are_written_and_damaged_records_refused(place, capsys):
    before = (place / "ZOO.md").read_text()
    assert main(place, "--table", "9", "--write")
    assert (place / "ZOO.md").read_text() == before and not (place / "data").exists()
    make_run(place / "out" / CONFIG[:-5])
    (place / "out" / OTHER[:-5]).mkdir()
    (place / "out" / OTHER[:-5] / "last_checkpoint").write_text("model_0000004.pth")
    assert main(place, "--table", "", "--dry-run")
    finished, continued = capsys.readouterr().out.splitlines()[-2:]
    assert "12.35" in finished and "model_0000004.pth" in continued
    for _ in range(2):  # the new record replaces the old one
        assert main(place, "--table", "", "--write", "--log-url", "https://logs.org/r/")
        (record,) = read_records(place / "data" / "r.jsonl")
    assert record["log"] == f"https://logs.org/r/{CONFIG[:-5]}/log.txt"
    assert f"[log]({record['log']})" in (place / "ZOO.md").read_text()
    with pytest.raises(ConfigError, match=r"SOLVER\.MAX_ITER"):  # the folder has other options
        main(place, "--table", "9", "--gpus", 0, "SOLVER.MAX_ITER", 5)
    (place / "data" / "r.jsonl").write_text('{"config": "a"}\n')
    with pytest.raises(DataError, match=r"r\.jsonl', line 1"):
        main(place, "--table", "9", "--write")


ZOO_PAGE = f"""# Zoo

## Quick rows (Table 9)

| Config, 8 GPUs | Config, one GPU | AP, paper | AP, ours, 8 GPUs | AP75, ours, one GPU |
| --- | --- | --- | --- | --- |
| [A](configs/a.yaml) | [B](configs/{CONFIG}) | 1.00 | | 7.77 |
| Detectron2's | `c` | - | | |

## Masks

| Config | box AP / AP50, paper | box AP, ours | mask AP, ours |
| :--- | --- | --- | ---: |
| [M](configs/{OTHER}) | 2.00 / 3.00 | | |

## The end
"""


def run(config=CONFIG, changes=None, **metrics):
    metrics = {name.replace("_", "/"): value for name, value in metrics.items()}
    versions = {"torch": "2", "detectron2": "0.5", "gpu": "H100"}
    fixed = {"commits": ["a" * 40, "b" * 40 + "-dirty"], "versions": versions, "processes": 8, "seconds": 5400.0}
    return {"config": config, "changes": changes or {}, "log": "out/log.txt", **fixed, **metrics}


def test_numbers_go_to_their_cells_and_nothing_else_changes():
    runs = [run(bbox_AP=38.126, bbox_AP75=41.0), run(OTHER, bbox_AP=44.4, segm_AP=39.0)]
    filled = fill_page(ZOO_PAGE, runs)
    old, new = ZOO_PAGE.splitlines(), filled.splitlines()
    assert [b for a, b in zip(old, new, strict=False) if a != b] == [
        f"| [A](configs/a.yaml) | [B](configs/{CONFIG}) | 1.00 | | 41.00 |",
        f"| [M](configs/{OTHER}) | 2.00 / 3.00 | 44.40 | 39.00 |",
    ]
    assert new[len(old) + 1] == '## Runs behind the columns "ours"'
    changed = run(changes={"SOLVER.MAX_ITER": "10 in the row, 3 here"}, bbox_AP75=55.0, bbox_AP=56.0)
    assert "55.00" not in fill_page(ZOO_PAGE, [changed])  # a changed run has a table of its own
    assert fill_page(filled, runs) == filled
    assert fill_page(filled, []) == ZOO_PAGE.replace("7.77 |", "|")  # a number without a record is removed


def test_model_zoo_follows_from_the_records():
    """A number that was typed in, or a record that was not written, is found here."""
    page = (ROOT / "MODEL_ZOO.md").read_text()
    assert fill_page(page, read_records(ROOT / "docs" / "data" / "reproduced.jsonl")) == page
    assert {f"{name}.yaml" for name in LAYOUTS} <= set(table_rows(page, ""))
