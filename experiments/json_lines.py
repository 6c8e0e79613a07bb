"""Results of experiments, one JSON object per line."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gw_detectron.errors import DataError

Result = TypeVar("Result")


def append_line(path: Path, result: Mapping[str, Any]) -> None:
    """Append a line in one write, so that runs which end together do not mix theirs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(result) + "\n").encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_lines(path: Path, parse: Callable[[dict[str, Any]], Result]) -> list[Result]:
    """Read a file; nothing without it.

    Args:
        path: the file.
        parse: returns the result of a line; raises KeyError, TypeError or ValueError if a field is missing or wrong.

    Raises:
        DataError: a line is damaged.
    """
    results = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            results.append(parse(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"'{path}', line {number}: not the result of a run: {error!r}. Fix: delete the line to run it again."
            ) from error
    return results
