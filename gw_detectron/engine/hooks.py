"""What the Trainer plugs into Detectron2's training: files named in data errors, causes of NaN, whole checkpoints."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from detectron2.utils.events import EventStorage
from torch import Tensor, nn


class DataError(ValueError):
    """A record of a data set that cannot be read or does not fit; the message names its image file."""

    def __init__(self, message: str) -> None:
        # A worker process of a DataLoader hands over its traceback as the message; what we said is at its end.
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


class NamingMapper:
    """Calls a data set mapper and puts the image's file name into its errors.

    Args:
        mapper: Detectron2's ``DatasetMapper`` or another callable from record to training example.

    Raises:
        DataError: the mapper raised ``OSError`` or ``ValueError``; other errors pass with the file name noted.
    """

    def __init__(self, mapper: Callable[[dict], Any]) -> None:
        self.mapper = mapper

    def __call__(self, record: dict) -> Any:
        name = record.get("file_name", "a record without file_name")
        try:
            return self.mapper(record)
        except (OSError, ValueError) as error:
            raise DataError(
                f"{name} cannot be used: {error}. Repair the image or its record, or take it out of the data set."
            ) from error
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise


class NonFiniteError(FloatingPointError):
    """The loss became infinite or NaN; the message says where it began."""


class LossGuard:
    """Watches the losses of a model in training and, when one is not finite, finds out why.

    In a run of several processes each one watches its own batch, so that the process with the culprit names it.

    Args:
        model: the model itself, not its ``DistributedDataParallel`` wrapper.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._batch: Sequence[dict] = ()
        model.register_forward_pre_hook(self._remember)
        model.register_forward_hook(self._check)

    def _remember(self, module: nn.Module, args: tuple) -> None:
        self._batch = args[0]

    def _check(self, module: nn.Module, args: tuple, losses: Any) -> None:
        if not module.training or not isinstance(losses, dict):
            return
        # one synchronisation with the device at a point where the heads have just caused several
        if not torch.isfinite(sum(losses.values(), torch.zeros(()))).all():
            bad = ", ".join(f"{name}={float(loss):g}" for name, loss in losses.items() if not torch.isfinite(loss))
            raise FloatingPointError(f"the loss is not finite: {bad or 'the sum of all losses overflows'}")

    def explain(self, autocast: bool = False) -> str:
        """Names the image, box, parameter or module in which the last batch went wrong.

        Args:
            autocast: run the model again in mixed precision, as it was trained.
        """
        return _bad_input(self._batch) or _bad_parameter(self.model) or self._bad_module(autocast)

    def _bad_module(self, autocast: bool) -> str:
        found: list[str] = []
        handles = [
            module.register_forward_hook(_recorder(f"{name} ({type(module).__name__})", found))
            for name, module in self.model.named_modules()
            if name
        ]
        for module in self.model.modules():
            if isinstance(module, (nn.SyncBatchNorm, NaiveSyncBatchNorm)) or getattr(module, "sync", False):
                module.eval()  # in training it would wait for processes that do not run this again
        device = next(self.model.parameters()).device.type
        # The run only looks for the place, so any error ends it; its events must not get into the training's.
        with (
            contextlib.suppress(Exception),
            torch.no_grad(),
            EventStorage(),
            torch.autocast(device, enabled=autocast),
        ):
            self.model(self._batch)
        for handle in handles:
            handle.remove()
        names = ", ".join(str(record.get("file_name", "an image without a name")) for record in self._batch)
        if found:
            return (
                f"The first module with a non-finite output is {found[0]}, with the images {names}. Lower "
                "SOLVER.BASE_LR, lengthen SOLVER.WARMUP_ITERS or set SOLVER.CLIP_GRADIENTS.ENABLED True."
            )
        return (
            "Input, parameters and the outputs of all modules are finite, so, unless a layer is named above, it is a "
            f"loss of the images {names}: look at their annotations."
        )


def _recorder(name: str, found: list[str]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple, output: Any) -> None:
        if not found and not _is_finite(output):
            found.append(name)

    return record


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    if hasattr(value, "get_fields"):  # Instances
        return _is_finite(value.get_fields())
    return _is_finite(getattr(value, "tensor", None)) if hasattr(value, "tensor") else True  # Boxes, ImageList


def _bad_input(batch: Sequence[dict]) -> str:
    for record in batch:
        name = record.get("file_name", "an image without a name")
        pixels = ~torch.isfinite(record["image"])
        if pixels.any():
            return f"The image {name} has {int(pixels.sum())} values that are NaN or infinite: repair or remove it."
        instances = record.get("instances")
        if instances is not None and not _is_finite(instances):
            return f"The annotations of the image {name} have values that are NaN or infinite: repair or remove them."
    return ""


def _bad_parameter(model: nn.Module) -> str:
    # not the buffers: a batch norm may just have put the NaN of this step into its running statistics
    for name, value in model.named_parameters():
        if not _is_finite(value):
            return (
                f"{name} has values that are NaN or infinite, so an earlier step, or the loaded weights, brought them. "
                "Lower SOLVER.BASE_LR, lengthen SOLVER.WARMUP_ITERS or set SOLVER.CLIP_GRADIENTS.ENABLED True, and go "
                "on from an earlier checkpoint by MODEL.WEIGHTS."
            )
    return ""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the files that were there before are untouched."""


class WholeFileWriter:
    """An iopath path manager whose local files appear whole or not at all.

    A ``Checkpointer`` lets its ``path_manager`` be replaced and opens through it whatever it writes. This one writes
    beside the file, to ``<name>.tmp``, and renames when everything is on the disk, so that neither a full disk nor a
    kill leaves half a checkpoint. All else is left to the path manager it stands in for.

    Args:
        manager: the path manager to stand in for.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def open(self, path: str, mode: str = "r", **kwargs: Any) -> contextlib.AbstractContextManager[IO[Any]]:
        """Opens a file; one opened for writing has to be used in a ``with`` statement.

        Raises:
            CheckpointWriteError: leaving the ``with`` statement, when the disk is full or the folder not writable.
        """
        if "w" in mode and "://" not in path:
            return _written_beside(path, mode)
        return self._manager.open(path, mode, **kwargs)


_UNFINISHED = ".tmp"


def remove_unfinished(folder: str) -> None:
    """Removes what a killed run left of a checkpoint that it was writing."""
    for path in Path(folder).glob(f"*.pth{_UNFINISHED}"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _written_beside(path: str, mode: str) -> Iterator[IO[Any]]:
    beside = path + _UNFINISHED
    try:
        with open(beside, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        cause = _os_error(error)
        if cause is None:
            raise
        raise CheckpointWriteError(
            f"'{path}' was not written ({cause.strerror or cause}), and no half of it is left; earlier checkpoints are "
            "as they were. Make room or get permission there, then go on with --resume."
        ) from error


def _os_error(error: BaseException | None) -> OSError | None:
    """The file system's error behind another: torch answers a failed write with an error of its own."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
