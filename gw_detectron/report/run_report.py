"""Write the report of a run folder."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..atomic import atomic_folder
from ..errors import MissingInputError
from ..installation import require_packages
from ..progress import progress_bar
from .confusion import confusion_section
from .example_images import errors_section, predictions_section
from .layer_views import layers_section
from .overview import config_section, norms_section, summary_section
from .page import render_page
from .precision_recall import ap_section, precision_recall_section
from .run_folder import ReportOptions, RunFolder
from .sections import Section
from .training_curves import curves_section

PAGE, NUMBERS = "report.html", "report.json"


def write_report(
    folder: str | os.PathLike[str],
    options: ReportOptions | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    tensorboard: bool = False,
) -> dict[str, Any]:
    """Write ``report.html``, its pictures and ``report.json``.

    Args:
        folder: ``OUTPUT_DIR`` of a run.
        options: what the report shows.
        output: the folder to write; ``report`` in the run folder if None. An earlier report there is replaced.
        tensorboard: also add the pictures to the run's event files.

    Returns:
        The content of ``report.json``. ``missing`` lists parts whose input the run folder lacks.

    Raises:
        MissingFileError: the folder holds no run.
        ConfigError: its config or an option cannot be used.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: OpenCV is not installed, or TensorBoard for ``tensorboard``.
    """
    require_packages("report", "cv2")  # before minutes of work
    if tensorboard:
        require_packages("--tensorboard", "tensorboard")
    options = options or ReportOptions()
    run = RunFolder(folder, options)
    output = run.folder / "report" if output is None else Path(output)
    sections, missing = _build(run)
    pictures = {picture.file: picture for section in sections for picture in section.all_pictures()}
    numbers = {**{section.key: section.numbers for section in sections}, "missing": missing, "pictures": [*pictures]}
    numbers = json.loads(json.dumps(numbers), parse_constant=lambda _: None)  # JSON has no NaN
    title = f"Run {run.folder.resolve().name}"
    with atomic_folder(output, [PAGE, NUMBERS, *_earlier_pictures(output)]) as place:
        for name, picture in pictures.items():
            (place / name).write_bytes(picture.data)
        (place / PAGE).write_text(render_page(title, sections, missing), encoding="utf-8")
        (place / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    if tensorboard:
        _add_to_tensorboard(run.folder, sections)
    return numbers


def _build(run: RunFolder) -> tuple[list[Section], list[dict[str, Any]]]:
    parts: dict[str, Callable[[RunFolder], Section]] = {
        "summary": summary_section,
        "curves": curves_section,
        "AP per class": ap_section,
        "precision and recall": precision_recall_section,
        "confusion": confusion_section,
        "predictions": predictions_section,
        **({"errors": errors_section} if run.options.errors else {}),
        "features": layers_section,
        "norm layers": norms_section,
        "config": config_section,
    }
    sections: list[Section] = []
    missing: dict[str, dict[str, Any]] = {}
    for name, part in progress_bar(parts.items(), desc="report", unit="part"):
        try:
            sections.append(part(run))
        except MissingInputError as error:
            entry = {"parts": [], "reason": error.reason, "command": error.command}
            missing.setdefault(error.reason, entry)["parts"].append(name)
    return sections, list(missing.values())


def _earlier_pictures(output: Path) -> list[str]:
    """List the pictures of an earlier report, which the new one replaces."""
    try:
        return json.loads((output / NUMBERS).read_text())["pictures"]
    except (OSError, ValueError, LookupError, TypeError):  # none, or not ours
        return []


def _add_to_tensorboard(folder: Path, sections: Sequence[Section]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for section in sections:
            for picture in section.all_pictures():
                name = f"report/{section.key}/{Path(picture.file).stem}"
                writer.add_image(name, picture.pixels(), dataformats="HWC")
