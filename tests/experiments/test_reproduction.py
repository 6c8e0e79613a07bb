"""The rows of MODEL_ZOO.md are run, and only the numbers of unchanged runs become those of a row."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from experiments import reproduce
from experiments.reproduction import zoo_rows
from experiments.reproduction.run_result import final_metrics, read_run
from experiments.reproduction.zoo_rows import ZooRow, read_records, state_of
from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, DataError, MissingFileError
from gw_detectron.model_zoo import get_config_file

from ..tiny_run import OPTS, ROOT
from ..tiny_run import dataset as tiny_dataset

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


# --- the result of a run --------------------------------------------------------------------------------


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


def test_the_record_of_a_run(tmp_path):
    found = read_run(CONFIG, 1, make_run(tmp_path / "run"), "log.txt")
    assert (found["bbox/AP"], found["bbox/AP50"], found["changes"]) == (12.346, 0.0, {})
    assert found["seconds"] == 25 and found["seed"] == 3 and found["commits"] == ["c" * 40]
    assert found["log"] == "log.txt" and "bbox/APs" not in found


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (("OUTPUT_DIR", "there", "SEED", 5, "DATALOADER.NUM_WORKERS", 3, "SOLVER.CHECKPOINT_PERIOD", 7), {}),
        (("SOLVER.BASE_LR", 0.01), {"SOLVER.BASE_LR": "0.05 in the row, 0.01 here"}),
        (("DATASETS.TEST", "('mine',)"), {"DATASETS.TEST": "['gw_synthetic_val'] in the row, ['mine'] here"}),
        (("MODEL.RESNETS.NORM", "GN"), {"MODEL.RESNETS.NORM": "'BN' in the row, 'GN' here"}),
    ],
)
def test_changed_options_are_found(tmp_path, options, changed):
    assert changes_of(make_run(tmp_path / "run", cfg_of(*options))) == changed


def test_changed_options_of_an_earlier_part_are_found(tmp_path):
    part = {"config": cfg_of("SOLVER.IMS_PER_BATCH", 16), "processes": 1, "versions": {"commit": "d" * 40}}
    folder = make_run(tmp_path / "run", earlier_parts=[part])
    assert changes_of(folder) == {"SOLVER.IMS_PER_BATCH": "4 in the row, 16 here"}
    assert read_run(CONFIG, 1, folder, "")["commits"] == ["d" * 40, "c" * 40]


@pytest.mark.parametrize(
    ("norms", "processes", "changed"),
    [
        ("BN", 2, True),
        ("BN", 1, False),
        ("BW:channels=64,sync=False", 2, True),
        ("BW:channels=64,sync=True", 2, False),
        ("GN", 2, False),
        ("FrozenBN", 2, False),
        ("SyncBN", 2, False),
    ],
)
def test_the_number_of_gpus_belongs_to_a_row_with_batch_statistics(tmp_path, norms, processes, changed):
    folder = make_run(tmp_path / "run", norms=norms, processes=processes)
    assert changes_of(folder) == ({"--num-gpus": f"1 in the row, {processes} here"} if changed else {})


def test_a_checkpoint_without_a_record_is_refused(tmp_path):
    folder = make_run(tmp_path / "run")
    torch.save({"model": {"a": torch.zeros(1)}}, folder / "model_final.pth")
    with pytest.raises(ConfigError, match=r"model_final.pth': no record of its run. Fix: train it"):
        read_run(CONFIG, 1, folder, "")


def test_a_run_is_finished_after_its_last_evaluation(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = (folder / "metrics.json").read_text().splitlines()
    assert final_metrics(folder) == {"bbox/AP": 12.346, "bbox/AP50": 0.0}
    periodic = '{"iteration": 4, "bbox/AP": 1.0}'
    (folder / "metrics.json").write_text("\n".join([*lines[:-1], periodic, lines[-1][:20]]))  # killed while it wrote
    assert final_metrics(folder) is None
    (folder / "metrics.json").write_text('{"iteration": 10, "sem_seg/mIoU": 40.0}')
    assert final_metrics(folder) == {}
    assert state_of(ZooRow("run.yaml", 8), tmp_path) == "finished: no box AP"
    (folder / "model_final.pth").unlink()
    assert final_metrics(folder) is None


# --- the tool -------------------------------------------------------------------------------------------

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


def arguments(place, *words):
    places = ["--zoo", place / "ZOO.md", "--records", place / "data" / "r.jsonl", "--output", place / "out"]
    return reproduce.get_parser().parse_args([str(word) for word in (*places, *words)])


def main(place, *words):
    return reproduce.main(arguments(place, *words))


def test_a_failed_row_is_named_and_the_others_go_on(place, monkeypatch, capsys):
    monkeypatch.setenv("BAD_ROW", "faster")
    assert not main(place, "--table", "", "--gpus", 8)
    printed = capsys.readouterr().out
    assert f"FAILED {CONFIG[:-5]}: exit status 1: the row is bad" in printed
    assert f"[2/2] start {OTHER[:-5]}, not started" in printed and f"done {OTHER[:-5]}: box AP 12.35" in printed
    assert printed.endswith(f"1 of 2 rows failed: {CONFIG[:-5]}\n")
    monkeypatch.setenv("BAD_ROW", "retinanet")  # it is finished and not run again
    assert main(place, "--table", "", "--gpus", 8)
    log = (place / "out" / CONFIG[:-5] / "process.txt").read_text()
    assert log.count("--num-gpus 1 --resume") == 2  # a row of one GPU
    assert "--num-gpus 8 --resume" in (place / "out" / OTHER[:-5] / "process.txt").read_text()


def test_dry_run_then_write(place, capsys):
    before = (place / "ZOO.md").read_text()
    assert main(place, "--table", "9", "--dry-run")
    assert capsys.readouterr().out == f"{CONFIG[:-5]}: not started\n" and not (place / "out").exists()
    assert main(place, "--table", "9", "--write")
    assert (place / "ZOO.md").read_text() == before and not (place / "data").exists()
    make_run(place / "out" / CONFIG[:-5])
    (place / "out" / OTHER[:-5]).mkdir()
    (place / "out" / OTHER[:-5] / "last_checkpoint").write_text("model_0000004.pth")
    capsys.readouterr()
    assert main(place, "--table", "", "--dry-run")
    assert capsys.readouterr().out.splitlines() == [
        f"{CONFIG[:-5]}: finished: box AP 12.35",
        f"{OTHER[:-5]}: continues from model_0000004.pth",
    ]
    assert main(place, "--table", "", "--write", "--log-url", "https://logs.org/r/")
    (record,) = read_records(place / "data" / "r.jsonl")
    assert record["log"] == f"https://logs.org/r/{CONFIG[:-5]}/log.txt"
    page = (place / "ZOO.md").read_text()
    assert f"[log]({record['log']})" in page and "| 12.35 |" in page
    assert main(place, "--table", "", "--write")  # the new record replaces the old one
    assert len(read_records(place / "data" / "r.jsonl")) == 1


def test_a_changed_run_never_replaces_the_row(place):
    make_run(place / "out" / CONFIG[:-5])
    assert main(place, "--table", "9", "--write")
    make_run(place / "short" / CONFIG[:-5], cfg_of("SOLVER.MAX_ITER", 5))
    assert main(place, "--table", "9", "--write", "--output", place / "short")
    first, second = read_records(place / "data" / "r.jsonl")
    assert first["changes"] == {} and second["changes"] == {"SOLVER.MAX_ITER": "10 in the row, 5 here"}
    assert "## Runs with changed options" in (place / "ZOO.md").read_text()


def test_a_folder_of_other_options_is_not_continued(place):
    make_run(place / "out" / CONFIG[:-5])
    with pytest.raises(ConfigError, match=r"was run with other options: SOLVER.MAX_ITER 10 in the folder, 5 here"):
        main(place, "--table", "9", "--gpus", 0, "SOLVER.MAX_ITER", 5)


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--table", "7"], ConfigError, r"--table \('7'\): no heading in .* Fix: give 4, 5 or a heading"),
        (["--table", "9", "--rows", "*", "x*"], ConfigError, r"--rows \('x\*'\): none in this table"),
        (["--table", "9", "--gpus", "-1"], ConfigError, r"--gpus \(-1\): negative"),
        (["--table", "9", "--write", "SEED", "1"], ConfigError, "SEED 1: --write runs nothing"),
        (["--table", "9", "--zoo", "none.md"], MissingFileError, r"--zoo \('none.md'\): file not found"),
    ],
)
def test_wrong_flags(place, words, error, message):
    with pytest.raises(error, match=message):
        main(place, *words)


def test_a_damaged_record_is_named(place):
    make_run(place / "out" / CONFIG[:-5])
    (place / "data").mkdir()
    (place / "data" / "r.jsonl").write_text('{"config": "a"}\n')
    with pytest.raises(DataError, match=r"r.jsonl', line 1: not the result of a run: KeyError"):
        main(place, "--table", "9", "--write")
    assert "12.35" not in (place / "ZOO.md").read_text()


# --- a real run -----------------------------------------------------------------------------------------


DEMO = "quick_schedules/mask_rcnn_R_18_FPN_GW_demo.yaml"


@pytest.mark.slow
def test_a_killed_training_is_continued(tmp_path, monkeypatch, capsys):
    page = f"## Demo (Table 1)\n\n| Config | mask AP, ours |\n| --- | --- |\n| [M](configs/{DEMO}) | |\n"
    (tmp_path / "ZOO.md").write_text(page)
    monkeypatch.setattr(zoo_rows, "_TRAIN", (str(ROOT / "tests" / "tiny_run.py"), str(ROOT / "tools" / "train_net.py")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = OPTS | {"SOLVER.MAX_ITER": 40, "SOLVER.STEPS": "(30,)", "SOLVER.CHECKPOINT_PERIOD": 10}
    words = ["--table", "1", "--gpus", 0, *(word for pair in options.items() for word in pair)]
    folder = tmp_path / "out" / DEMO[:-5]
    start_python = zoo_rows.start_python

    def killed_after_a_checkpoint(*args):
        process = start_python(*args)
        threading.Thread(target=_kill, args=(process.pid, folder / "last_checkpoint"), daemon=True).start()
        return process

    with tiny_dataset(tmp_path / "data"):
        monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "data"))
        with monkeypatch.context() as patch:
            patch.setattr(zoo_rows, "start_python", killed_after_a_checkpoint)
            assert not main(tmp_path, *words)
        assert f"FAILED {DEMO[:-5]}: exit status -9" in capsys.readouterr().out
        assert main(tmp_path, *words)
    assert f"start {DEMO[:-5]}, continues from model_00000" in capsys.readouterr().out
    assert main(tmp_path, "--table", "1", "--write")
    (record,) = read_records(tmp_path / "data" / "r.jsonl")
    assert record["processes"] == 1 and record["versions"]["torch"] == torch.__version__ and record["seconds"] > 0
    assert {"SOLVER.MAX_ITER", "MODEL.FPN.OUT_CHANNELS"} <= record["changes"].keys()
    assert f"| [M](configs/{DEMO}) | |\n" in (tmp_path / "ZOO.md").read_text()  # the options were changed


def _kill(process: int, checkpoint: Path) -> None:
    while not checkpoint.exists():
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
