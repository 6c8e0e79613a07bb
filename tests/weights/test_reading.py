"""Damaged, tampered and malicious files: always a message, never arbitrary code."""

import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
import time
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gw_detectron.errors import FileAccessError, RefusedFileError, WeightsFileError
from gw_detectron.weights import convert, numpy_unpickler, pickle_check, read_weights_file, reading

from .synthetic import training_checkpoint

TENSORS = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3), "a.steps": torch.tensor(7)}
KINDS = ["archive", "legacy", "pickle", "safetensors"]


def write(kind, tensors, path):
    if kind == "safetensors":
        save_file(tensors, path)
    elif kind == "pickle":
        arrays = {name: value.numpy() for name, value in tensors.items()}
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "somebody"}, protocol=2))
    else:
        torch.save({"model": tensors}, path, _use_new_zipfile_serialization=kind == "archive")
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_reads_every_kind_whatever_the_name(kind, tmp_path):
    content = read_weights_file(write(kind, TENSORS, tmp_path / "weights"))
    found = content.value if kind == "safetensors" else content.value["model"]
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("new_format", [True, False])
def test_reads_what_training_scripts_keep_beside_the_weights(tmp_path, new_format):
    content = training_checkpoint(TENSORS)
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=new_format)
    found = read_weights_file(tmp_path / "a.pth").value
    assert found["cfg"] == content["cfg"]
    assert found["best_prec1"] == 77.72
    assert found["scheduler"] == content["scheduler"]


def test_reads_scores_pickled_by_older_numpy(tmp_path):
    torch.save({"best": np.float64(1.5), "model": TENSORS}, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    data = (tmp_path / "a.pth").read_bytes()
    (tmp_path / "a.pth").write_bytes(data.replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
    assert read_weights_file(tmp_path / "a.pth").value["best"] == 1.5


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_reads_arrays_of_every_shape_and_order(tmp_path, protocol):
    arrays = {
        "rows": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "big endian": np.arange(4, dtype=">i4"),
        "single": np.array(3, dtype=np.uint8),
    }
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(arrays, protocol=protocol))
    found = read_weights_file(tmp_path / "a.pkl").value
    assert all(np.array_equal(found[name].numpy(), array) for name, array in arrays.items())
    assert all(found[name].numpy().dtype == array.dtype.newbyteorder("=") for name, array in arrays.items())


@pytest.mark.parametrize("kind", KINDS)
def test_truncated_at_every_sixteenth(kind, r18, tmp_path):
    path = write(kind, r18, tmp_path / "weights")
    size = path.stat().st_size
    for part in range(15, -1, -1):
        os.truncate(path, size * part // 16)
        with pytest.raises(WeightsFileError, match="weights': cannot be read: it is (cut off|damaged|empty)"):
            read_weights_file(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_give_a_message_or_whole_content(kind, tmp_path):
    path = write(kind, TENSORS, tmp_path / "weights")
    data = path.read_bytes()

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=3, unique=True))
    def flip(bits):
        damaged = bytearray(data)
        for bit in bits:
            damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            convert(read_weights_file(path).value)
        except ValueError as error:
            assert str(error)  # a message, and no other kind of error

    flip()


def test_a_flipped_bit_in_the_numbers_of_an_archive_is_found(r18_file, tmp_path):
    data = bytearray(r18_file.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(WeightsFileError, match="checksum of its part .*data/"):
        read_weights_file(tmp_path / "a.pth")


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize("place", ["value", "beside", "key"])
def test_malicious_pickle_is_refused_and_not_run(kind, place, tmp_path):
    evil = Evil(tmp_path / "pwned")
    content = {
        "value": {"model": {"conv1.weight": evil}},
        "beside": {"model": {}, "cfg": evil},
        "key": {"model": {}, (evil,): 1},
    }[place]
    path = tmp_path / ("a.pkl" if kind == "pickle" else "a.pth")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "archive")
    with pytest.raises(RefusedFileError, match=r"(posix|nt)\.mkdir.* could run code.*torch\.save\("):
        read_weights_file(path)
    assert not (tmp_path / "pwned").exists()


def test_whole_models_and_torchscript_are_refused(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "a.pth")
    with pytest.raises(RefusedFileError, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_weights_file(tmp_path / "a.pth")
    torch.jit.save(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1, 1)), tmp_path / "b.pth")
    with pytest.raises(RefusedFileError, match="TorchScript"):
        read_weights_file(tmp_path / "b.pth")


class Huge:
    """A tensor of 2 GiB on a storage of 16 bytes."""

    def __reduce__(self):
        storage = torch.zeros(4)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2**29,), (1,), False, OrderedDict())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("new_format", [True, False])
@pytest.mark.parametrize("place", ["value", "set", "attribute"])
def test_two_gigabytes_declared_by_torch_save(new_format, place, tmp_path):
    content = {"value": {"model": Huge()}, "set": {Huge()}, "attribute": Attributes({"items": Huge()})}[place]
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=new_format)
    with pytest.raises(WeightsFileError, match="claims a tensor of 2147483648 bytes|wrong byte size"):
        read_weights_file(tmp_path / "a.pth")


class Attributes:
    """An OrderedDict whose pickle sets attributes."""

    def __init__(self, attributes, content=()):
        self.attributes, self.content = attributes, content

    def __reduce__(self):
        return OrderedDict, (), self.attributes, None, iter(self.content)


@pytest.mark.parametrize("new_format", [True, False])
def test_attributes_of_instances_are_not_read(new_format, tmp_path):
    """They can replace methods, and so hide a NaN from every check."""
    tensor, parameter = torch.tensor([float("nan")]), torch.nn.Parameter(torch.ones(1))
    tensor.is_floating_point = parameter.numel = OrderedDict
    versions = {"a": {"version": 2}, "b": {"version": None}, "c": 3}
    model = Attributes({"items": OrderedDict, "_metadata": versions}, [("w", tensor), ("p", parameter)])
    content = {"model": model, "set": {parameter}, (tensor,): 1}
    torch.save(content, tmp_path / "a.pth", _use_new_zipfile_serialization=new_format)
    found = read_weights_file(tmp_path / "a.pth").value
    assert vars(found["model"]) == {"_metadata": {"a": {"version": 2}}}
    tensors = [*found["model"].values(), *found["set"], *next(key for key in found if key not in ("model", "set"))]
    assert len(tensors) == 4
    assert all(type(value) is torch.Tensor and not vars(value) and not value.requires_grad for value in tensors)


@pytest.mark.parametrize("new_format", [True, False])
def test_tensors_that_repeat_their_values(new_format, tmp_path):
    path = tmp_path / "a.pth"
    torch.save({"a": torch.ones(1).expand(10**5)}, path, _use_new_zipfile_serialization=new_format)
    assert read_weights_file(path).value["a"].sum() == 10**5
    torch.save({"a": torch.ones(1).expand(10**11)}, path, _use_new_zipfile_serialization=new_format)
    with pytest.raises(WeightsFileError, match="repeat their values to far more than its .* bytes. Fix: save contig"):
        read_weights_file(path)


@pytest.mark.parametrize("length", [0x80, 0x0280, 0x4B50])
def test_a_safetensors_header_may_begin_like_another_format(tmp_path, length):
    # The first bytes are the length of the header: 0x80 begins a pickle and 0x4B50 a zip archive.
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(length)
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header + struct.pack("<f", 2.5))
    assert read_weights_file(path).value["w"].tolist() == [2.5]


def test_two_gigabytes_declared_by_safetensors(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**29], "data_offsets": [0, 2**31]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(WeightsFileError, match="cut off or damaged"):
        read_weights_file(tmp_path / "a")
    (tmp_path / "b").write_bytes(struct.pack("<Q", 8_000_000) + b"{" + bytes(64))
    with pytest.raises(WeightsFileError, match="cut off or damaged"):
        read_weights_file(tmp_path / "b")


def test_two_gigabytes_declared_by_a_pickle(tmp_path):
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 2**31) + b"few")
    with pytest.raises(WeightsFileError, match="cut off or damaged"):
        read_weights_file(tmp_path / "a.pkl")


@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
def test_lists_nested_in_themselves_do_not_hang_the_reader(kind, tmp_path):
    shared: list = [np.float64(0.5)]
    for _ in range(40):
        shared = [shared, shared]
    loop: list = []
    loop.append(loop)
    content = {"shared": shared, "loop": loop, "pair": (np.ones(2), 3), "same": (1, (2,))}
    if kind == "pickle":
        (tmp_path / "a").write_bytes(pickle.dumps(content))
    else:
        torch.save(content, tmp_path / "a", _use_new_zipfile_serialization=kind == "archive")
    found = read_weights_file(tmp_path / "a").value
    assert found["loop"][0] is found["loop"]
    assert torch.equal(found["pair"][0], torch.ones(2, dtype=torch.float64)) and found["pair"][1] == 3
    assert found["same"] == (1, (2,))


def test_a_pipe_is_refused_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(WeightsFileError, match="not a regular file"):
        read_weights_file(tmp_path / "a")
    with pytest.raises(WeightsFileError, match="not a regular file"):
        read_weights_file("/dev/zero")


def write_pickle(kind, operations, folder):
    """Write the operations of a pickle by themselves, or as the content of a file of torch.save."""
    if kind == "pickle":
        path, data = folder / "a.pkl", operations
    elif kind == "legacy":
        torch.save({"model": {}}, folder / "a.pth", _use_new_zipfile_serialization=False)
        good = pickle.dumps({"model": {}}, protocol=2)
        path, data = folder / "a.pth", (folder / "a.pth").read_bytes().replace(good, operations)
        assert operations in data
    else:
        path = folder / "a.pth"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/data.pkl", operations)
            archive.writestr("a/version", "3")
        return path
    path.write_bytes(data)
    return path


START, LONG = b"\x80\x02", b"X" + struct.pack("<I", 10**6) + 10**6 * b"a" + b"q\x01"
#: operations of a small pickle that would take minutes, gigabytes or the stack
BOMBS = {
    # a list in a list, 100,000 times
    "deep lists": (START + 10**5 * b"]" + (10**5 - 1) * b"a" + b".", "nests containers deeper than 100"),
    # Python's hash of such a key overflows the stack
    "deep key": (START + b"})" + 10**6 * b"\x85" + b"Ks.", "nests tuples deeper than 100"),
    # t = (t, t), 40 times: its hash visits 2**40 tuples
    "shared key": (
        START
        + b"}K\x01"
        + b"".join(bytes([ord("q"), i, ord("0"), *b"h", i, *b"h", i, 0x86]) for i in range(40))
        + b"K\x01s.",
        "references stand for far more than its",
    ),
    "many objects": (START + b"](" + 10**6 * b"}" + b"e.", "more than 300000 operations"),
    # 3,000 copies of a million letters
    "copies": (
        START + b"](" + LONG + 3000 * b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R" + b"e.",
        "references stand for far more than its",
    ),
    "bytearray": (START + b"cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R.", "names builtins.bytearray"),
    "tensor of any size": (START + b"ctorch\nTensor\nJ\x00\x00\x00\x7f\x85R.", "without values|names torch.Tensor"),
    "storage": (START + b"ctorch\nFloatTensor\nJ\x00\x00\x00\x7f\x85R.", "names torch.FloatTensor"),
    "nothing on the stack": (START + b"R.", "damaged .*stack underflow at REDUCE"),
    "nothing after a mark": (START + b"K\x01K\x01(R.", "damaged .*stack underflow at REDUCE"),
    "unknown reference": (START + b"h\x07.", "damaged"),
    # torch 2.7 asserts its type without a message
    "persistent id": (START + b"X\x01\x00\x00\x00aQ.", "outside of the file|more than tensors|damaged"),
    "long string": (START + b"X\xff\xff\xff\x7fabc.", "damaged"),
}


@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize(("operations", "message"), BOMBS.values(), ids=BOMBS)
def test_small_files_do_not_take_minutes_or_gigabytes(kind, operations, message, tmp_path, monkeypatch):
    monkeypatch.setattr(pickle_check, "MOST_OPERATIONS", 300_000)  # a third, for a fast test
    path = write_pickle(kind, operations, tmp_path)
    begin, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightsFileError, match=message):
        read_weights_file(path)
    assert time.process_time() - begin < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000  # KiB


UNREAD = {
    "function's attribute": (
        START + b"c_codecs\nencode\n}X\x0c\x00\x00\x00__defaults__X\x06\x00\x00\x00latin1\x85sb.",
        "changes _codecs.encode, which could run code",
    ),
    "registered class": (START + b"\x82\x01.", "names a class by its registered number 1"),
    # list[0] = 1; torch below 2.10 would also set the items of a tensor
    "items of a list": (START + b"]K\x00K\x01s.", "sets items of an object that is no dict"),
    "items of a list, many": (START + b"](K\x00K\x01u.", "sets items of an object that is no dict"),
    "long integer": (START + b"\x8b" + struct.pack("<i", 300) + 300 * b"\x01" + b".", "more than 2048 bits"),
}


@pytest.mark.parametrize("kind", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize(("operations", "message"), UNREAD.values(), ids=UNREAD)
def test_undamaged_files_with_unread_content(kind, operations, message, tmp_path):
    with pytest.raises(WeightsFileError, match=message) as raised:
        read_weights_file(write_pickle(kind, operations, tmp_path))
    assert "or damaged" not in str(raised.value) and str(raised.value).count("Fix: ") == 1
    assert numpy_unpickler._encode.__defaults__ is None


def test_headers_and_directories_that_are_too_large(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        for index in range(300):
            archive.writestr(f"a/data/{index:030000}", "")
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 2**24) + b"{" + bytes(2**10))
    for name in ("a.pth", "b.safetensors"):
        with pytest.raises(WeightsFileError, match="bytes, more than 8388608"):
            read_weights_file(tmp_path / name)


@pytest.mark.parametrize("change", ["comment", "appended", "second directory"])
def test_archives_with_a_second_directory_are_refused(change, tmp_path):
    """zipfile and torch would choose different ones."""
    path = write("archive", TENSORS, tmp_path / "a.pth")
    data = path.read_bytes()
    if change == "comment":
        data = data[:-2] + b"\x03\x00abc"
    elif change == "appended":
        data += b"abc"
    else:
        data += data
    path.write_bytes(data)
    with pytest.raises(WeightsFileError, match="archive's directory at its end is missing"):
        read_weights_file(path)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("archive", "a.pth A.PTH a.pt a.pyth a.bin a.pth.tar a.ckpt a", "a.pkl a.safetensors A.PKL"),
        ("legacy", "a.pth a.pt a.pyth a.bin a.pth.tar a", "a.pkl a.safetensors"),
        ("pickle", "a.pkl A.PKL a.bin a.pickle a", "a.pth a.pt a.pyth a.safetensors"),
        ("safetensors", "a.safetensors A.SafeTensors a", "a.pkl a.pth a.pt a.pyth"),
    ],
)
def test_a_name_that_states_another_format_is_refused(kind, good, bad, tmp_path):
    for name in good.split():
        assert read_weights_file(write(kind, TENSORS, tmp_path / name)).value
    for name in bad.split():
        with pytest.raises(
            WeightsFileError, match=r"its name ends in \.\w+, but it is a .* Fix: rename it to end in \."
        ):
            read_weights_file(write(kind, TENSORS, tmp_path / name))


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_opened_once(kind, tmp_path, monkeypatch):
    """The file is replaced as soon as it is open: all steps read the first one."""
    path = write(kind, TENSORS, tmp_path / "a")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    open_file, opened = os.open, []

    def open_and_replace(name, *args, **options):
        opened.append(name)
        descriptor = open_file(name, *args, **options)
        (tmp_path / "b").write_bytes(pickle.dumps(Evil(tmp_path / "pwned")))
        os.replace(tmp_path / "b", path)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_replace)
    contents = read_weights_file(path)
    monkeypatch.undo()
    found = contents.value if kind == "safetensors" else contents.value["model"]
    assert torch.equal(found["a.weight"], TENSORS["a.weight"])
    assert contents.sha256 == digest and opened == [str(path)]
    assert not (tmp_path / "pwned").exists()


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = write("pickle", TENSORS, tmp_path / "a.pkl")
    check = reading.check_pickle

    def check_and_append(*args):
        check(*args)
        with open(path, "ab") as file:
            file.write(b"more")

    monkeypatch.setattr(reading, "check_pickle", check_and_append)
    with pytest.raises(WeightsFileError, match="it changed while it was read. Fix: try again when it is complete"):
        read_weights_file(path)


def copy_archive(path, change=lambda name, content: {name: content}, compression=zipfile.ZIP_STORED):
    """Write TENSORS by torch.save, with changed parts."""
    torch.save({"model": TENSORS}, path)
    with zipfile.ZipFile(path) as source:
        parts = [(name, source.read(name)) for name in source.namelist()]
    with zipfile.ZipFile(path, "w", compression) as target:
        for name, content in parts:
            for new_name, new_content in change(name, content).items():
                target.writestr(new_name, new_content)
    return path


def test_archives_that_unpack_to_more_than_they_are(tmp_path):
    with pytest.raises(WeightsFileError, match="compressed"):
        read_weights_file(copy_archive(tmp_path / "a.pth", compression=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    "change",
    [
        lambda name, content: {name: content[:-4] if "/data/" in name else content},
        lambda name, content: {name.replace("/data/", "/other/"): content},
    ],
    ids=["shorter", "elsewhere"],
)
def test_storages_larger_than_their_part(change, tmp_path):
    """torch below 2.10 would read beyond the part."""
    with pytest.raises(WeightsFileError, match="a storage is larger than its part"):
        read_weights_file(copy_archive(tmp_path / "a.pth", change))


def test_parts_whose_name_torch_reads_differently(tmp_path):
    """Without the flag of UTF-8, Python decodes other letters."""
    path = copy_archive(tmp_path / "a.pth", lambda name, content: {name.replace("a/", "é/", 1): content})
    assert read_weights_file(path).value["model"].keys() == TENSORS.keys()
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place = data.find(mark)
        while place >= 0:
            data[place + offset : place + offset + 2] = bytes(2)
            place = data.find(mark, place + 1)
    path.write_bytes(data)
    with pytest.raises(WeightsFileError, match="a part with an ambiguous name"):
        read_weights_file(path)


def test_parts_of_one_name(tmp_path):
    with pytest.raises(WeightsFileError, match="two parts of one name"):
        read_weights_file(
            copy_archive(tmp_path / "a.pth", lambda name, content: {name: content, name.upper(): content})
        )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "web page"),
        (b"just a text that is longer than the header", "not a file of torch.save"),
        (b"PK\x03\x04", "cut off"),
        (pickle.dumps({"a": np.array([{}])}), "'O8', which is not a number. Fix: save arrays of numbers"),
    ],
)
def test_other_files(data, message, tmp_path):
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(WeightsFileError, match=message) as raised:
        read_weights_file(tmp_path / "a.pth")
    assert str(raised.value).count("Fix: ") == 1


def test_sparse_tensors(tmp_path):
    torch.save({"model": {"a": torch.eye(2).to_sparse()}}, tmp_path / "a.pth")
    with pytest.raises(WeightsFileError, match="it contains .*sparse.* Fix: save dense tensors with torch.save.$"):
        read_weights_file(tmp_path / "a.pth")


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_weights_file(tmp_path / "none.pth")
    with pytest.raises(FileAccessError, match="cannot be read: Is a directory"):
        read_weights_file(tmp_path)


def test_a_copy_of_the_archive_reads_the_same(r18, r18_file, tmp_path):
    shutil.copy(r18_file, tmp_path / "copy.bin")
    found = read_weights_file(tmp_path / "copy.bin").value["model"]
    assert all(torch.equal(found[name], value) for name, value in r18.items())


LEAVES = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.just(torch.ones(2)), st.just(np.ones(2))
)
KEYS = st.one_of(
    st.sampled_from(["model", "state_dict", "conv1.weight", "layer1.0.conv2.weight", "module.", "fc.weight"]),
    st.text(max_size=3),
    st.integers(),
)
CONTENTS = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)), max_leaves=8
)


@settings(max_examples=300, deadline=None, database=None)
@given(CONTENTS)
def test_any_content_gives_a_message(content):
    with pytest.raises(ValueError, match="[a-z]"):
        convert(content)


@settings(max_examples=25, deadline=None, database=None)
@given(st.data())
def test_any_single_change_to_good_weights_gives_a_message(r18, data):
    names = sorted(name for name in r18 if not name.endswith(("num_batches_tracked", "fc.weight", "fc.bias")))
    name = data.draw(st.sampled_from(names))
    change = data.draw(
        st.sampled_from(
            [
                lambda value: None,
                lambda value: value.long(),
                lambda value: value.double(),
                lambda value: value[None],
                lambda value: value[:0],
                lambda value: value / 0,
                lambda value: value.numpy(),
            ]
        )
    )
    broken = {**r18, name: change(r18[name])}
    if broken[name] is None:
        del broken[name]
    with pytest.raises(ValueError, match=name.rpartition(".")[0].rpartition(".")[0] or name):
        convert(broken, norm="GW")
