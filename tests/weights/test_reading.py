"""Damaged, tampered and malicious files: always a message, never code."""

import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gw_detectron.errors import RefusedFileError, WeightsFileError
from gw_detectron.weights import read_weights_file, reading
from gw_detectron.weights.reading import named_tensors

from .synthetic import training_checkpoint

TENSORS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.ones(3),
    "a.steps": torch.tensor(7),
}
KINDS = ["archive", "legacy", "pickle", "safetensors"]


def write(kind, tensors, path):
    if kind == "safetensors":
        save_file(tensors, path)
    elif kind == "pickle":
        arrays = {name: value.numpy() for name, value in tensors.items()}
        path.write_bytes(
            pickle.dumps({"model": arrays, "__author__": "somebody"}, protocol=2)
        )
    else:
        torch.save(
            {"model": tensors}, path, _use_new_zipfile_serialization=kind == "archive"
        )
    return path


def tensors_of(path):
    """Read a file as a checkpoint's reader does."""
    content = read_weights_file(path)
    value = content.value
    if isinstance(value, dict) and "model" in value:
        value = value["model"]
    return named_tensors(value, content.size)


@pytest.mark.parametrize("name", ["weights", "a.pkl", "a.pth", "a.bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_every_kind_whatever_the_name(kind, name, tmp_path):
    path = write(kind, TENSORS, tmp_path / name)

    content = read_weights_file(path)
    tensors = tensors_of(path)

    assert content.format == {"archive": "torch", "legacy": "torch"}.get(kind, kind)
    assert tensors.keys() == TENSORS.keys()
    for key, expected in TENSORS.items():
        assert type(tensors[key]) is torch.Tensor
        assert torch.equal(tensors[key], expected)


@pytest.mark.parametrize(
    "core", [b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"]
)
@pytest.mark.parametrize("new_format", [True, False])
def test_reads_what_training_scripts_keep_beside_the_weights(
    tmp_path, new_format, core
):
    path = tmp_path / "a.pth"
    saved = training_checkpoint(TENSORS)
    torch.save(saved, path, _use_new_zipfile_serialization=new_format)
    if not new_format:  # of NumPy 1 and 2
        path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray\n", core))

    content = read_weights_file(path).value

    assert content["cfg"] == saved["cfg"]
    assert content["scheduler"] == saved["scheduler"]
    assert content["best_prec1"] == 77.72
    assert torch.equal(content["mean"], torch.ones(3))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("protocol", range(6))
def test_reads_arrays_of_every_shape_and_order(tmp_path, protocol, kind):
    arrays = {
        "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "big endian": np.arange(4, dtype=">i4"),
        "single": np.array(3, dtype=np.uint8),
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(kind(arrays), protocol=protocol))

    tensors = tensors_of(tmp_path / "a.pkl")

    for name, array in arrays.items():
        numbers = tensors[name].numpy()
        assert np.array_equal(numbers, array)
        assert numbers.dtype == array.dtype.newbyteorder("=")


def test_the_versions_of_modules_come_along(tmp_path):
    state = torch.nn.BatchNorm2d(2).state_dict()
    torch.save({"model": state}, tmp_path / "a.pth")
    assert tensors_of(tmp_path / "a.pth")._metadata == state._metadata


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_at_every_sixteenth(kind, tmp_path):
    path = write(
        kind, {name: torch.ones(100, 10) for name in "abc"}, tmp_path / "weights"
    )
    size = path.stat().st_size
    for part in range(15, -1, -1):
        os.truncate(path, size * part // 16)
        with pytest.raises(WeightsFileError, match="weights': .*(damaged|empty)"):
            read_weights_file(path)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_a_changed_byte_of_an_archive(name, tmp_path):
    tensors = {key: torch.full((100, 10), float(ord(key))) for key in "abc"}
    path = write("archive", tensors, tmp_path / "weights")
    data = bytearray(path.read_bytes())
    data[data.index(tensors[name].numpy().tobytes()) + 2] ^= 1
    path.write_bytes(data)

    assert torch.load(path)["model"][name][0, 0] != ord(name)  # torch does not see it
    with pytest.raises(WeightsFileError, match="weights': .*damaged"):
        read_weights_file(path)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("kind", ["archive", "legacy", 0, 1, 4])
@pytest.mark.parametrize("place", ["value", "beside", "key"])
def test_malicious_pickle_is_refused_and_not_run(
    kind, place, forced, tmp_path, monkeypatch
):
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    evil = Evil(tmp_path / "pwned")
    content = {
        "value": {"model": {"conv1.weight": evil}},
        "beside": {"model": {}, "cfg": evil},
        "key": {"model": {}, (evil,): 1},
    }[place]
    path = tmp_path / "a.pth"
    if isinstance(kind, int):
        path.write_bytes(pickle.dumps(content, protocol=kind))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "archive")

    with pytest.raises(RefusedFileError, match=r"(posix|nt)\.mkdir"):
        read_weights_file(path)
    assert not (tmp_path / "pwned").exists()


def test_whole_models_and_torchscript_are_refused(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "a.pth")
    with pytest.raises(RefusedFileError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_weights_file(tmp_path / "a.pth")

    traced = torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1))
    torch.jit.save(traced, tmp_path / "b.pth")
    with pytest.raises(RefusedFileError, match="TorchScript"):
        read_weights_file(tmp_path / "b.pth")


def write_pickle(kind, operations, folder):
    """Write the operations of a pickle by themselves, or as the content of a file of torch.save."""
    path = folder / "a.pth"
    if kind == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", operations)
            archive.writestr("a/version", "3")
    elif kind == "legacy":
        torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
        good = pickle.dumps({"model": {}}, protocol=2)
        path.write_bytes(path.read_bytes().replace(good, operations))
    else:
        path.write_bytes(operations)
    return path


START = b"\x80\x02"
#: operations of pickles without tensors: some would hang, crash or change this process
BOMBS = {
    "deep lists": START + 10**5 * b"]" + (10**5 - 1) * b"a" + b".",
    "many objects": START + b"](" + 10**5 * b"}" + b"e.",
    "tensor of any size": START + b"ctorch\nTensor\nJ\x00\x00\x00\x7f\x85R.",
    "storage": START + b"ctorch\nFloatTensor\nJ\x00\x00\x00\x7f\x85R.",
    "nothing on the stack": START + b"R.",
    "nothing after a mark": START + b"K\x01K\x01(R.",
    "unknown reference": START + b"h\x07.",
    "persistent id": START + b"X\x01\x00\x00\x00aQ.",
    "long string": START + b"X\xff\xff\xff\x7fabc.",
    "long frame": b"\x80\x04\x8e" + struct.pack("<Q", 2**31) + b"few",
    "items of a list": START + b"]K\x00K\x01s.",
    "items of a list, many": START + b"](K\x00K\x01u.",
    "long integer": START + b"\x8b" + struct.pack("<i", 300) + 300 * b"\x01" + b".",
    "registered class": START + b"\x82\x01.",
    "function's attribute": START
    + b"c_codecs\nencode\n}X\x0c\x00\x00\x00__defaults__X\x06\x00\x00\x00latin1\x85sb.",
    "function's slot": START
    + b"c_codecs\nencode\nN}X\x0c\x00\x00\x00__defaults__X\x06\x00\x00\x00latin1\x85s\x86b.",
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize("operations", BOMBS.values(), ids=BOMBS)
def test_hand_made_pickles_are_refused(kind, operations, tmp_path):
    path = write_pickle(kind, operations, tmp_path)
    with pytest.raises(WeightsFileError, match="Fix: "):
        tensors_of(path)
    assert reading._ALLOWED["_codecs.encode"].__defaults__ is None


class Huge:
    """A tensor of 2 GiB on a storage of 16 bytes."""

    def __reduce__(self):
        storage = torch.zeros(4)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (
            storage,
            0,
            (2**29,),
            (1,),
            False,
            OrderedDict(),
        )


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize(
    "value", [Huge(), torch.ones(1).expand(10**11)], ids=["storage", "stride"]
)
def test_tensors_larger_than_their_file(new_format, value, tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"model": {"a": value}}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(WeightsFileError, match="more bytes|damaged"):
        tensors_of(path)


@pytest.mark.parametrize("length", [0x80, 0x0280, 0x4B50])
def test_a_safetensors_header_may_begin_like_another_format(tmp_path, length):
    # The first bytes are the length of the header: 0x80 begins a pickle and 0x4B50 a zip archive.
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    start = struct.pack("<Q", length) + header.encode().ljust(length)
    path = tmp_path / "w.safetensors"
    path.write_bytes(start + struct.pack("<f", 2.5))
    assert read_weights_file(path).value["w"].tolist() == [2.5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is an empty file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "web page"),
        (b"just a text that is longer than the header", "not a file"),
        (b"PK\x03\x04", "damaged"),
        # safetensors with a header of 16 MiB
        (struct.pack("<Q", 2**24) + b"{" + bytes(64), "damaged"),
        (pickle.dumps({"a": np.array([{}])}), "'O8'"),
    ],
)
def test_other_files(data, message, tmp_path):
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(WeightsFileError, match=message) as raised:
        read_weights_file(tmp_path / "a.pth")
    assert str(raised.value).count("Fix: ") == 1
