"""Convert ImageNet weights from torchvision's names to Detectron2's, check every tensor, write the result."""

import contextlib
import dataclasses
import logging
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor

from ..atomic import atomic_write, remove_unfinished
from ..errors import (
    FileAccessError,
    UnknownNormError,
    WeightsError,
    WeightsFileError,
    summarize_names,
)
from ..installation import TOOL
from ..norms import CONVS
from .network import (
    PREPROCESSING,
    TORCHVISION,
    Architecture,
    Positions,
    Preprocessing,
    Provenance,
    Record,
    build_torchvision,
    detectron2_name,
    infer_architecture,
    infer_norms,
    positions_of,
    read_record,
    to_torchvision,
)
from .reading import Contents, named_tensors, read_weights_file, sha256_of, weight_problem

_WRAPPERS = ("model", "state_dict")
_AVERAGED = ("model_ema", "state_dict_ema")  # of torchvision's and timm's training scripts
_PREFIXES = (
    "module.",
    "_orig_mod.",
    "backbone.body.",
)  # of DataParallel, torch.compile and maskrcnn-benchmark
#: the classifier, the norm before it (which the authors' ResNeXts have and do not use), and step counters
DROPPED = re.compile(r"(fc|last_bn)\..*|.*\.num_batches_tracked")


@dataclass(frozen=True)
class Conversion:
    """Weights of a Detectron2 ResNet."""

    tensors: dict[
        str, Tensor
    ]  # float32, with the names of ``backbone.bottom_up`` without that prefix
    source_tensors: dict[str, Tensor]  # before the conversion, with torchvision's names
    architecture: Architecture
    norms: dict[str, str]  # by torchvision's names of the norm layers
    positions: Positions  # the norms as config keys
    preprocessing: Preprocessing
    provenance: Provenance | None = (
        None  # the file they were converted from, None if not read from a file
    )

    def config(self, weights: str = "") -> dict[str, Any]:
        """Return the config keys that the weights at ``MODEL.WEIGHTS`` need; BN is frozen, as in fine-tuning."""
        network, images, norms = self.architecture, self.preprocessing, self.positions
        return {
            "MODEL": {
                "WEIGHTS": weights,
                "BACKBONE": {"NAME": "build_gw_resnet_fpn_backbone"},
                "PIXEL_MEAN": list(images.pixel_mean),
                "PIXEL_STD": list(images.pixel_std),
                "RESNETS": {
                    "DEPTH": network.depth,
                    "NUM_GROUPS": network.groups,
                    "WIDTH_PER_GROUP": network.width,
                    "RES2_OUT_CHANNELS": 256 if network.bottleneck else 64,
                    "STRIDE_IN_1X1": images.stride_in_1x1,
                    "NORM": "FrozenBN" if norms.norm == "BN" else norms.norm,
                    "WHITEN_NORM": {"": "GW", "BN": "FrozenBN"}.get(
                        norms.whiten_norm, norms.whiten_norm
                    ),
                    "WHITEN_POSITIONS": norms.positions,
                },
            },
            "INPUT": {"FORMAT": images.input_format},
            "VERSION": 2,
        }


def convert_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    **options: Any,
) -> Conversion:
    """Convert a file of ImageNet weights; write Detectron2's .pkl and a yaml of the config keys that it needs.

    Each file is written atomically. The classifier is not part of a backbone and is left out.

    Args:
        source: see :func:`.reading.read_weights_file` and :func:`convert`.
        target: for ``MODEL.WEIGHTS``; ends in ``.pkl``.
        overwrite: replace existing files.
        options: ``norm`` and ``preprocessing`` of :func:`load_weights`.

    Raises:
        WeightsError: the target has a wrong name.
        FileAccessError: a target exists or cannot be written.
        UserError: the source cannot be converted as requested, see :func:`load_weights`.
    """
    target = Path(target)
    if target.suffix != ".pkl":
        raise WeightsError(
            f"target ({str(target)!r}): wrong suffix. Fix: end the name in .pkl."
        )
    config = target.with_suffix(".yaml")
    for path in (target, config):
        if path.exists() and not overwrite:
            raise FileAccessError(
                f"target ({str(path)!r}): exists. Fix: give another name or --force."
            )
    remove_unfinished(target.parent)
    conversion = load_weights(source, **options)
    norms = {detectron2_name(layer): spec for layer, spec in conversion.norms.items()}
    content = {
        "model": {
            name: np.ascontiguousarray(value.numpy())
            for name, value in conversion.tensors.items()
        },
        "__author__": TOOL,
        # Detectron2 then matches tensors by the end of their names, so that one file fits detectors with and without
        # FPN and bare backbones
        "matching_heuristics": True,
        **dataclasses.asdict(Record(norms, conversion.preprocessing, conversion.provenance)),
    }
    with contextlib.suppress(OSError):  # atomic_write reports it
        target.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(
        conversion.config(str(target)), sort_keys=False, default_flow_style=None
    )
    with (
        atomic_write(config) as keys,
        atomic_write(target) as weights,
        open(weights, "wb") as file,
    ):
        keys.write_text(f"# Config keys that {target} needs.\n{text}")
        pickle.dump(content, file, protocol=4)
    return conversion


def load_weights(
    path: str | os.PathLike[str], *, norm: str | None = None, preprocessing: str | None = None
) -> Conversion:
    """Read and check ImageNet weights, converted or not.

    Args:
        path: a source or target of :func:`convert_file`.
        norm: see :func:`convert`.
        preprocessing: a name in :data:`.network.PREPROCESSING`; None if recorded, or if the source has torchvision's
            names and statistics, which imply torchvision's preprocessing.

    Raises:
        UnknownNormError: the file does not prove a norm.
        WeightsFileError: the file is damaged, could run code, or is not as expected.
        OSError: the file cannot be read.
    """
    contents = read_weights_file(path)
    try:
        conversion = convert(contents, norm=norm, preprocessing=preprocessing)
    except ValueError as error:
        kind = UnknownNormError if isinstance(error, UnknownNormError) else WeightsFileError
        raise kind(f"weights ({os.fspath(path)!r}): {error}") from None
    origin = conversion.provenance or Provenance(TOOL, os.path.basename(path), sha256_of(path))
    return dataclasses.replace(conversion, provenance=origin)


def _caffe_statistics(tensors: Mapping[str, Tensor]) -> str:
    """Return why weights with torchvision's names may not be torchvision's, or ""."""
    fields = {".running_mean": 0.0, ".running_var": 1.0}
    statistics = [
        (value.float(), fields[end])
        for name, value in tensors.items()
        for end in fields
        if name.endswith(end)
    ]
    if statistics and all(
        bool((value - constant).abs().max() < 1e-3) for value, constant in statistics
    ):
        return (
            "all running means are 0 and variances 1, as in weights from Caffe, whose BN is "
            "multiplied into its scale"
        )
    return ""


def _preprocessing(record: Record, stated: str | None, *, unclear: str) -> Preprocessing:
    """Return the recorded or stated preprocessing; torchvision's names imply torchvision's unless it is unclear why."""
    known = ", ".join(PREPROCESSING)
    if stated is not None and stated not in PREPROCESSING:
        raise WeightsError(f"preprocessing ({stated!r}): unknown. Fix: give one of {known}.")
    if record.preprocessing is None and stated is None and unclear:
        raise WeightsError(
            f"preprocessing (not recorded): {unclear}. They need RGB or BGR images, with or without division by std. "
            "Fix: run gw-detectron weights convert with --preprocessing (in Python, preprocessing=) as one of "
            f"{known}; Caffe's ResNets are detectron2-msra."
        )
    if (
        record.preprocessing is not None
        and stated is not None
        and record.preprocessing != PREPROCESSING[stated]
    ):
        raise WeightsError(
            f"preprocessing ({stated!r}): the file records {record.preprocessing}. Fix: leave it out."
        )
    return record.preprocessing or (PREPROCESSING[stated] if stated else TORCHVISION)


def convert(
    content: Any, *, norm: str | None = None, preprocessing: str | None = None
) -> Conversion:
    """Rename, reshape and check ResNet or ResNeXt weights.

    The architecture and the layers with batch normalization are inferred from the tensors. All other norms must be
    recorded in the content, or stated.

    Args:
        content: a state dict, bare or under ``model`` or ``state_dict``, with or without the prefix ``module.`` of
            data-parallel training; or the contents of a file.
        norm: the norm name of all layers without BN's statistics, e.g. ``GW:groups=32``; None if recorded.
        preprocessing: see :func:`load_weights`.

    Raises:
        UnknownNormError: a norm is neither recorded nor proven nor stated.
        WeightsError: a tensor is missing, unexpected, not finite, or of wrong shape or type; or norms contradict each
            other.
        ValueError: a norm name is unknown or does not fit.
    """
    contents = content if isinstance(content, Contents) else Contents(content)
    record, tensors = read_record(contents), _unwrap(contents)
    reason = _caffe_statistics(tensors)
    if "stem.bn1.weight" in tensors:
        reason = "the names are maskrcnn-benchmark's"
        tensors = {name.removeprefix("stem."): value for name, value in tensors.items()}
    elif "stem.conv1.weight" in tensors:
        reason, tensors = "the names are Detectron2's", to_torchvision(tensors)
    images = _preprocessing(record, preprocessing, unclear=reason)
    network = infer_architecture(tensors)
    if convs := [layer for layer, name in (record.norms or {}).items() if name in CONVS]:
        raise WeightsError(
            f"{convs[0]} ('WS'): Weight Standardization, which conversion does not support. Fix: set MODEL.WEIGHTS to "
            "the checkpoint of the run, such as model_final.pth, with MODEL.RESNETS.CONV WS."
        )
    norms = infer_norms(network, tensors, record, norm)
    positions = positions_of(network, norms)
    converted = _convert_tensors(tensors, network, norms, positions)
    return Conversion(converted, tensors, network, norms, positions, images, record.provenance)


def _convert_tensors(
    tensors: Mapping[str, Tensor],
    network: Architecture,
    norms: Mapping[str, str],
    positions: Positions,
) -> dict[str, Tensor]:
    """Convert the tensors if all fit torchvision's network."""
    expected = {
        name: tuple(value.shape)
        for name, value in build_torchvision(network, norms).state_dict().items()
    }
    left = {name: value for name, value in tensors.items() if not DROPPED.fullmatch(name)}
    converted, problems = {}, dict[str, list[str]]()
    for name, shape in expected.items():
        if DROPPED.fullmatch(name):
            continue
        value = left.pop(name, None)
        if value is None:
            problems.setdefault("missing", []).append(name)
            continue
        is_affine = norms.get(name.rpartition(".")[0], "").startswith("GW")
        if is_affine and value.shape == (1, *shape, 1, 1):  # the authors' scale and shift
            value = value.flatten()
        problem = (
            f"of wrong shape, expected {shape}"
            if value.shape != shape
            else weight_problem(name, value)
        )
        if problem:
            dtype = str(value.dtype).removeprefix("torch.")
            problems.setdefault(problem, []).append(f"{name} {tuple(value.shape)} {dtype}")
        else:
            converted[detectron2_name(name)] = value.float()
    if left:
        problems["unexpected"] = list(left)
    if problems:
        lines = [
            f"{len(names)} {problem}: {summarize_names(names)}"
            for problem, names in problems.items()
        ]
        head = f"tensors: do not fit {network.name} with {positions}"
        raise WeightsError(
            "\n  ".join(
                [head, *lines, "Fix: give complete weights of one network, and their norm."]
            )
        )
    return converted


def _unwrap(contents: Contents) -> dict[str, Tensor]:
    """Find the state dict in the content of a checkpoint file."""
    content = contents.value
    while isinstance(content, Mapping):
        found = [key for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if len(found) > 1:
            raise WeightsError(
                f"keys ({' and '.join(map(repr, found))}): both hold weights. Fix: keep one."
            )
        if not found:
            break
        for key in [key for key in _AVERAGED if key in content]:
            text = "%s: averaged weights are left out. Fix: to convert them, save checkpoint['%s'] as a file."
            logging.getLogger(__name__).warning(text, key, key)
        content = content[found[0]]
    tensors: dict[str, Tensor] = named_tensors(content, contents.size)
    tensors.pop("n_averaged", None)  # the counter of torch.optim.swa_utils.AveragedModel
    while prefix := next(
        (
            text
            for text in _PREFIXES
            if tensors and all(name.startswith(text) for name in tensors)
        ),
        "",
    ):
        tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors
