"""Batches of the training data: Detectron2's order, any number of workers, any position."""

import itertools
import multiprocessing
import pickle
import random

import numpy as np
import pytest
import torch
from detectron2.data import (
    DatasetCatalog,
    DatasetFromList,
    build_detection_train_loader,
)
from detectron2.utils import comm

from gw_detectron.config import default_config
from gw_detectron.errors import ConfigError, DataError
from gw_detectron.workbench.run.randomness import (
    SAMPLER,
    seed_generators,
    seeded_generators,
)
from gw_detectron.workbench.run.training_data import (
    _ExampleDataset,
    build_training_data,
)

SIZES = [(60, 40), (40, 60), (50, 50), (70, 30), (30, 70), (80, 20), (20, 80)]


@pytest.fixture
def cfg():
    records = [
        {
            "image_id": number,
            "width": width,
            "height": height,
            "annotations": [{"category_id": number % 2, "iscrowd": 0}],
        }
        for number, (width, height) in enumerate(SIZES)
    ]
    DatasetCatalog.register("tiny_records", lambda: records)

    cfg = default_config()
    cfg.DATASETS.TRAIN = ("tiny_records",)
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SEED = 5
    return cfg


def numbers():
    """The next number of each global generator."""
    return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002


def draw(record):
    """A mapper that uses all three generators."""
    return {**record, "drawn": numbers()}


def take(data, number):
    """Return the image and the numbers of each example of some batches."""
    return [
        [(example["image_id"], example.get("drawn")) for example in batch]
        for batch in itertools.islice(data, number)
    ]


def images_of(batches):
    return [[image for image, _ in batch] for batch in batches]


@pytest.mark.parametrize("grouping", [True, False])
@pytest.mark.parametrize("sampler", ["TrainingSampler", "RepeatFactorTrainingSampler"])
def test_the_order_is_detectron2s(cfg, grouping, sampler):
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = grouping
    cfg.DATALOADER.SAMPLER_TRAIN = sampler
    cfg.DATALOADER.REPEAT_THRESHOLD = 0.9
    with seeded_generators(cfg.SEED, SAMPLER):
        expected = build_detection_train_loader(cfg, mapper=dict)

    ours = take(build_training_data(cfg, dict), 20)

    assert ours == take(expected, 20)
    if grouping:
        wide = {image for image, (width, height) in enumerate(SIZES) if width > height}
        for images in images_of(ours):
            assert wide.issuperset(images) or wide.isdisjoint(images)


def test_an_unknown_sampler_is_named_with_its_key(cfg):
    cfg.DATALOADER.SAMPLER_TRAIN = "RepeatFactor"
    with pytest.raises(ConfigError, match=r"SAMPLER_TRAIN \('RepeatFactor'\): unknown"):
        build_training_data(cfg, dict)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restored_position_yields_the_same_examples_for_any_number_of_workers(
    cfg, workers
):
    whole = take(build_training_data(cfg, draw), 20)
    assert len(set().union(*whole)) == 40  # no example is drawn twice

    cfg.DATALOADER.NUM_WORKERS = workers
    first = build_training_data(cfg, draw)
    assert take(first, 7) == whole[:7]

    mapped = []
    second = build_training_data(
        cfg, lambda record: mapped.append(record) or draw(record)
    )
    # before the position is known, as Detectron2's trainer does
    iterator = iter(second)
    second.load_state_dict({**first.state_dict(), "batches": 7})
    assert take(iterator, 13) == whole[7:]
    assert len(mapped) == (0 if workers else 2 * 13), "skipped examples are not mapped"


def test_the_global_generators_are_left_alone(cfg):
    seed_generators(3, 0)
    expected = numbers()

    for workers in (0, 1):
        cfg.DATALOADER.NUM_WORKERS = workers
        data = build_training_data(cfg, draw)
        seed_generators(3, 0)
        take(data, 3)
        assert numbers() == expected


def test_seeds_and_places_have_numbers_of_their_own():
    places = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0), (1, 1), (1, 2**40)]
    places += [(2**31, 0), (2**63, 1, 0)]

    drawn = []
    for place in places:
        seed_generators(*place)
        drawn.append(numbers())

    for of_one_generator in zip(*drawn, strict=True):
        assert len(set(of_one_generator)) == len(places)


def test_processes_share_the_stream(cfg, monkeypatch):
    def share(rank, size):
        monkeypatch.setattr(comm, "get_rank", lambda: rank)
        monkeypatch.setattr(comm, "get_world_size", lambda: size)
        return take(build_training_data(cfg, draw), 8)

    monkeypatch.setattr(comm, "shared_random_seed", lambda: 0)
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    cfg.SOLVER.IMS_PER_BATCH = 4

    batches = zip(share(0, 2), share(1, 2), share(0, 1), strict=True)
    for first, second, both in batches:
        assert sorted(first + second) == sorted(both)

    cfg.SOLVER.IMS_PER_BATCH = 3
    with pytest.raises(ConfigError, match="SOLVER.IMS_PER_BATCH"):
        share(0, 2)


def test_a_rejected_record_is_replaced_by_another_one(cfg):
    def choosy(record):
        return draw(record) if record["image_id"] > 2 else None

    chosen = take(build_training_data(cfg, choosy), 10)

    assert min(min(images) for images in images_of(chosen)) > 2
    assert chosen == take(build_training_data(cfg, choosy), 10)
    with pytest.raises(DataError, match="DATASETS.TRAIN"):
        take(build_training_data(cfg, lambda record: None), 1)


def test_a_local_mapper_reaches_workers_that_are_not_forked():
    records = DatasetFromList([{"a": 1}])
    examples = _ExampleDataset(records, lambda record: record["a"], 0)

    assert pickle.loads(pickle.dumps(examples))[0, 0] == 1


def test_workers_end_with_a_process_that_keeps_its_loader(cfg):
    def work():
        cfg.DATALOADER.NUM_WORKERS = 1
        batches = iter(build_training_data(cfg, draw))
        next(batches)
        globals()["kept"] = (
            batches  # as an interpreter's end finds the trainer of a script
        )

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    try:
        assert process.exitcode == 0
    finally:
        process.kill()


def test_records_without_sizes_are_one_group(cfg):
    records = [dict(record) for record in DatasetCatalog.get("tiny_records")]
    for record in records:
        del record["width"], record["height"]
    DatasetCatalog.register("no_sizes", lambda: records)
    cfg.DATASETS.TRAIN = ("no_sizes",)
    assert cfg.DATALOADER.ASPECT_RATIO_GROUPING

    grouped = take(build_training_data(cfg, dict), 20)

    cfg.DATALOADER.ASPECT_RATIO_GROUPING = False
    assert images_of(grouped) == images_of(take(build_training_data(cfg, dict), 20))
