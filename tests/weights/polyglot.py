"""A file that is valid safetensors and at the same time a pickle."""

import json
import pickle
import struct
from typing import Any


def safetensors_and_pickle(content: Any) -> bytes:
    """Return a safetensors file with one tensor "a" of bytes; the same bytes unpickle to the content.

    A safetensors file begins with the length of its header. Here this length is also the pickle's operation B with a
    number of bytes to skip. The rest of the header is skipped by operations C> of 62 bytes each, within a text.
    The tensor is the pickled content.
    """
    code = pickle.dumps(content, protocol=2)
    tensors = json.dumps({"a": {"dtype": "U8", "shape": [len(code)], "data_offsets": [0, len(code)]}})
    begin, end = f'{tensors[:-1]}, "__metadata__": {{', '"b": "'
    begin += " " * ((2 - len(begin + end)) % 64) + end  # so that the operations end where the header ends
    length = ord("B") + 256 * (len(begin) + 3)  # of the header; 3 bytes of the length itself are skipped too
    header = begin + (length - len(begin)) // 64 * ("C>" + 62 * "x")
    return struct.pack("<Q", length) + header[:-3].encode() + b'"}}' + code
