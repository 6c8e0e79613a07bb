"""A script for stock Detectron2 reads this package's yaml if the environment variable is set."""

import subprocess
import sys

import pytest

from gw_detectron.data.synthetic import make_synthetic

from .tiny_run import DATA, environment, words

# a user's script for stock Detectron2: it neither imports nor names this package
STOCK = """
import os
from detectron2.config import get_cfg
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import DefaultTrainer, default_argument_parser, default_setup

folder = os.environ["SHAPES"]
register_coco_instances("shapes", {}, folder + "/annotations/instances_train.json", folder + "/train")
args = default_argument_parser().parse_args()
cfg = get_cfg()
cfg.merge_from_file(args.config_file)
cfg.merge_from_list(args.opts)
cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("shapes",), ()
cfg.freeze()
default_setup(cfg, args)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(resume=False)
trainer.train()
print("trained", sum("GroupWhitening2d" in type(m).__name__ for m in trainer.model.modules()))
"""


def run(tmp_path, **variables: str) -> subprocess.CompletedProcess:
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    return subprocess.run(
        [sys.executable, str(script), *words(tmp_path / "output", SOLVER__MAX_ITER=2, SOLVER__STEPS="(1,)")],
        env=environment(tmp_path / "none", SHAPES=str(tmp_path / "gw_synthetic"), **variables),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_stock_script_trains_with_our_yaml(tmp_path):
    make_synthetic(tmp_path, DATA)
    assert "gw_detectron" not in STOCK
    ended = run(tmp_path, DETECTRON2_ENV_MODULE="gw_detectron.env")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "trained" in ended.stdout and "trained 0" not in ended.stdout


@pytest.mark.slow
def test_without_the_variable_the_keys_are_unknown(tmp_path):
    ended = run(tmp_path)
    assert ended.returncode != 0 and "WHITEN" in ended.stderr
