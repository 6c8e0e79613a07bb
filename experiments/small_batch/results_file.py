"""Results of finished runs, one JSON object per line."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from gw_detectron.errors import DataError

from .plan import Row

_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def append_result(path: Path, row: Row, result: dict[str, Any]) -> None:
    """Append a line in one write, so that runs which end together do not mix theirs."""
    line = json.dumps({**dataclasses.asdict(row), **result}) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_results(path: Path) -> dict[Row, dict[str, Any]]:
    """Read the results of finished rows; none without the file.

    Raises:
        DataError: a line is damaged.
    """
    results = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
            row = Row(**{name: result[name] for name in _FIELDS})
            float(result["AP"]), float(result["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"'{path}', line {number}: not the result of a run: {error!r}. Fix: delete the line to run it again."
            ) from error
        results[row] = result
    return results
