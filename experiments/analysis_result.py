"""Result of an analysis: a figure, its numbers, and its findings."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gw_detectron.atomic import atomic_write, write_json
from gw_detectron.workbench.console import check_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AnalysisResult:
    """Result of an analysis.

    Args:
        name: of the analysis and of its files.
        rows: the table, one dict per line, all with the same keys; None where a value is not defined.
        findings: statement -> True if the numbers support it.
        figure: the picture.
        settings: everything that decides the numbers, such as the seed; options need not be repeated.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    findings: dict[str, bool]
    figure: "Figure"
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: str | Path) -> list[Path]:
        """Write ``<name>.png``, ``<name>.csv`` (rows) and ``<name>.json`` (settings and findings) atomically.

        Args:
            folder: the output folder; it is created if needed.

        Returns:
            The files, the picture first.

        Raises:
            OSError: the folder cannot be written.
        """
        check_folder(folder)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        picture, table, notes = (
            folder / f"{self.name}.{suffix}" for suffix in ("png", "csv", "json")
        )
        with atomic_write(picture) as temporary:
            self.figure.savefig(temporary, format="png", dpi=110)
        with atomic_write(table) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else [])
            writer.writeheader()
            writer.writerows(self.rows)
        write_json(notes, {"settings": self.settings, "findings": self.findings})
        return [picture, table, notes]


def findings_of(observations: Mapping[str, Sequence[bool]]) -> dict[str, bool]:
    """Map each statement to whether all its observations hold.

    Statements without observations are left out.
    """
    return {statement: all(found) for statement, found in observations.items() if found}


def short_name(layer: str) -> str:
    """Shorten a layer name for an axis: ``backbone.bottom_up.res2.0.conv2.norm`` becomes ``res2.0.conv2``."""
    for prefix in ("backbone.", "bottom_up.", "roi_heads."):
        layer = layer.removeprefix(prefix)
    return layer.removesuffix(".norm")
