"""Read weight files without running code that they contain."""

import argparse
import functools
import hashlib
import json
import os
import pickle
import stat
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from io import BufferedReader
from typing import IO, Any, Literal, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # in torch 1.13 to 2.14

from ..errors import FileAccessError, MissingFileError, RefusedFileError, WeightsFileError
from .numpy_unpickler import STAND_INS, NumpyArray, NumpyUnpickler, is_allowed
from .pickle_check import DEEPEST, SAVE_AGAIN, check_pickle, most_repeated

__all__ = ["Contents", "read_weights_file"]

_LEGACY_TORCH = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # first bytes of torch.save's files before torch 1.6
_LEGACY_PICKLES = 5  # of such a file: magic number, version, system, content, names of the storages
_GET_AGAIN = "Fix: get the file again."
_SAVE_DENSE = "Fix: save dense tensors with torch.save."
_UTF8 = 0x800  # flag of an archive's part: the encoding of its name
_LARGEST_HEADER = 2**23  # bytes of a safetensors header or an archive directory: about 80,000 tensors
_NAMES = {"torch": "file of torch.save", "pickle": "pickle", "safetensors": "safetensors file"}
# Names that state a format, as Detectron2 reads them. Others (.bin, .ckpt, .tar, none) are used for several formats.
_SUFFIXES = {".pth": "torch", ".pt": "torch", ".pyth": "torch", ".pkl": "pickle", ".safetensors": "safetensors"}


class Contents(NamedTuple):
    """The content of a weight file.

    Args:
        value: the object in the file, usually nested dicts; numpy arrays are converted to tensors.
        metadata: the header of a safetensors file, empty for other formats.
        format: the format, which is detected from the file's first bytes.
        sha256: the SHA-256 of the bytes that were read.
    """

    value: Any
    metadata: Mapping[str, str] = {}
    format: Literal["torch", "pickle", "safetensors"] = "torch"
    sha256: str = ""


def read_weights_file(path: str | os.PathLike[str]) -> Contents:
    """Read a weight file without running code that it contains.

    Formats: ``torch.save``, safetensors, and a pickle of numpy arrays. The content decides; a name that ends in
    ``.pth``, ``.pt``, ``.pyth``, ``.pkl`` or ``.safetensors`` must agree.

    Only tensors, numeric arrays, numbers, strings, plain containers and ``argparse.Namespace`` are returned. Tensors
    and containers have no attributes from the file, except the module versions of a state dict. Sizes are compared with
    the file size before memory is allocated; archives of ``torch.save`` are verified by checksum. The file is opened
    once, so the checked bytes are those that are read.

    Raises:
        RefusedFileError: the file names another class or function, which could run code.
        WeightsFileError: the file is truncated, damaged, no regular file, of an unknown format, exceeds a limit of
            :mod:`.pickle_check`, has the name of another format, or changes while it is read.
        MissingFileError: the file does not exist.
        FileAccessError: the file cannot be opened.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise MissingFileError(f"'{path}': file not found (cwd: {os.getcwd()}). Fix: give an existing file.")
    try:
        # a pipe would block without O_NONBLOCK
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            return _read_unchanged(file, path)
    except RefusedFileError as error:
        raise RefusedFileError(f"'{path}': was not read: {error}. Fix: {_how_to_extract_tensors(path)}") from None
    except WeightsFileError as error:
        raise WeightsFileError(f"'{path}': cannot be read: {error}") from None
    except OSError as error:
        raise FileAccessError(f"'{path}': cannot be read: {error.strerror}. Fix: give a readable file.") from error


def _read_unchanged(file: BufferedReader, path: str) -> Contents:
    before = os.fstat(file.fileno())
    if not stat.S_ISREG(before.st_mode):
        raise WeightsFileError("it is not a regular file. Fix: give a file.")
    try:
        contents = _read(file, before.st_size)
    except WeightsFileError:
        raise
    except pickle.UnpicklingError as error:  # check_pickle has read the whole pickle, so it is not damaged
        reason = " ".join(str(error.__context__ or error).split())[:200]  # torch wraps it into its advice
        raise WeightsFileError(f"it contains more than tensors and plain values ({reason}). {SAVE_AGAIN}") from error
    except Exception as error:  # damaged files raise anything, OSError and MemoryError included
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise WeightsFileError(f"it is cut off or damaged ({reason}). {_GET_AGAIN}") from error
    _check_name(path, contents.format)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise WeightsFileError("it changed while it was read. Fix: try again when it is complete.")
    return contents._replace(sha256=digest)


def _check_name(path: str, found: str) -> None:
    suffix = os.path.splitext(path)[1].lower()
    if _SUFFIXES.get(suffix, found) != found:
        right = next(name for name, kind in _SUFFIXES.items() if kind == found)
        raise WeightsFileError(
            f"its name ends in {suffix}, but it is a {_NAMES[found]}. Fix: rename it to end in {right}."
        )


def _read(file: IO[bytes], size: int) -> Contents:
    if size == 0:
        raise WeightsFileError(f"it is empty. {_GET_AGAIN}")
    begin = file.read(len(_LEGACY_TORCH))
    file.seek(0)
    if begin[4:9] == b"\0\0\0\0{":  # first: the length of the header may look like the first bytes of another format
        return _load_safetensors(file, begin)
    if begin.startswith(b"PK"):
        _check_archive(file, size)
        return Contents(_load_torch(file, size))
    if begin == _LEGACY_TORCH:
        for _ in range(_LEGACY_PICKLES):
            check_pickle(file, size, _is_allowed_by_torch)
        return Contents(_load_torch(file, size))
    if begin[:1] == b"\x80":
        check_pickle(file, size, is_allowed)
        file.seek(0)
        # latin1 decodes the strings and arrays of Python 2 in old Detectron files
        return Contents(_rebuild(NumpyUnpickler(file, encoding="latin1").load()), format="pickle")
    if begin.lstrip()[:1] == b"<":
        raise WeightsFileError("it is a web page, so the download failed. Fix: download the file again.")
    raise WeightsFileError(
        "it is not a file of torch.save, a safetensors file or a pickle. Fix: save the tensors with torch.save."
    )


def _load_safetensors(file: IO[bytes], begin: bytes) -> Contents:
    end = 8 + struct.unpack("<Q", begin[:8])[0]
    if end > _LARGEST_HEADER:
        raise WeightsFileError(f"its header claims {end - 8} bytes, more than {_LARGEST_HEADER}. {_GET_AGAIN}")
    data = file.read()
    tensors = safetensors.torch.load(data)  # which checks the header
    return Contents(tensors, json.loads(data[8:end]).get("__metadata__") or {}, "safetensors")


def _how_to_extract_tensors(path: str) -> str:
    load = f"torch.load({path!r}, weights_only=False)"
    if path.endswith(".pkl"):
        load = f"pickle.load(open({path!r}, 'rb'))"
    return (
        "use another source, preferably a safetensors file. If you trust this file, extract its tensors in a sandbox: "
        f"import pickle, torch; content = {load}; tensors = content.state_dict() if hasattr(content, 'state_dict') "
        "else content['model']; torch.save(dict(tensors), 'tensors.pth')  # or content['state_dict']"
    )


def _check_archive(file: IO[bytes], size: int) -> None:
    _check_archive_end(file, size)
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.filename.lower().endswith("/constants.pkl") for part in parts):
            raise RefusedFileError("it is a TorchScript archive, which contains code")
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise WeightsFileError(
                "it has compressed parts, which torch.save never writes. Fix: save the tensors with torch.save."
            )
        if sum(part.file_size for part in parts) > size:
            raise WeightsFileError(f"its parts claim to be larger than the file. {_GET_AGAIN}")
        if damaged := archive.testzip():
            raise WeightsFileError(f"it is damaged: wrong checksum of its part {damaged}. {_GET_AGAIN}")
        check_storage = functools.partial(_check_storage, _part_sizes(parts), parts[0].filename.partition("/")[0])
        for part in parts:
            if part.filename.lower().endswith("data.pkl"):
                with archive.open(part) as content:
                    check_pickle(content, size, _is_allowed_by_torch, check_storage)


def _part_sizes(parts: Sequence[zipfile.ZipInfo]) -> dict[str, int]:
    """Return the bytes of each part by its path in lower case, as torch ignores the case."""
    for part in parts:
        # zipfile decodes names, or takes them from another field; torch compares their bytes
        if part.filename != part.orig_filename or not (part.filename.isascii() or part.flag_bits & _UTF8):
            raise WeightsFileError(f"it has a part with an ambiguous name. {_GET_AGAIN}")
    sizes = {part.filename.lower(): part.file_size for part in parts}
    if len(sizes) < len(parts):
        raise WeightsFileError(f"it has two parts of one name. {_GET_AGAIN}")
    return sizes


def _check_storage(sizes: Mapping[str, int], root: str, reference: tuple[object, ...]) -> None:
    """Require that the part of a storage is large enough: torch below 2.10 reads beyond a smaller one.

    Args:
        sizes: path of a part in lower case -> bytes.
        root: the folder of all parts.
        reference: as torch.save writes it: ("storage", class, key, device, number of elements).

    Source: CVE-2026-24747.
    """
    match reference:
        case ("storage", str(path), str(key), str(), int(count)):
            name = path.rpartition(".")[2]
            dtype = torch.uint8 if name == "UntypedStorage" else torch.serialization.StorageType(name).dtype
            if 0 <= count * dtype.itemsize <= sizes.get(f"{root}/data/{key}".lower(), -1):
                return
    raise WeightsFileError(f"it is damaged: a storage is larger than its part. {_GET_AGAIN}")


def _check_archive_end(file: IO[bytes], size: int) -> None:
    """Require that torch and zipfile find the same directory, and that it is small.

    Both would search for other directories in a longer file.
    """
    file.seek(max(0, size - 98))
    records = file.read()
    mark, *_, length, start, comment = struct.unpack("<4s4H2LH", records[-22:].ljust(22))
    end = size - 22
    if records[-42:-38] == b"PK\6\7":  # of 64 bit: the record and its locator stand before the end
        end = size - 98
        length, start = struct.unpack("<4sQ2H2L4Q", records[:56])[-2:]
        mark = mark if records[:4] == b"PK\6\6" and struct.unpack("<8xQ4x", records[56:76])[0] == end else b""
    if mark != b"PK\5\6" or comment or start + length != end:
        raise WeightsFileError(f"it is cut off: the archive's directory at its end is missing. {_GET_AGAIN}")
    if length > _LARGEST_HEADER:
        raise WeightsFileError(f"its directory has {length} bytes, more than {_LARGEST_HEADER}. {_GET_AGAIN}")


def _load_torch(file: IO[bytes], size: int) -> Any:
    # training scripts save their flags and scores beside the weights
    allowed: list[Any] = [argparse.Namespace, *((stand_in, name) for name, stand_in in STAND_INS.items())]
    # TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD has no effect on an explicit weights_only
    options: dict[str, Any] = {"weights_only": True, "mmap": False}
    try:
        with torch.serialization.safe_globals(allowed):
            file.seek(0)
            with _SizeCheck(size):  # on the meta device no memory is allocated, so false sizes are found first
                torch.load(file, map_location="meta", **options)
            file.seek(0)
            return _rebuild(torch.load(file, map_location="cpu", **options))
    except NotImplementedError:
        raise WeightsFileError(f"it contains sparse or quantized tensors. {_SAVE_DENSE}") from None


_TORCH_NAMES = {
    "argparse.Namespace",
    "collections.Counter",
    "builtins.complex",
    "builtins.set",
    "__builtin__.complex",
    "__builtin__.set",
    "torch.Size",
    "torch.Tensor",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.serialization._get_layout",
    "torch._tensor._rebuild_from_type_v2",
    *(f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "sparse_tensor", "qtensor")),
    *(f"torch._utils._rebuild_{name}" for name in ("parameter", "parameter_with_state")),
}


def _is_allowed_by_torch(path: str) -> bool:
    """Tell whether a file of torch.save may name a class or function.

    torch's own list also has functions that allocate any size, such as ``bytearray``.
    """
    module, _, name = path.rpartition(".")
    return (
        is_allowed(path)
        or path in _TORCH_NAMES
        or (module in ("torch", "torch.storage") and name.endswith("Storage"))
        or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
    )


class _SizeCheck(TorchDispatchMode):
    """Compare every tensor that is created with the file size.

    The content does not show all of them: a pickle can drop a tensor, or use it as an attribute or a key.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._left = most_repeated(size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._check(Tensor.detach(result))  # without attributes, which could replace methods
        return result

    def _check(self, value: Tensor) -> None:
        if value.layout != torch.strided:
            raise WeightsFileError(f"it contains a tensor of layout {value.layout}. {_SAVE_DENSE}")
        last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
        reach = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
        if (claimed := max(value.untyped_storage().nbytes(), reach)) > self._size:
            raise WeightsFileError(
                f"it is damaged: it claims a tensor of {claimed} bytes, but the file has only {self._size} bytes. "
                f"{_GET_AGAIN}"
            )
        self._left -= value.numel() * value.element_size()  # more than the storage has, if a stride is 0
        if self._left < 0:
            raise WeightsFileError(
                f"its tensors repeat their values to far more than its {self._size} bytes. "
                "Fix: save contiguous tensors, by tensor.contiguous()."
            )


def _rebuild(content: Any) -> Any:
    """Copy nested containers without the attributes that a pickle may set, and arrays to tensors.

    An attribute can replace a method: a tensor of NaN would call itself finite. Every container is copied once: a tiny
    file can nest one list in itself, or share it 2**40 times.
    """
    done: dict[int, tuple[Any, Any]] = {}  # with the originals: Python reuses the ids of deleted objects

    def copy(value: Any, depth: int = 0) -> Any:
        if depth > DEEPEST:
            raise WeightsFileError(f"it nests containers deeper than {DEEPEST}. {SAVE_AGAIN}")
        if isinstance(value, NumpyArray):
            return value.tensor
        if isinstance(value, Tensor):
            return Tensor.detach(value)
        if id(value) in done:
            return done[id(value)][1]
        new: Any = value
        if isinstance(value, (tuple, set, frozenset)):
            new = [copy(item, depth + 1) for item in value]
            new = tuple(new) if isinstance(value, tuple) else type(value)(new)  # a torch.Size becomes a tuple
        elif isinstance(value, (dict, list, argparse.Namespace)):
            new = type(value)()
        done[id(value)] = value, new  # before the items of mutable containers, which may contain themselves
        if isinstance(value, list):
            new.extend(copy(item, depth + 1) for item in value)
        elif isinstance(value, dict):
            for key, item in dict.items(value):
                new[copy(key, depth + 1)] = copy(item, depth + 1)
            if isinstance(value, OrderedDict):
                vars(new).update(_module_versions(vars(value).get("_metadata")))
        elif isinstance(value, argparse.Namespace):
            vars(new).update(copy(vars(value), depth + 1))
        return new

    return copy(content)


def weight_problem(name: str, value: Tensor) -> str:
    """Return why a tensor cannot be a weight, or "".

    The text follows a number of tensors: "2 with a negative variance".
    """
    if not value.is_floating_point():
        return "of wrong type, expected floating-point numbers"
    if not is_finite(value):
        return "with values that are NaN or infinite"
    if name.endswith(".running_var") and (value.float() < 0).any():
        return "with a negative variance"
    return ""


def is_finite(value: Tensor) -> bool:
    """Tell whether a tensor of any type has only finite values in float32."""
    return bool((value.float() if value.is_floating_point() else value).isfinite().all())


def _module_versions(metadata: Any) -> dict[str, Any]:
    """Return the attribute of a state dict by which modules recognize their older versions."""
    entries = dict.items(metadata) if isinstance(metadata, dict) else ()
    versions = {
        name: {"version": entry["version"]}
        for name, entry in entries
        if type(name) is str and type(entry) is dict and type(entry.get("version")) is int
    }
    return {"_metadata": versions} if versions else {}
