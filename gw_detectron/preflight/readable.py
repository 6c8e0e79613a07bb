"""Whether a checkpoint file is whole and of a kind that Detectron2 loads, found out without a model."""

import functools
import os
import pickle
import zipfile

import torch


def read_problem(path: str) -> str:
    """Says what keeps a checkpoint file from being loaded.

    Args:
        path: a ``.pth`` or other file of ``torch.save``, or a ``.pkl`` of Detectron2 or Detectron.

    Returns:
        The end of a sentence whose subject is the file, such as "is cut off ...", or "" for a file that is whole.
    """
    if not os.path.isfile(path):
        return "does not exist"
    if os.path.getsize(path) == 0:
        return "is empty"
    if zipfile.is_zipfile(path):
        # torch.load takes damaged numbers as they are; the archive has a checksum for each tensor
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            return f"is damaged: the checksum of its part {damaged} is wrong"
    else:
        with open(path, "rb") as file:
            if file.read(2) == b"PK":
                return "is cut off: the directory at the end of the file is missing"
    try:
        _header(path, os.path.getmtime(path))
    except Exception as error:  # whatever a damaged or foreign file brings about in the unpickler
        reason = str(error).strip().splitlines()
        return f"cannot be read: {type(error).__name__}{': ' + reason[0] if reason else ''}"
    return ""


def written_by(path: str) -> str:
    """Returns the ``__author__`` noted in a readable checkpoint file, "" if there is none."""
    return _header(path, os.path.getmtime(path)).get("__author__", "")


@functools.lru_cache(maxsize=4)
def _header(path: str, modified: float) -> dict[str, str]:
    """Loads a file as Detectron2 will, keeps its short texts, and lets the tensors go."""
    if path.endswith(".pkl"):
        with open(path, "rb") as file:
            content = pickle.load(file, encoding="latin1")
    else:
        # "meta": structure and shapes without the numbers
        content = torch.load(path, map_location="meta", weights_only=True)
    if not isinstance(content, dict):
        raise TypeError(f"it holds a {type(content).__name__} instead of a dict of tensors")
    return {key: value for key, value in content.items() if isinstance(value, str)}
