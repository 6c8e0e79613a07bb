"""Random numbers of a run: they follow from its seed and the place of their use.

No generator state is carried from step to step, so evaluations, hooks, workers and restarts cannot
shift it.
"""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

#: first part of a place; no two uses share their random numbers
INITIAL_WEIGHTS, STEP, SAMPLER, IMAGE, VALIDATION = range(5)


def seed_generators(seed: int, *place: int) -> None:
    """Seed the global generators of Python, NumPy and torch on all devices.

    Args:
        place: one of the constants above, then e.g. process and iteration.
    """
    torch.manual_seed(_seed_cpu_generators(seed, *place))


@contextlib.contextmanager
def seeded_generators(seed: int, *place: int) -> Iterator[None]:
    """Seed the global CPU generators in the body and restore them afterwards."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002

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
