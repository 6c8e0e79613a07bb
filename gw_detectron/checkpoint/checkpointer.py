"""A checkpointer for training scripts without this package's Trainer."""

import logging
from typing import Any

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils.file_io import PathManager
from torch import nn

from ..weights.record import NORMS
from .loading import load_checkpoint
from .opening import open_checkpoint
from .records import NormRecord


class GWDetectionCheckpointer(DetectionCheckpointer):
    """Detectron2's checkpointer, with a record of norms and checked loading.

    Use it in place of ``DetectionCheckpointer`` in a script such as ``lazyconfig_train_net.py``. Checkpoints record the
    norm names of the model. Loading logs how many tensors of the backbone were found.

    Args:
        model: the detector, or its DistributedDataParallel.
        save_dir: folder of the checkpoints.
        allow_partial: accept missing backbone tensors, and other norms than those of the checkpoint.
        kwargs: further arguments of Detectron2's checkpointer, such as ``trainer``.
    """

    def __init__(self, model: nn.Module, save_dir: str = "", *, allow_partial: bool = False, **kwargs: Any) -> None:
        super().__init__(model, save_dir, **kwargs)
        self.allow_partial = allow_partial
        self.add_checkpointable(NORMS, NormRecord(self.model))

    def save(self, name: str, **kwargs: Any) -> None:
        """Write a checkpoint to the folder, which is created if needed."""
        if self.save_dir and self.save_to_disk:
            PathManager.mkdirs(self.save_dir)
        super().save(name, **kwargs)

    def load(self, path: str, checkpointables: list[str] | None = None) -> dict[str, Any]:
        """Load a checkpoint without running its code.

        Args:
            path: a file or address; "" loads nothing.
            checkpointables: names of the training states to load; None loads all.

        Returns:
            What else the checkpoint contains.

        Raises:
            UserError: see :func:`gw_detectron.checkpoint.open_checkpoint` and
                :func:`gw_detectron.checkpoint.load_checkpoint`.
        """
        if not path:
            return super().load(path)
        checkpoint = open_checkpoint(path, "checkpoint")
        names = [*self.checkpointables] if checkpointables is None else checkpointables
        report = load_checkpoint(self, checkpoint, allow_partial=self.allow_partial)
        for name in names:
            if name in checkpoint.metadata:
                self.checkpointables[name].load_state_dict(checkpoint.metadata[name])
        logging.getLogger(__name__).info("%s", report)
        return {name: value for name, value in checkpoint.metadata.items() if name not in names}
