"""What a training keeps from step to step."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from detectron2.engine import HookBase

import gw_detectron
from gw_detectron.engine import Trainer
from gw_detectron.engine.train import setup

from ..tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset")
FIRST, LAST = 50, 150
PACKAGE = Path(gw_detectron.__file__).parent


class Snapshots(HookBase):
    def __init__(self) -> None:
        self.found: dict[int, tracemalloc.Snapshot] = {}

    def after_step(self) -> None:
        if self.trainer.iter in (FIRST, LAST):
            gc.collect()
            self.found[self.trainer.iter] = tracemalloc.take_snapshot()


@pytest.mark.slow
def test_this_package_keeps_less_than_50_bytes_per_step(tmp_path, capsys):
    """Detectron2 keeps every logged value, 1.7 kB per step."""
    cfg = setup(arguments(tmp_path, SOLVER__MAX_ITER=LAST + 2, SOLVER__CHECKPOINT_PERIOD=10**6, DATASETS__TEST="()"))
    trainer, snapshots = Trainer(cfg), Snapshots()
    trainer.register_hooks([snapshots])
    tracemalloc.start()
    try:
        trainer.train()
    finally:
        tracemalloc.stop()
    growth = snapshots.found[LAST].compare_to(snapshots.found[FIRST], "lineno")
    per_step = {True: 0.0, False: 0.0}
    for line in growth:
        own = Path(line.traceback[-1].filename).is_relative_to(PACKAGE)  # a clone may have the package's name too
        per_step[own] += line.size_diff / (LAST - FIRST)
    with capsys.disabled():
        print(f"\nbytes kept per step: this package {per_step[True]:.0f}, others {per_step[False]:.0f}")
    assert per_step[True] < 50
    assert per_step[False] < 4000
