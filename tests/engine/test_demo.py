"""The demo leaves its numbers, pictures, model and exported backbone; plots cope with cut-off metrics."""

import argparse
import json

import pytest

from gw_detectron.data import register_synthetic
from gw_detectron.engine.demo import run_demo
from gw_detectron.engine.plots import read_metrics
from gw_detectron.errors import ConfigError
from gw_detectron.export.atomic_folder import OutputFolderError

from ..tiny_run import CONFIG, DATA, OPTS


@pytest.mark.slow
def test_the_demo_leaves_its_results(tmp_path, capsys):
    register_synthetic(tmp_path / "data", DATA)
    output = tmp_path / "output"
    opts = {**OPTS, "OUTPUT_DIR": output, "SOLVER.MAX_ITER": 1, "SOLVER.STEPS": "()"}
    try:
        words = [str(word) for pair in opts.items() for word in pair]
        result = run_demo(argparse.Namespace(config_file=str(CONFIG), opts=words))
    finally:
        register_synthetic()
    assert json.loads((output / "result.json").read_text()) == result
    assert result["export"]["worst_relative"] < 1e-4 and set(result) == {"bbox", "segm", "seconds", "export"}
    for name in ("curves.png", "predictions.png", "model_final.pth", "config.yaml", "backbone/parity.json"):
        assert (output / name).stat().st_size > 100
    assert "Trained 1 iterations and evaluated" in capsys.readouterr().out


def test_results_that_cannot_be_written_stop_the_demo_before_the_training(tmp_path):
    def run(**changes):
        opts = {**OPTS, "OUTPUT_DIR": tmp_path, **changes}
        words = [str(word) for pair in opts.items() for word in pair]
        run_demo(argparse.Namespace(config_file=str(CONFIG), opts=words))

    for names in ("()", "('gw_synthetic_val', 'gw_synthetic_train')"):
        with pytest.raises(ConfigError, match="the demo evaluates one dataset"):
            run(**{"DATASETS.TEST": names})
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "thesis.tex").touch()
    with pytest.raises(OutputFolderError, match=r"thesis\.tex"):
        run()
    assert [path.name for path in tmp_path.iterdir()] == ["backbone"]


def test_metrics_of_a_killed_and_resumed_run_are_in_order(tmp_path):
    path = tmp_path / "metrics.json"
    lines = [{"iteration": 1, "loss": 3.0}, {"iteration": 3, "loss": 2.0}, {"iteration": 3, "loss": 1.0, "lr": 0.1}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"iteration": 4, "lo')
    assert read_metrics(path) == [lines[0], lines[2]]
    path.write_text('{"iteration"')
    with pytest.raises(ValueError, match="no complete record"):
        read_metrics(path)
