"""The losses of a model on the validation data."""

from collections import defaultdict

import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_test_loader
from detectron2.data.detection_utils import build_augmentation
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn

from ..data.images import ImageNamingMapper
from ..norms.names import norm_spec
from .training_data import VALIDATION, seed_generators

# RetinaNet's, and up to v0.6 FCOS's: a running mean that scales the loss and is not in the model's state dict
LOSS_NORMALIZER = "loss_normalizer"


def validation_losses(cfg: CfgNode, model: nn.Module, seed: int) -> dict[str, float]:
    """Compute the mean losses of the images in ``DATASETS.TEST``, resized as in evaluation.

    Norms use their running statistics. The model, not its ``DistributedDataParallel``, is not changed. The seed is that
    of sampled anchors and regions.

    Returns:
        ``validation/loss_cls`` and so on, and their sum, ``validation/total_loss``; nothing without annotations.
    """
    records = [
        record
        for name in cfg.DATASETS.TEST
        for record in DatasetCatalog.get(name)
        if record.get("annotations") or "sem_seg_file_name" in record
    ]
    if not records:
        return {}
    mapper = DatasetMapper(cfg, True, augmentations=build_augmentation(cfg, False), recompute_boxes=False)
    data = build_detection_test_loader(
        records, mapper=ImageNamingMapper(mapper, cfg.INPUT.PERCENTILES), num_workers=cfg.DATALOADER.NUM_WORKERS
    )
    modes = {module: module.training for module in model.modules()}
    normalizer = {name: value for name, value in vars(model).items() if name == LOSS_NORMALIZER}
    seed_generators(seed, VALIDATION, comm.get_rank())
    sums: dict[str, float] = defaultdict(float)
    try:
        model.train()
        for module in modes:
            if norm_spec(module) is not None:
                module.eval()
        with torch.no_grad(), EventStorage(1):
            for batch in data:
                for name, loss in model(batch).items():
                    sums[name] += float(loss)
                vars(model).pop(LOSS_NORMALIZER, None)  # each image as if it came next
                vars(model).update(normalizer)
    finally:
        for module, mode in modes.items():
            module.training = mode
    parts = comm.all_gather(dict(sums))  # of all processes; one may have no image
    means = {name: sum(part.get(name, 0) for part in parts) / len(records) for part in parts for name in part}
    return {f"validation/{name}": value for name, value in {**means, "total_loss": sum(means.values())}.items()}
