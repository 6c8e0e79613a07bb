"""What an analysis gives: a picture, the numbers in it, and what they show."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..atomic import atomic_write


@dataclass(frozen=True)
class Outcome:
    """The outcome of an analysis.

    Args:
        name: of the analysis, and of its files.
        settings: all that decides the numbers, the seed among it.
        rows: the numbers, one dict for each line of the table, all with the same keys; None where there is none.
        findings: sentence -> whether the numbers show it.
        figure: the picture.
    """

    name: str
    settings: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    findings: dict[str, bool]
    figure: Figure

    def write(self, folder: str | Path) -> list[Path]:
        """Writes ``<name>.png``, ``<name>.csv`` (the rows) and ``<name>.json`` (settings and findings).

        Each file appears whole or not at all.

        Args:
            folder: where to; made if it is not there.

        Returns:
            The files, the picture first.

        Raises:
            OSError: the folder cannot be written.
        """
        check_folder(folder)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        picture, table, notes = (folder / f"{self.name}.{suffix}" for suffix in ("png", "csv", "json"))
        with atomic_write(picture) as beside:
            self.figure.savefig(beside, format="png", dpi=110)
        with atomic_write(table) as beside, open(beside, "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else [])
            writer.writeheader()
            writer.writerows(self.rows)
        with atomic_write(notes) as beside:
            text = json.dumps({"settings": self.settings, "findings": self.findings}, indent=2)
            beside.write_text(text + "\n")
        return [picture, table, notes]


def check_folder(folder: str | Path) -> None:
    """Makes sure that files can be written to a folder, which need not exist yet.

    Raises:
        NotADirectoryError: it, or a folder above it, is a file.
        PermissionError: it, or the folder to make it in, cannot be written.
    """
    path = Path(folder).absolute()
    existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise NotADirectoryError(f"nothing can be written to {folder}: {existing} is not a folder. Give another one")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"nothing can be written to {folder}: {existing} is write-protected. Give another folder")


def findings_of(observations: Mapping[str, Sequence[bool]]) -> dict[str, bool]:
    """Sentence -> whether all its observations agree, without the sentences that have none."""
    return {sentence: all(found) for sentence, found in observations.items() if found}


def short_name(layer: str) -> str:
    """The name of a norm layer for the axis of a picture: ``backbone.bottom_up.res2.0.conv2.norm`` is res2.0.conv2."""
    for prefix in ("backbone.", "bottom_up.", "roi_heads."):
        layer = layer.removeprefix(prefix)
    return layer.removesuffix(".norm")
