"""Metrics of a killed run, and a run in the folder of an earlier one: refused, or in its place."""

import json
import os
from pathlib import Path

import pytest
from detectron2.engine import defaults
from detectron2.utils.file_io import PathManager

from gw_detectron.checkpoint.opening import local_file
from gw_detectron.engine import setup
from gw_detectron.engine.run_files import end_last_line, read_metrics, remove_earlier_run, remove_evaluation
from gw_detectron.engine.train import main, prepare
from gw_detectron.errors import ConfigError, PreflightError

from ..tiny_run import CONFIG, arguments


def test_metrics_of_a_killed_and_resumed_run_are_in_order(tmp_path):
    path = tmp_path / "metrics.json"
    assert read_metrics(path) == []
    lines = [{"iteration": 1, "AP": 3.0}, {"iteration": 3, "AP": 2.0, "loss": 2.0}, {"iteration": 3, "loss": 1.0}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 4, "lo')
    assert read_metrics(path) == [lines[0], {**lines[1], **lines[2]}]
    path.write_text('{"iteration"')
    assert read_metrics(path) == []


def test_lines_of_other_software_are_skipped(tmp_path):
    (tmp_path / "metrics.json").write_bytes(b'{"time": 1}\n[1]\n{"iteration": 3, "lr": 0.1}\n\xff\xfe\n')
    assert read_metrics(tmp_path / "metrics.json") == [{"iteration": 3, "lr": 0.1}]


@pytest.mark.parametrize("end", ["", "\n", '\n{"iteration": 3, "to'])
def test_the_first_record_after_a_kill_is_read(tmp_path, end):
    path = tmp_path / "metrics.json"
    path.write_text('{"iteration": 1}' + end)
    end_last_line(str(tmp_path))
    with open(path, "a") as file:
        file.write('{"iteration": 2}\n')
    assert read_metrics(path) == [{"iteration": 1}, {"iteration": 2}]
    path.write_text("")
    end_last_line(str(tmp_path))
    assert path.read_text() == ""
    path.unlink()
    for folder in (str(tmp_path), "s3://bucket/run"):
        end_last_line(folder)
    assert not path.exists()


def test_the_config_of_an_earlier_start_is_replaced_as_a_whole(tmp_path, small_dataset):
    """Detectron2 rewrites it in place; a kill would leave a part, which often is a valid config."""
    for flags, file in (([], "config.yaml"), (["--eval-only"], "inference/config.yaml")):
        setup(arguments(tmp_path, *flags, SOLVER__BASE_LR=0.1))
        earlier = tmp_path / f"earlier{len(flags)}.yaml"
        os.link(tmp_path / file, earlier)
        setup(arguments(tmp_path, *flags, SOLVER__BASE_LR=0.2))
        assert "BASE_LR: 0.1" in earlier.read_text() and "BASE_LR: 0.2" in (tmp_path / file).read_text()
    assert defaults.PathManager is PathManager


def test_a_config_by_name_is_read_by_detectron2_too(tmp_path, small_dataset):
    args = arguments(tmp_path)
    args.config_file = Path(args.config_file).stem
    setup(args)
    assert args.config_file == str(CONFIG) and (tmp_path / "config.yaml").exists()


@pytest.fixture
def earlier(tmp_path):
    """A folder with the files of a run, and files of the user."""
    names = ("model_final.pth", "model_0000009.pth", "metrics.json", "log.txt", "events.out.tfevents.1", "config.yaml")
    for name in (*names, "inference/coco_instances_results.json", "report/report.html", "notes.txt", "weights.pth"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("earlier")
    (tmp_path / "last_checkpoint").write_text("model_final.pth")
    return tmp_path


def test_files_of_other_processes_and_of_augmented_evaluation_go_too(earlier):
    (earlier / "log.txt.rank1").touch()
    (earlier / "inference_TTA").mkdir()
    remove_earlier_run(str(earlier), everything=True)
    assert names(earlier) == ["config.yaml", "notes.txt", "weights.pth"]


def test_an_earlier_evaluation_goes_and_the_rest_stays(earlier):
    """A report would judge the predictions of the new run by the dataset and weights of the earlier evaluation."""
    config = earlier / "inference" / "config.yaml"
    config.write_text("VERSION: 2")
    remove_evaluation(str(earlier), config=False)
    assert names(earlier / "inference") == ["config.yaml"] and (earlier / "model_final.pth").exists()
    remove_evaluation(str(earlier), needed=[str(config), ""])
    assert names(earlier / "inference") == ["config.yaml"]
    remove_evaluation(str(earlier))
    assert names(earlier / "inference") == []
    remove_evaluation(str(earlier / "none"))
    remove_evaluation("s3://bucket/run")


def test_annotations_that_detectron2_has_converted_are_converted_anew(earlier, small_dataset):
    for name in ("mine_coco_format.json", "mine_coco_format.json.lock", "other.json"):
        (earlier / "inference" / name).touch()
    setup(arguments(earlier, "--eval-only"))
    assert not [name for name in names(earlier / "inference") if "coco_format" in name]
    assert "other.json" in names(earlier / "inference")


def test_a_resumed_training_forgets_the_evaluation_of_an_earlier_checkpoint(tmp_path, small_dataset):
    setup(arguments(tmp_path, "--eval-only"))
    assert "config.yaml" in names(tmp_path / "inference")
    setup(arguments(tmp_path, "--resume"))
    assert "config.yaml" in names(tmp_path) and "config.yaml" not in names(tmp_path / "inference")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_files_of_a_run_are_removed_and_no_others(earlier):
    remove_earlier_run(str(earlier), everything=True, needed=[str(earlier / "model_0000009.pth"), ""])
    assert names(earlier) == ["config.yaml", "model_0000009.pth", "notes.txt", "weights.pth"]


@pytest.mark.parametrize("address", ["{}?matching_heuristics=True", "gw://file/{}"])
def test_start_weights_stay_by_any_address(earlier, address):
    weights = local_file(address.format(earlier / "model_0000009.pth"))
    remove_earlier_run(str(earlier), everything=True, needed=[weights])
    assert names(earlier) == ["config.yaml", "model_0000009.pth", "notes.txt", "weights.pth"]


def test_nothing_is_removed_if_the_run_reads_a_file_of_a_removed_folder(earlier):
    config = earlier / "inference" / "config.yaml"
    config.write_text("VERSION: 2")
    before = names(earlier)
    with pytest.raises(ConfigError, match=r"--overwrite: would remove '.*inference/config.yaml', which .* Fix: move"):
        remove_earlier_run(str(earlier), everything=True, needed=[str(config)])
    assert names(earlier) == before and names(earlier / "inference") == ["coco_instances_results.json", "config.yaml"]
    remove_earlier_run(str(earlier), everything=False, needed=[str(config)])


def test_metrics_alone(earlier):
    before = names(earlier)
    remove_earlier_run(str(earlier), everything=False)
    assert set(before) - set(names(earlier)) == {"metrics.json"}
    remove_earlier_run(str(earlier / "none"), everything=True)
    remove_earlier_run("s3://bucket/run", everything=True)


def test_a_finished_run_is_replaced_only_on_request(tmp_path, one_thread, small_dataset):
    words = {"SOLVER__MAX_ITER": 2, "SOLVER__STEPS": "()", "DATASETS__TEST": "()", "MODEL__MASK_ON": False}
    main(arguments(tmp_path, "--num-gpus", "0", **words))
    checkpoint = (tmp_path / "model_final.pth").read_bytes()
    with pytest.raises(PreflightError, match=r"contains checkpoints of an earlier run. Fix: .*--overwrite"):
        prepare(arguments(tmp_path, "--num-gpus", "0", **words))
    assert (tmp_path / "model_final.pth").read_bytes() == checkpoint
    for flag in ("--resume", "--eval-only"):
        with pytest.raises(ConfigError, match=rf"--overwrite: given together with {flag}"):
            prepare(arguments(tmp_path, "--num-gpus", "0", "--overwrite", flag, **words))
    assert (tmp_path / "model_final.pth").read_bytes() == checkpoint
    again = arguments(tmp_path, "--num-gpus", "0", "--overwrite", **words | {"SOLVER__MAX_ITER": 1})
    again.config_file = str(tmp_path / "config.yaml")  # of the run that is replaced
    main(again)
    records = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert {record["iteration"] for record in records} <= {0, 1}
