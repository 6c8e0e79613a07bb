"""Results of experiments, one JSON object per line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gw_detectron.errors import DataError

Result = TypeVar("Result")


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
