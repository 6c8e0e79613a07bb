"""Write the report of a run folder."""

import json
import os
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from ..atomic import atomic_folder
from ..errors import is_user_error
from ..installation import require_packages
from ..progress import progress_bar
from .page import Section, render_page, section_key
from .run_folder import ReportOptions, RunFolder
from .sections import SECTIONS

PAGE, NUMBERS = "report.html", "report.json"


def write_report(
    folder: str | os.PathLike[str],
    options: ReportOptions | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write ``report.html``, its pictures and ``report.json``.

    Args:
        folder: ``OUTPUT_DIR`` of a run.
        options: what the report shows; None means the defaults.
        output: the folder to write; ``report`` in the run folder if None. An earlier report there is replaced.

    Returns:
        The content of ``report.json``. ``missing`` lists the parts whose input the run folder lacks, and why.

    Raises:
        MissingFileError: the folder holds no run.
        ConfigError: its config cannot be used.
        OutputFolderError: ``output`` holds other files.
        MissingPackageError: OpenCV is not installed.
    """
    require_packages("report", "cv2")  # before minutes of work
    run = RunFolder(folder, options or ReportOptions())
    output = run.folder / "report" if output is None else Path(output)
    sections: dict[str, Section] = {}
    reasons: dict[str, list[str]] = {}
    for name, section in progress_bar(SECTIONS.items(), desc="report", unit="part"):
        try:
            with rc_context({"text.parse_math": False}):  # class names may have dollar signs
                sections[name] = section(run)
        except Exception as error:
            if not is_user_error(error):
                raise
            reasons.setdefault(str(error), []).append(name)
    missing = [{"parts": parts, "reason": reason} for reason, parts in reasons.items()]
    pictures = {picture.file: picture for each in sections.values() for row in each.pictures for picture in row}
    numbers = {section_key(name): each.numbers for name, each in sections.items() if each.numbers is not None}
    numbers |= {"missing": missing, "pictures": [*pictures]}
    numbers = json.loads(json.dumps(numbers), parse_constant=lambda _: None)  # JSON has no NaN
    with atomic_folder(output, [PAGE, NUMBERS, *_earlier_pictures(output)]) as place:
        for name, picture in pictures.items():
            (place / name).write_bytes(picture.data)
        page = render_page(f"Run {run.folder.resolve().name}", sections, missing)
        (place / PAGE).write_text(page, encoding="utf-8")
        (place / NUMBERS).write_text(json.dumps(numbers, indent=2) + "\n")
    return numbers


def _earlier_pictures(output: Path) -> list[str]:
    """List the pictures of an earlier report, which the new one replaces."""
    try:
        return json.loads((output / NUMBERS).read_text())["pictures"]
    except (OSError, ValueError, LookupError, TypeError):  # none, or not ours
        return []
