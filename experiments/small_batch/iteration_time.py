"""Time a training iteration of every norm of the study, in turn on one machine.

The times of the runs themselves cannot be compared: they share their machines, and take days.
"""

import torch

from benchmarks.environment import describe
from benchmarks.networks import Sizes, detector_training
from benchmarks.providers import PRECISIONS
from benchmarks.table import Table
from benchmarks.timing import time_alternating
from gw_detectron.config import read_config

from .plan import DECIDING_BATCH, NORMS, OTHER_BATCH_NORMS, VARIATIONS, Row
from .single_run import CONFIG

_SIDE = 192  # of the images, in pixels


def measure_times(device: torch.device, repeats: int, command: str, batch: int = DECIDING_BATCH) -> Table:
    """Measure training iterations of the norms at a batch size in alternating rounds, as multiples of BN.

    Args:
        device: where.
        repeats: the number of rounds.
        command: the command line, for the header.
        batch: images per iteration.

    Returns:
        A table of the benchmarks' kind ``model``.
    """
    sizes = Sizes(detector_batch=batch, detector_image=_SIDE)
    steps = {}
    for norm in (*NORMS, *VARIATIONS) if batch == DECIDING_BATCH else OTHER_BATCH_NORMS:
        row = Row(norm, batch, lr=0.0, seed=0, iterations=10)
        cfg = read_config(str(CONFIG), [*row.config_words(), "MODEL.DEVICE", str(device)])
        steps[norm] = detector_training(cfg, sizes, PRECISIONS["fp32"]).step
    times = time_alternating(steps, repeats, device, "norms")
    key = {"model": CONFIG.stem, "dtype": "fp32", "batch": str(batch)}
    key["image"] = "x".join(map(str, sizes.detector_sides))
    rows = [
        {**key, "variant": norm, **cells, "to_bn": cells["median_ms"] / times["BN"]["median_ms"]}
        for norm, cells in times.items()
    ]
    return Table("model", describe(device, ["fp32"], command), rows)
