"""Seed random numbers by the run's seed and the place of their use.

No generator state is carried from step to step, so evaluations, hooks, workers and restarts cannot shift it.
"""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch

#: first part of a place; no two uses share their random numbers
INITIAL_WEIGHTS, STEP, SAMPLER, IMAGE = range(4)


def seed_generators(seed: int, *place: int) -> None:
    """Seed the global generators of Python, NumPy and torch on all devices.

    Args:
        seed: seed of the run.
        place: one of the constants above, then e.g. process and iteration.
    """
    torch.manual_seed(_seed_cpu_generators(seed, *place))


@contextlib.contextmanager
def seeded_generators(seed: int, *place: int) -> Iterator[None]:
    """Seed the global CPU generators in the body and restore them afterwards.

    Args:
        seed: seed of the run.
        place: as for :func:`seed_generators`.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_seed_cpu_generators(seed, *place))
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def _seed_cpu_generators(seed: int, *place: int) -> int:
    """Seed Python and NumPy; return the seed for torch."""
    # a hash: sums such as seed + iteration would repeat the numbers of the next seed
    words = np.random.SeedSequence(seed, spawn_key=place).generate_state(8)
    random.seed(words[:2].tobytes())
    np.random.seed(words[2:6])  # noqa: NPY002  Detectron2 augments images by the global generator
    return int(words[6]) << 32 | int(words[7])


def use_deterministic_algorithms() -> None:
    """Make torch compute the same bits each time on the same machine.

    torch raises RuntimeError at operations that it cannot compute so.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
