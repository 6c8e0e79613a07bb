"""Read the CSV files of benchmarks."""

import csv
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, without its header."""
    lines = path.read_text().splitlines()
    return list(csv.DictReader(line for line in lines if line[0] != "#"))
