"""Statistics of training photos, of each image or of other photos, for the BN layers of a detector."""

import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper
from detectron2.utils import comm
from torch import nn

from ...errors import ConfigError, DataError, UserError, existing_path
from ...layers import adapt_statistics, measure_statistics
from ...layers.mixed_norms import MixedNorm
from ...norms import mix_statistics, mixture_name, norm_rows
from ...weights.load_report import resnet_prefixes
from ...weights.opening import local_file
from ..dataset.coco_content import content_to_records
from ..dataset.datasets_yaml import DATASETS_FILE, read_datasets
from ..dataset.layouts import read_labels
from ..images import (
    ImageNamingMapper,
    evaluation_input,
    evenly_spread,
    find_images,
    read_image,
)

log = logging.getLogger(__name__)

#: photos whose statistics are measured
_PHOTOS = 32
#: the least number of photos of a new place; fewer have not been studied
_FEWEST = 8
_BATCH = 8


def change_statistics(
    model: nn.Module, cfg: CfgNode, *, mix: str = "", adapt: str = "", weights: str
) -> None:
    """Change the statistics of the BN layers of a trained detector's ResNet, in place.

    FrozenBN has the statistics of other photos than its training's, or none, as in the detectors of Detectron2's zoo.
    It gets those of training photos first, which changes no output.

    Args:
        model: in evaluation mode.
        cfg: its config.
        mix: mix in each image's, by a mixture of :func:`gw_detectron.norms.mix_statistics`.
        adapt: take those of photos in this folder, by :func:`gw_detectron.layers.adapt_statistics`.
        weights: address of its weights, beside which the run has recorded its datasets.

    Raises:
        NormError: a wrong mixture, or no BN layer.
        ConfigError: both are given, the detector mixes already, or photos are needed and cannot be read.
    """
    if mix and adapt:
        raise ConfigError(
            "--mix, --adapt: given together. Fix: give --adapt where there are photos of the new place, else --mix."
        )
    if mix:
        mixture_name(mix, where="--mix")  # refuses a wrong one before photos are read
    photos = _photos_of(adapt, cfg) if adapt else []

    resnet = _resnet_of(model)
    flag = "--mix" if mix else "--adapt"
    mixed = [layer for layer in resnet.modules() if isinstance(layer, MixedNorm)]
    if any(any(layer.mixture) for layer in mixed):
        raise ConfigError(
            f"{flag}: the detector was trained with statistics of each image (MixBN or MixGW). Fix: leave it out."
        )
    if any(row.spec == "FrozenBN" for row in norm_rows(resnet)):
        count = _measure(model, resnet, cfg, weights, needed_by=f"{flag}: FrozenBN")
        log.info(
            "%s: FrozenBN has the statistics of %d training photos now", flag, count
        )

    if mix:
        count = mix_statistics(resnet, mix, where="--mix")
        log.info(
            "--mix (%s): %d layers of BN take statistics of each image", mix, count
        )
    else:
        _adapt(model, resnet, photos)
        log.info(
            "--adapt ('%s'): BN has the statistics of %d photos", adapt, len(photos)
        )


def _photos_of(folder: str, cfg: CfgNode) -> list[dict[str, Any]]:
    """Return inputs of a detector: photos of a folder, evenly spread, without those that cannot be read."""
    folder = existing_path("--adapt", folder, os.path.isdir)
    photos = []
    for file in evenly_spread(find_images(folder), _PHOTOS):
        try:
            pixels = read_image(file, cfg.INPUT.FORMAT, cfg.INPUT.PERCENTILES)
        except DataError as error:
            log.warning("--adapt: a photo is left out: %s", error)
            continue
        # without a height and width, masks have the size of the input
        photos.append({"image": evaluation_input(pixels, cfg)})

    if len(photos) < _FEWEST:
        raise ConfigError(
            f"--adapt ('{folder}'): photos that can be read: {len(photos)}. Fix: give {_FEWEST} or more of the new "
            "place, or take --mix 0.5, which needs none."
        )
    return photos


def _adapt(model: nn.Module, resnet: nn.Module, photos: list[dict[str, Any]]) -> None:
    """Give the BN layers of a ResNet the statistics of photos, in batches of one size."""
    by_size = defaultdict(list)
    for photo in photos:
        by_size[photo["image"].shape].append(photo)
    try:
        with torch.no_grad(), adapt_statistics(resnet):
            for alike in by_size.values():
                for first in range(0, len(alike), _BATCH):
                    model(alike[first : first + _BATCH])
    except ValueError as error:
        raise ConfigError(f"--adapt: {error}") from error
    _share(resnet)


def measure_missing_statistics(model: nn.Module, cfg: CfgNode) -> None:
    """Give mixed norms whose weights have no statistics those of training photos, before a training.

    Detectors of Detectron2's zoo have mean 0 and variance 1 everywhere. Without the mixture, outputs stay the same.
    """
    resnet = _resnet_of(model)
    layers = [layer for layer in resnet.modules() if isinstance(layer, MixedNorm)]
    if not any(layer.is_untrained for layer in layers):
        return

    was_training = model.training
    model.eval()
    with _unmixed(layers):
        count = _measure(model, resnet, cfg, needed_by="MODEL.WEIGHTS: MixGW or MixBN")
    model.train(was_training)
    log.info(
        "MODEL.WEIGHTS: has no statistics of BN; %d layers of MixGW and MixBN got those of %d training photos",
        len(layers),
        count,
    )


def _resnet_of(model: nn.Module) -> nn.Module:
    prefix, *_ = resnet_prefixes(model)  # res5 in a C4 detector's head sees regions
    return model.get_submodule(prefix.removesuffix("."))


@contextlib.contextmanager
def _unmixed(layers: list[MixedNorm]) -> Iterator[None]:
    """Let mixed norms compute FrozenBN in this context."""
    mixtures = [layer.mixture for layer in layers]
    for layer in layers:
        layer.alpha = layer.mean = 0.0
    try:
        yield
    finally:
        for layer, mixture in zip(layers, mixtures, strict=True):
            layer.alpha, layer.mean = mixture


def _measure(
    model: nn.Module,
    resnet: nn.Module,
    cfg: CfgNode,
    weights: str = "",
    *,
    needed_by: str,
) -> int:
    """Give the BN layers of a ResNet the statistics of training photos; return the number of photos."""
    file = local_file(weights)
    record = os.path.join(os.path.dirname(file), DATASETS_FILE) if file else ""
    try:
        records = _training_records(cfg, record)
        photos = evenly_spread(records, _PHOTOS)
        mapper = ImageNamingMapper(DatasetMapper(cfg, False), cfg.INPUT.PERCENTILES)
        with torch.no_grad(), measure_statistics(resnet):
            for photo in photos:
                model([mapper(photo)])
    except (KeyError, OSError, UserError) as error:
        in_file = f", or name their files in '{record}' (docs/your_data.md)"
        raise ConfigError(
            f"{needed_by} needs the statistics of training photos, which cannot be read: {error} Fix: put them where "
            f"they were in the training{in_file if record else ''}; a detector that was exported so needs none."
        ) from error

    _share(resnet)
    return len(photos)


def _share(resnet: nn.Module) -> None:
    """Give all processes the statistics of the first, to the last bit."""
    if comm.get_world_size() > 1:
        state = resnet.state_dict().items()
        vectors = {name: value.cpu() for name, value in state if value.dim() == 1}
        resnet.load_state_dict(comm.all_gather(vectors)[0], strict=False)


def _training_records(cfg: CfgNode, record: str) -> list[dict[str, Any]]:
    """Return Detectron2's records of the training data: of those that a run has recorded, or of the config's."""
    if os.path.isfile(record):
        datasets = read_datasets(record).train.values()
        labels = [read_labels(dataset.json, dataset.images) for dataset in datasets]
        parts = [content_to_records(part.content, part.images) for part in labels]
    else:
        for name in cfg.DATASETS.TRAIN:
            if name not in DatasetCatalog:
                raise ConfigError(f"the dataset '{name}' is not registered here.")
        parts = [DatasetCatalog.get(name) for name in cfg.DATASETS.TRAIN]

    records = [record for part in parts for record in part]
    if not records:
        raise ConfigError("there is no photo.")
    return records
