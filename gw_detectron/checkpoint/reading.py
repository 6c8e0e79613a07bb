"""Reads weight files of any origin without running code that they may carry."""

import argparse
import os
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .arrays import STAND_INS, with_tensors

# how files of torch.save began before version 1.6 made them archives; the authors' files may be of either kind
_LEGACY_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


class WeightsFileError(ValueError):
    """A weight file that is damaged or of no known kind."""


class RefusedFileError(WeightsFileError):
    """A weight file that could run code while it is read."""


class Contents(NamedTuple):
    """What a weight file holds.

    Args:
        value: the object in the file, mostly nested dicts; numpy arrays of a pickle are tensors here.
        metadata: the texts in the header of a safetensors file, empty for other kinds.
    """

    value: Any
    metadata: Mapping[str, str]


def read_weights_file(path: str | os.PathLike[str]) -> Contents:
    """Reads a file of ``torch.save``, a safetensors file, or a pickle of numpy arrays.

    The kind is told from the content. Code in the file is never run: only tensors, arrays, numbers, texts, plain
    containers and ``argparse.Namespace`` are made. Numbers in archives of ``torch.save`` are checked by their checksum.

    Raises:
        RefusedFileError: the file names something else, which could run code.
        WeightsFileError: the file is cut off, damaged, or of no known kind.
        OSError: the file does not exist or cannot be opened.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path} (looked from {os.getcwd()})")
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(len(_LEGACY_TORCH))
    try:
        if size == 0:
            raise WeightsFileError("it is empty")
        if begin.startswith(b"PK"):
            _check_archive(path, size)
            return Contents(_load_torch(path, size), {})
        if begin == _LEGACY_TORCH:
            return Contents(_load_torch(path, size), {})
        if begin[:1] == b"\x80":
            return Contents(_load_pickle(path), {})
        if begin[8:9] == b"{" and struct.unpack("<Q", begin[:8])[0] < _LARGEST_HEADER:
            return _load_safetensors(path)
        if begin.lstrip()[:1] == b"<":
            raise WeightsFileError("it is a web page, so the download went wrong")
        raise WeightsFileError("it is no file of torch.save, no safetensors file and no pickle")
    except RefusedFileError as error:
        raise RefusedFileError(f"{path} was not read: {error}. {_how_to_save_again(path)}") from None
    except WeightsFileError as error:
        raise WeightsFileError(f"{path} cannot be read: {error}") from None
    except Exception as error:  # damage reaches the readers in every form, OSError and MemoryError among them
        reason = " ".join(str(error).split()) or "no reason given"
        raise WeightsFileError(
            f"{path} cannot be read: it is cut off or damaged ({type(error).__name__}: {reason[:200]})"
        ) from error


def _how_to_save_again(path: str) -> str:
    load = (
        f"pickle.load(open({path!r}, 'rb'))" if path.endswith(".pkl") else f"torch.load({path!r}, weights_only=False)"
    )
    return (
        "Use another source, best a safetensors file. If you trust this one, take its tensors out where it can do no "
        f"harm, and use that file: import pickle, torch; content = {load}; torch.save({{name: value for name, value in "
        "content['model'].items()}, 'tensors.pth')  # or 'state_dict' for 'model'"
    )


def _check_archive(path: str, size: int) -> None:
    # the end of an archive is its table of contents, so one that was cut off has none
    if not zipfile.is_zipfile(path):
        raise WeightsFileError("it is cut off: the table of contents at its end is missing")
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        if any(part.filename.endswith("/constants.pkl") for part in parts):
            raise RefusedFileError("it is a TorchScript archive, which holds code")
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise WeightsFileError("parts of it are compressed, which torch.save never does")
        if sum(part.file_size for part in parts) > size:
            raise WeightsFileError("its parts claim to be larger than the file")
        damaged = archive.testzip()
    if damaged:
        raise WeightsFileError(f"it is damaged: the checksum of its part {damaged} is wrong")


def _load_torch(path: str, size: int) -> Any:
    # beyond what torch allows itself: scripts keep their flags and scores beside the weights
    allowed: list[Any] = [argparse.Namespace, *((stand_in, name) for name, stand_in in STAND_INS.items())]
    try:
        with torch.serialization.safe_globals(allowed):
            # first without the numbers, so that sizes which cannot be true are found before memory is asked for
            _check_sizes(torch.load(path, map_location="meta", weights_only=True), size)
            return with_tensors(torch.load(path, map_location="cpu", weights_only=True))
    except NotImplementedError:
        raise WeightsFileError("it holds sparse or quantised tensors; save dense ones of float32") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named:
            raise RefusedFileError(f"it names {named[1]}, and making that could run code") from None
        raise


def _check_sizes(content: Any, size: int) -> None:
    for tensor in _tensors(content):
        if tensor.layout != torch.strided:
            raise WeightsFileError(f"it holds a tensor of layout {tensor.layout}; only dense ones are weights")
        reach = 1 + tensor.storage_offset()
        reach += sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        claimed = max(tensor.untyped_storage().nbytes(), reach * tensor.element_size() if tensor.numel() else 0)
        if claimed > size:
            raise WeightsFileError(f"it claims a tensor of {claimed} bytes, but is itself only {size} bytes long")


def _tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _tensors(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _tensors(value)


# The C version makes room for as many objects as a number in the file says, which a damaged one sets to billions.
class _ArrayUnpickler(pickle._Unpickler):
    """Makes arrays of numbers and plain Python values only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if f"{module}.{name}" not in STAND_INS:
            raise RefusedFileError(f"it names {module}.{name}, and making that could run code")
        return STAND_INS[f"{module}.{name}"]


def _load_pickle(path: str) -> Any:
    with open(path, "rb") as file:
        # latin1 reads the texts and arrays of Python 2, in which the older Detectron files were written
        return with_tensors(_ArrayUnpickler(file, encoding="latin1").load())


def _load_safetensors(path: str) -> Contents:
    try:
        with safe_open(path, framework="pt") as file:
            return Contents({name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise WeightsFileError(f"it is cut off or damaged ({error})") from None
