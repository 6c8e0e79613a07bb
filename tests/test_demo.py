"""The demo leaves its numbers, report and model."""

import argparse
import json
import os

import pytest

from gw_detectron.commands.demo import main
from gw_detectron.errors import ConfigError

from .tiny_run import CONFIG, OPTS


def demo(folder, **changes):
    opts = {**OPTS, "OUTPUT_DIR": folder, **changes}
    words = [str(word) for pair in opts.items() for word in pair]
    main(argparse.Namespace(config_file=str(CONFIG), overwrite=False, opts=words))


@pytest.mark.slow
def test_the_demo_leaves_its_results(tmp_path, small_dataset):
    demo(tmp_path, **{"SOLVER.MAX_ITER": 1, "SOLVER.STEPS": "()"})
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == {"bbox", "segm", "seconds"}
    for name in ("report/report.html", "model_final.pth", "config.yaml"):
        assert (tmp_path / name).stat().st_size > 100


def test_a_demo_evaluates_one_dataset(tmp_path):
    with pytest.raises(ConfigError, match="the demo evaluates one dataset"):
        demo(tmp_path, **{"DATASETS.TEST": "()"})
    assert not list(tmp_path.iterdir())


def test_a_demo_is_replaced_and_a_later_training_in_its_folder_is_not(tmp_path, monkeypatch):
    replaced = []

    def stop(cfg, *, overwrite, **options):
        replaced.append(overwrite)
        raise KeyboardInterrupt

    monkeypatch.setattr("gw_detectron.commands.demo.Trainer", stop)
    (tmp_path / "result.json").touch()
    os.utime(tmp_path / "result.json", (2, 2))
    (tmp_path / "model_final.pth").touch()
    for time_of_training in (1, 3):
        os.utime(tmp_path / "model_final.pth", (time_of_training, time_of_training))
        with pytest.raises(KeyboardInterrupt):
            demo(tmp_path)
    assert replaced == [True, False]
