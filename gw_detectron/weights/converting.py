"""Convert ImageNet weights from torchvision's names to Detectron2's, and check every tensor."""

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import yaml
from torch import Tensor

from ..atomic import atomic_write
from ..errors import (
    FileAccessError,
    UnknownNormError,
    WeightsError,
    WeightsFileError,
    summarize_names,
)
from ..installation import TOOL
from ..norms import CONVS
from .inferring import (
    Architecture,
    Positions,
    build_torchvision,
    detectron2_name,
    infer_architecture,
    infer_norms,
    positions_of,
    to_torchvision,
)
from .network_record import (
    PREPROCESSING,
    TORCHVISION,
    NetworkRecord,
    Preprocessing,
    Provenance,
    read_network_record,
)
from .reading import (
    CHECKSUM_KEY,
    RECORD_KEY,
    FileContent,
    checksum_of,
    named_tensors,
    read_weights_file,
    sha256_of,
    weight_problems,
)

_WRAPPERS = ("model", "state_dict")
# of torchvision's and timm's training scripts
_AVERAGED = ("model_ema", "state_dict_ema")
#: of DataParallel, torch.compile and maskrcnn-benchmark
_PREFIX = re.compile(r"((module|_orig_mod|backbone\.body)\.)*")
#: the classifier, the norm before it (which the authors' ResNeXts have and do not use), counters
_DROPPED = re.compile(r"(fc|last_bn)\..*|.*\.num_batches_tracked")


@dataclass(frozen=True)
class Conversion:
    """Weights of a Detectron2 ResNet."""

    #: float32, with the names of ``backbone.bottom_up`` without that prefix
    tensors: dict[str, Tensor]
    architecture: Architecture
    norms: dict[str, str]  # by torchvision's names of the norm layers
    positions: Positions  # the norms as config keys
    preprocessing: Preprocessing
    #: the source file, None if not read from a file
    provenance: Provenance | None = None

    def config(self, weights: str = "") -> dict[str, Any]:
        """Return the config keys that the weights at ``MODEL.WEIGHTS`` need.

        BN is frozen, as in fine-tuning.
        """
        network, images, norms = self.architecture, self.preprocessing, self.positions
        whiten_norm = norms.whiten_norm or "GW"
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
                    "WHITEN_NORM": "FrozenBN" if whiten_norm == "BN" else whiten_norm,
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
    """Convert a file of ImageNet weights; write it and a yaml of its config keys.

    Each file is written atomically. The classifier is not part of a backbone and is left out.

    Args:
        source: see :func:`.reading.read_weights_file` and :func:`convert`.
        target: for ``MODEL.WEIGHTS``; ends in ``.pkl``, which Detectron2's own checkpointer reads,
            or in ``.safetensors``.
        overwrite: replace existing files.
        options: ``norm`` and ``preprocessing`` of :func:`load_weights`.

    Raises:
        WeightsError: the target has a wrong name.
        FileAccessError: a target exists or cannot be written.
        UserError: the source cannot be converted as requested, see :func:`load_weights`.
    """
    target = Path(target)
    if target.suffix not in (".pkl", ".safetensors"):
        raise WeightsError(
            f"target ({str(target)!r}): wrong suffix. Fix: end the name in .pkl or .safetensors."
        )
    config = target.with_suffix(".yaml")
    for path in (target, config):
        if path.exists() and not overwrite:
            raise FileAccessError(
                f"target ({str(path)!r}): exists. Fix: give another name or --force."
            )

    conversion = load_weights(source, **options)
    norms = {detectron2_name(layer): spec for layer, spec in conversion.norms.items()}
    record = NetworkRecord(norms, conversion.preprocessing, conversion.provenance)
    keys = yaml.safe_dump(
        conversion.config(str(target)), sort_keys=False, default_flow_style=None
    )
    with contextlib.suppress(OSError):  # atomic_write reports it
        target.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_write(config) as keys_file,
        atomic_write(target) as weights_file,
    ):
        keys_file.write_text(f"# Config keys that {target} needs.\n{keys}")
        write_weights_file(weights_file, target.suffix, conversion.tensors, record)
    return conversion


def write_weights_file(
    path: Path, suffix: str, tensors: Mapping[str, Tensor], record: NetworkRecord
) -> None:
    """Write tensors with a record of their network, as safetensors or a pickle of arrays."""
    entries = {
        "__author__": TOOL,
        # Detectron2 then matches tensors by the end of their names, so that one file fits
        # detectors with and without FPN and bare backbones
        "matching_heuristics": True,
        CHECKSUM_KEY: checksum_of(tensors),
        **dataclasses.asdict(record),
    }

    arrays = {
        name: np.array(value.numpy(), order="C") for name, value in tensors.items()
    }

    if suffix == ".safetensors":
        metadata = {"format": "pt", RECORD_KEY: json.dumps(entries)}
        # save_file's error of a full disk is not an OSError
        path.write_bytes(safetensors.numpy.save(arrays, metadata))
        return
    with open(path, "wb") as file:
        pickle.dump({"model": arrays, **entries}, file, protocol=4)


def load_weights(
    path: str | os.PathLike[str],
    *,
    norm: str | None = None,
    preprocessing: str | None = None,
) -> Conversion:
    """Read and check ImageNet weights, converted or not.

    Args:
        path: a source or target of :func:`convert_file`.
        norm: see :func:`convert`.
        preprocessing: a name in :data:`.network_record.PREPROCESSING`; None if recorded, or if the
            source has torchvision's names and statistics, which imply torchvision's preprocessing.

    Raises:
        UnknownNormError: the file does not prove a norm.
        WeightsFileError: the file is damaged, could run code, or is not as expected.
        OSError: the file cannot be read.
    """
    content = read_weights_file(path)
    try:
        conversion = convert(content, norm=norm, preprocessing=preprocessing)
    except ValueError as error:
        kind = (
            UnknownNormError
            if isinstance(error, UnknownNormError)
            else WeightsFileError
        )
        raise kind(f"weights ({os.fspath(path)!r}): {error}") from None
    if conversion.provenance is not None:
        return conversion
    origin = Provenance(TOOL, os.path.basename(path), sha256_of(path))
    return dataclasses.replace(conversion, provenance=origin)


def convert(
    content: Any, *, norm: str | None = None, preprocessing: str | None = None
) -> Conversion:
    """Rename, reshape and check ResNet or ResNeXt weights.

    The architecture and the layers with batch normalization are inferred from the tensors. All
    other norms must be recorded in the content, or stated.

    Args:
        content: a state dict, bare or under ``model`` or ``state_dict``, with or without the
            prefix ``module.`` of data-parallel training; or the content of a file.
        norm: the norm name of all layers without BN's statistics, e.g. ``GW:groups=32``; None if
            recorded.
        preprocessing: see :func:`load_weights`.

    Raises:
        UnknownNormError: a norm is neither recorded nor proven nor stated.
        WeightsError: a tensor is missing, unexpected, not finite, or of wrong shape or type; or
            norms contradict each other.
        ValueError: a norm name is unknown or does not fit.
    """
    if not isinstance(content, FileContent):
        content = FileContent(content)
    record = read_network_record(content)
    tensors = _unwrap(content)

    reason = _caffe_statistics(tensors)
    if "stem.bn1.weight" in tensors:
        reason = "the names are maskrcnn-benchmark's"
        tensors = {name.removeprefix("stem."): value for name, value in tensors.items()}
    elif "stem.conv1.weight" in tensors:
        reason = "the names are Detectron2's"
        tensors = to_torchvision(tensors)
    images = _preprocessing(record.preprocessing, preprocessing, unclear=reason)

    network = infer_architecture(tensors)
    _refuse_standardized(record)
    norms = infer_norms(network, tensors, record.norms, norm)
    positions = positions_of(network, norms)
    converted = _convert_tensors(tensors, network, norms, positions)
    return Conversion(converted, network, norms, positions, images, record.provenance)


def _unwrap(content: FileContent) -> dict[str, Tensor]:
    """Find the state dict in the content of a checkpoint file."""
    value = content.value
    while isinstance(value, Mapping):
        wrappers = [key for key in _WRAPPERS if isinstance(value.get(key), Mapping)]
        if len(wrappers) > 1:
            raise WeightsError(
                "keys ('model' and 'state_dict'): both hold weights. Fix: keep one."
            )
        if not wrappers:
            break
        for key in _AVERAGED:
            if key in value:
                logging.getLogger(__name__).warning(
                    "%s: averaged weights are left out. Fix: to convert them, save "
                    "checkpoint['%s'] as a file.",
                    key,
                    key,
                )
        value = value[wrappers[0]]

    tensors: dict[str, Tensor] = named_tensors(value, content.size)
    # the counter of torch.optim.swa_utils.AveragedModel
    tensors.pop("n_averaged", None)
    prefixes = {_PREFIX.match(name)[0] for name in tensors}  # type: ignore[index]
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {
        name: tensor for name, tensor in tensors.items() if not _DROPPED.fullmatch(name)
    }


def _caffe_statistics(tensors: Mapping[str, Tensor]) -> str:
    """Return why weights with torchvision's names may not be torchvision's, or ""."""
    distances = [
        (value.float() - float(name.endswith("var"))).abs()
        for name, value in tensors.items()
        if name.endswith((".running_mean", ".running_var"))
    ]
    if distances and all(bool((distance < 1e-3).all()) for distance in distances):
        return (
            "all running means are 0 and variances 1, as in weights from Caffe, whose BN is "
            "multiplied into its scale"
        )
    return ""


def _preprocessing(
    recorded: Preprocessing | None, stated: str | None, *, unclear: str
) -> Preprocessing:
    """Return the recorded or stated preprocessing.

    Torchvision's names imply torchvision's, unless the text ``unclear`` says why they do not.
    """
    known = ", ".join(PREPROCESSING)
    if stated is None:
        if recorded is None and unclear:
            raise WeightsError(
                f"preprocessing (not recorded): {unclear}. They need RGB or BGR images, with or "
                "without division by std. Fix: run gw-detectron weights convert with "
                f"--preprocessing (in Python, preprocessing=) as one of {known}; Caffe's ResNets "
                "are detectron2-msra."
            )
        return recorded or TORCHVISION

    if stated not in PREPROCESSING:
        raise WeightsError(
            f"preprocessing ({stated!r}): unknown. Fix: give one of {known}."
        )
    if recorded not in (None, PREPROCESSING[stated]):
        raise WeightsError(
            f"preprocessing ({stated!r}): the file records {recorded}. Fix: leave it out."
        )
    return PREPROCESSING[stated]


def _refuse_standardized(record: NetworkRecord) -> None:
    for layer, name in (record.norms or {}).items():
        if name in CONVS:
            raise WeightsError(
                f"{layer} ('WS'): Weight Standardization, which conversion does not support. Fix: "
                "set MODEL.WEIGHTS to the checkpoint of the run, such as model_final.pth, with "
                "MODEL.RESNETS.CONV WS."
            )


def _convert_tensors(
    tensors: Mapping[str, Tensor],
    network: Architecture,
    norms: Mapping[str, str],
    positions: Positions,
) -> dict[str, Tensor]:
    """Convert the tensors if all fit torchvision's network."""
    state = build_torchvision(network, norms).state_dict()
    expected = {
        name: state[name].shape for name in state if not _DROPPED.fullmatch(name)
    }
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
    }

    fitting = {}
    for name in sorted(expected.keys() & tensors.keys()):
        value, shape = tensors[name], expected[name]
        is_whitened = norms.get(name.rpartition(".")[0], "").startswith("GW")
        if is_whitened and value.shape == (1, *shape, 1, 1):
            value = value.flatten()  # the authors' scale and shift
        fitting[name] = value
        if value.shape != shape:
            problem = f"of wrong shape {tuple(value.shape)}, expected {tuple(shape)}"
            problems.setdefault(problem, []).append(name)
    problems |= weight_problems(fitting)

    lines = [
        f"{len(names)} {problem}: {summarize_names(names)}"
        for problem, names in problems.items()
        if names
    ]
    if lines:
        head = f"tensors: do not fit {network.name} with {positions}"
        fix = "Fix: give complete weights of one network, and their norm."
        raise WeightsError("\n  ".join([head, *lines, fix]))
    return {detectron2_name(name): fitting[name].float() for name in expected}
