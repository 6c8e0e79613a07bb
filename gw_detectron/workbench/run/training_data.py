"""Training data whose position a checkpoint can store, and the seeds of a run.

Random numbers follow from the run's seed and the place of their use. No generator state is carried from step to step,
so evaluations, hooks, workers and restarts cannot shift it.
"""

import contextlib
import itertools
import logging
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetFromList, build_detection_train_loader

# _train_loader_from_config is private: the same in Detectron2 v0.6 and HEAD of 2026.
from detectron2.data.build import _train_loader_from_config, trivial_batch_collator
from detectron2.utils import comm
from detectron2.utils.serialize import PicklableWrapper
from torch.utils.data import DataLoader, Dataset, Sampler

from ...config import changed_config
from ...errors import ConfigError, DataError
from ..images.augmentations import OF_BATCH

log = logging.getLogger(__name__)
#: first part of a place; no two uses share their random numbers
INITIAL_WEIGHTS, STEP, SAMPLER, IMAGE, VALIDATION = range(5)
_ATTEMPTS = 100  # images to try in place of one that the mapper rejects


def build_training_data(cfg: CfgNode, mapper: Callable[[dict], Any]) -> Any:
    """Build :class:`TrainingData`; the mapper makes an example of a record, or returns None to try another one.

    Datasets that are not lists of records, or have no ``width`` and ``height`` for grouping by aspect ratio, get
    Detectron2's own loader, whose position cannot be stored.
    """
    options = _train_loader_from_config(cfg, mapper=mapper)
    records, grouped = options["dataset"], options["aspect_ratio_grouping"]
    if isinstance(records, list) and all(
        "width" in r and "height" in r for r in records if grouped
    ):
        return TrainingData(cfg, records, mapper)
    if cfg.INPUT.SCALE_PER_BATCH:
        raise ConfigError(
            "INPUT.SCALE_PER_BATCH (True): a dataset has no width and height. Fix: set it to False."
        )
    return build_detection_train_loader(**options)


class TrainingData:
    """Infinite batches of training examples, as Detectron2's loader yields them.

    An example depends on the seed and its position in the stream of samples, not on workers or on earlier examples. A
    restored iterator yields the batches of an uninterrupted one for any number of workers. Skipped images are not read.
    """

    def __init__(
        self, cfg: CfgNode, records: list[dict], mapper: Callable[[dict], Any]
    ) -> None:
        self.seed = cfg.SEED if cfg.SEED >= 0 else int(comm.shared_random_seed())
        self.batches = (
            0  # batches that the training has consumed, not those prefetched by workers
        )
        self._cfg, self._mapper = cfg, mapper
        self._moved = False
        grouping, processes = cfg.DATALOADER.ASPECT_RATIO_GROUPING, comm.get_world_size()
        self._order = {
            "images": len(records),
            "images_per_batch": cfg.SOLVER.IMS_PER_BATCH,
            "processes": processes,
            "sampler": cfg.DATALOADER.SAMPLER_TRAIN,
            "aspect_ratio_grouping": grouping,
        }
        self._batch_size, rest = divmod(cfg.SOLVER.IMS_PER_BATCH, processes)
        if self._batch_size < 1 or rest:
            raise ConfigError(
                f"SOLVER.IMS_PER_BATCH ({cfg.SOLVER.IMS_PER_BATCH}): {processes} processes cannot share it evenly. "
                f"Fix: give a multiple of {processes}."
            )
        wide = [grouping and record["width"] > record["height"] for record in records]
        self._group = np.array(wide, dtype=np.int8)
        self._records = DatasetFromList(records, copy=False)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches of a checkpoint, or after as many images with another batch size."""
        stored = {**self._order, **state.get("order", {})}
        self.batches = (
            state["batches"] * stored["images_per_batch"] // self._order["images_per_batch"]
        )
        self._moved = True
        changes = [
            f"{key} {stored[key]} -> {new}"
            for key, new in self._order.items()
            if stored[key] != new
        ]
        if changes:
            log.warning(
                "--resume: the order of the images differs from an uninterrupted run's: %s",
                ", ".join(changes),
            )

    def __iter__(self) -> Iterator[list[Any]]:
        # A generator: Detectron2's trainer calls iter() before the checkpoint is loaded.
        while True:
            self._moved = False
            for batch in self._loader():
                self.batches += 1
                yield batch
                if self._moved:
                    break

    def _loader(self) -> DataLoader:
        return DataLoader(
            _ExampleDataset(self._records, self._mapper, self.seed),
            batch_sampler=itertools.islice(self._batches(), self.batches, None),
            num_workers=self._cfg.DATALOADER.NUM_WORKERS,
            collate_fn=trivial_batch_collator,
            generator=torch.Generator(),  # else it draws from the global one, at a restart only
            worker_init_fn=_obey_parent,
        )

    def _batches(self) -> Iterator[list[tuple[int, int, int]]]:
        """Batch by aspect ratio, as Detectron2 does; yield number of the batch, position and index of each image."""
        groups: tuple[list, list] = ([], [])
        number = itertools.count()
        positions = itertools.count(comm.get_rank(), comm.get_world_size())
        for pair in zip(positions, self._sampler(), strict=False):
            group = groups[self._group[pair[1]]]
            group.append(pair)
            if len(group) == self._batch_size:
                batch = next(number)
                yield [(batch, *each) for each in group]
                group.clear()

    def _sampler(self) -> Sampler:
        cfg = changed_config(self._cfg, {"SEED": self.seed})  # after v0.6 most samplers take it
        with seeded_generators(
            self.seed, SAMPLER
        ):  # others draw their seed from NumPy's generator
            return _train_loader_from_config(cfg, mapper=self._mapper, dataset=self._records)[
                "sampler"
            ]


def _obey_parent(worker: int) -> None:
    """Let a worker finish the step at a SIGTERM that a scheduler sends to all processes; its trainer's ends it."""
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parent, daemon=True).start()


def _await_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(1)


class _ExampleDataset(Dataset):
    """Training examples by number of the batch, position in the stream and index of the record."""

    def __init__(
        self, records: DatasetFromList, mapper: Callable[[dict], Any], seed: int
    ) -> None:
        self._records, self._mapper, self._seed = records, PicklableWrapper(mapper), seed

    def __getitem__(self, place: tuple[int, int, int]) -> Any:
        batch, position, index = place
        with seeded_generators(self._seed, IMAGE, position):
            for _ in range(_ATTEMPTS):
                OF_BATCH.seed(f"{self._seed} {batch}")
                example = self._mapper(self._records[index])
                if example is not None:
                    return example
                index = random.randrange(len(self._records))
        raise DataError(
            f"DATASETS.TRAIN: the mapper returned None for {_ATTEMPTS} records in a row. Fix: correct the mapper or "
            "remove the records it cannot use."
        )


def seed_generators(seed: int, *place: int) -> None:
    """Seed the global generators of Python, NumPy and torch on all devices.

    ``place`` is one of the constants above, then e.g. process and iteration.
    """
    torch.manual_seed(_seed_cpu_generators(seed, *place))


@contextlib.contextmanager
def seeded_generators(seed: int, *place: int) -> Iterator[None]:
    """Seed the global CPU generators in the body and restore them afterwards."""
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
