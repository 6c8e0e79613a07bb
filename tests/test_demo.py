"""The demo leaves its report and model."""

import argparse

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
    for name in ("report/report.html", "report/report.json", "model_final.pth", "config.yaml"):
        assert (tmp_path / name).stat().st_size > 100


def test_a_demo_evaluates_one_dataset(tmp_path):
    with pytest.raises(ConfigError, match="the demo evaluates one dataset"):
        demo(tmp_path, **{"DATASETS.TEST": "()"})
    assert not list(tmp_path.iterdir())
