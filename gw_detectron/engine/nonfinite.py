"""Find the image, parameter or module behind a non-finite loss."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.utils.events import EventStorage
from torch import Tensor, nn

from ..norms.norm_listing import is_synchronized

_STABILIZE = "lower SOLVER.BASE_LR, lengthen SOLVER.WARMUP_ITERS or set SOLVER.CLIP_GRADIENTS.ENABLED True"


class LossGuard:
    """Stop the training at a non-finite loss and diagnose it.

    Each process checks its own batch, so the process with the broken image names it.

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
        # one synchronization with the device, where the heads have just caused several
        if not torch.isfinite(sum(losses.values(), torch.zeros(()))).all():
            bad = ", ".join(f"{name}={loss.item():g}" for name, loss in losses.items() if not torch.isfinite(loss))
            raise FloatingPointError(f"the loss is not finite: {bad or 'the sum of all losses overflows'}")

    def image_sizes(self) -> str:
        """List height x width of the last batch."""
        return ", ".join("x".join(map(str, example["image"].shape[1:])) for example in self._batch)

    def explain(self, autocast: bool = False) -> str:
        """Describe the image, parameter or module where the last batch became non-finite.

        Args:
            autocast: run the model again in mixed precision, as in training.
        """
        return _bad_input(self._batch) or _bad_parameter(self.model) or self._bad_module(autocast)

    def _bad_module(self, autocast: bool) -> str:
        found: list[str] = []
        for module in self.model.modules():
            if is_synchronized(module):
                module.eval()  # in training mode it would wait for processes that do not run the model again
        device = next(self.model.parameters()).device.type
        # Any error ends this run, which only searches; its events must not be mixed with those of the training.
        with (
            contextlib.ExitStack() as hooks,
            contextlib.suppress(Exception),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),  # compiled modules do not call new hooks
            EventStorage(),
            torch.autocast(device, enabled=autocast),
        ):
            for name, module in self.model.named_modules():
                if name:
                    recorder = _recorder(f"{name} ({type(module).__name__})", found)
                    hooks.enter_context(module.register_forward_hook(recorder))
            self.model(self._batch)
        names = ", ".join(str(example.get("file_name", "an image without a name")) for example in self._batch)
        if found:
            return (
                f"The first module with a non-finite output is {found[0]}, for the images {names}. Fix: {_STABILIZE}."
            )
        return (
            "Inputs, parameters and the outputs of all modules are finite. Unless a layer is named above, the loss "
            f"itself is not. Fix: check the annotations of the images {names}."
        )


def _recorder(name: str, found: list[str]) -> Callable[..., None]:
    def check_output(module: nn.Module, args: tuple, output: Any) -> None:
        if not found and not _is_finite(output):
            found.append(name)

    return check_output


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
    for example in batch:
        name = example.get("file_name", "an image without a name")
        pixels = ~torch.isfinite(example["image"])
        if pixels.any():
            return (
                f"The image {name} has {int(pixels.sum())} values that are NaN or infinite. Fix: repair or remove it."
            )
        instances = example.get("instances")
        if instances is not None and not _is_finite(instances):
            return f"The annotations of {name} have values that are NaN or infinite. Fix: repair or remove them."
    return ""


def _bad_parameter(model: nn.Module) -> str:
    # without buffers: batch norms have just averaged the NaN of this step into their running statistics
    for name, value in model.named_parameters():
        if not _is_finite(value):
            return (
                f"{name} has values that are NaN or infinite, from an earlier step or from the loaded weights. "
                f"Fix: {_STABILIZE}, and start from an earlier checkpoint with MODEL.WEIGHTS."
            )
    return ""
