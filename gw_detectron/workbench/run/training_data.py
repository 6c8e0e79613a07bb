"""Training data whose position a checkpoint can store."""

import itertools
import logging
import random
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
from ..signals import obey_parent
from .randomness import IMAGE, SAMPLER, seeded_generators

log = logging.getLogger(__name__)

Mapper = Callable[[dict], Any]
_ATTEMPTS = 100  # images to try in place of one that the mapper rejects


def build_training_data(cfg: CfgNode, mapper: Mapper) -> Any:
    """Build :class:`TrainingData`, or Detectron2's own loader, whose position cannot be stored.

    Detectron2's is for datasets that are not lists of records.

    Args:
        mapper: makes an example of a record, or returns None to try another one.
    """
    try:
        options = _train_loader_from_config(cfg, mapper=mapper)
    except ValueError as error:
        if "training sampler" not in str(error):  # of a dataset
            raise
        raise ConfigError(
            f"DATALOADER.SAMPLER_TRAIN ({cfg.DATALOADER.SAMPLER_TRAIN!r}): unknown. Fix: give TrainingSampler, "
            "RepeatFactorTrainingSampler or RandomSubsetTrainingSampler."
        ) from error
    records = options["dataset"]
    if not isinstance(records, list):
        return build_detection_train_loader(**options)
    return TrainingData(cfg, records, mapper)


class TrainingData:
    """Infinite batches of training examples, as Detectron2's loader yields them.

    An example depends on the seed and its position in the stream of samples, not on workers or on
    earlier examples. A restored iterator yields the batches of an uninterrupted one for any number
    of workers. Skipped images are not read. Restore before the first batch is taken.
    """

    def __init__(self, cfg: CfgNode, records: list[dict], mapper: Mapper) -> None:
        self.seed = cfg.SEED if cfg.SEED >= 0 else int(comm.shared_random_seed())
        #: batches that the training has consumed, not those prefetched by workers
        self.batches = 0
        self._cfg = cfg
        self._mapper = mapper

        grouping = cfg.DATALOADER.ASPECT_RATIO_GROUPING
        processes = comm.get_world_size()
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
                f"SOLVER.IMS_PER_BATCH ({cfg.SOLVER.IMS_PER_BATCH}): {processes} processes cannot "
                f"share it evenly. Fix: give a multiple of {processes}."
            )

        # a record without a size counts as not wide
        wide = [
            grouping and record.get("width", 0) > record.get("height", 0)
            for record in records
        ]
        self._group = np.array(wide, dtype=np.int8)
        self._records = DatasetFromList(records, copy=False)

    @property
    def batches_per_epoch(self) -> float:
        """The batches of a pass over the images, of all processes together."""
        return self._order["images"] / self._order["images_per_batch"]

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches of a checkpoint, or as many images if their size differs."""
        stored = {**self._order, **state.get("order", {})}
        images = state["batches"] * stored["images_per_batch"]
        self.batches = images // self._order["images_per_batch"]

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
        for batch in self._loader():
            self.batches += 1
            yield batch

    def _loader(self) -> DataLoader:
        return DataLoader(
            _ExampleDataset(self._records, self._mapper, self.seed),
            batch_sampler=itertools.islice(self._batches(), self.batches, None),
            num_workers=self._cfg.DATALOADER.NUM_WORKERS,
            collate_fn=trivial_batch_collator,
            generator=torch.Generator(),  # else it draws from the global one, at a restart only
            worker_init_fn=obey_parent,
        )

    def _batches(self) -> Iterator[list[tuple[int, int]]]:
        """Batch by aspect ratio, as Detectron2 does; yield the position and index of each image."""
        groups: tuple[list, list] = ([], [])
        positions = itertools.count(comm.get_rank(), comm.get_world_size())
        for position, index in zip(positions, self._sampler(), strict=False):
            group = groups[self._group[index]]
            group.append((position, index))
            if len(group) == self._batch_size:
                yield group[:]
                group.clear()

    def _sampler(self) -> Sampler:
        # after v0.6 most samplers take it
        cfg = changed_config(self._cfg, {"SEED": self.seed})
        # others draw theirs from NumPy's generator
        with seeded_generators(self.seed, SAMPLER):
            options = _train_loader_from_config(
                cfg, mapper=self._mapper, dataset=self._records
            )
        return options["sampler"]


class _ExampleDataset(Dataset):
    """Training examples by position in the stream and index of the record."""

    def __init__(self, records: DatasetFromList, mapper: Mapper, seed: int) -> None:
        self._records = records
        self._mapper = PicklableWrapper(mapper)
        self._seed = seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        position, index = place

        with seeded_generators(self._seed, IMAGE, position):
            for _ in range(_ATTEMPTS):
                example = self._mapper(self._records[index])
                if example is not None:
                    return example
                index = random.randrange(len(self._records))

        raise DataError(
            f"DATASETS.TRAIN: the mapper returned None for {_ATTEMPTS} records in a row. Fix: "
            "correct the mapper or remove the records it cannot use."
        )
