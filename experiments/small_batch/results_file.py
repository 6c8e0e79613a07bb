"""Results of finished runs, one JSON object per line."""

import dataclasses
from pathlib import Path
from typing import Any

from ..json_lines import append_line, read_lines
from .plan import Row

_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


def append_result(path: Path, row: Row, result: dict[str, Any]) -> None:
    """Append the result of a row."""
    append_line(path, {**dataclasses.asdict(row), **result})


def read_results(path: Path) -> dict[Row, dict[str, Any]]:
    """Read the results of finished rows; none without the file.

    Raises:
        DataError: a line is damaged.
    """
    return dict(read_lines(path, _parse))


def _parse(result: dict[str, Any]) -> tuple[Row, dict[str, Any]]:
    float(result["AP"]), float(result["seconds"])
    return Row(**{name: result[name] for name in _FIELDS}), result
