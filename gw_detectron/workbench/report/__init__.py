"""Reports of a run: scores, curves and pictures of errors on one page."""

import os
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from ...atomic import check_replaceable
from ...errors import is_user_error
from ...installation import require_packages
from ..console import progress_bar
from .html import section_key, write_folder
from .page_parts import Section
from .run_folder import RunFolder
from .sections import SECTIONS

__all__ = ["PAGE", "RunFolder", "write_report"]

_FILES = ("report.json", "report.html")
PAGE = _FILES[1]


@rc_context({"text.parse_math": False})  # class names may have dollar signs
def write_report(
    folder: str | os.PathLike[str],
    *,
    images: int = 4,
    score: float | None = None,
    output: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write ``report.html``, which contains its pictures, and ``report.json``.

    Args:
        folder, images, score: see :class:`RunFolder`.
        output: the folder to write; ``report`` in the run folder if None. An earlier report there
            is replaced.

    Returns:
        The content of ``report.json``. ``missing`` lists the parts whose input the run folder
        lacks, and why.
    """
    run = RunFolder(folder, images, score)
    output = run.folder / "report" if output is None else Path(output)
    require_packages("report", "cv2")  # before minutes of work
    check_replaceable(output, _FILES)

    sections: dict[str, Section] = {}
    reasons: dict[str, list[str]] = {}
    for name, section in progress_bar(SECTIONS.items(), desc="report", unit="part"):
        try:
            sections[name] = section(run)
        except Exception as error:
            if not is_user_error(error):
                raise
            reasons.setdefault(str(error), []).append(name)

    numbers = {section_key(name): section.numbers for name, section in sections.items()}
    numbers.pop("predictions", None)  # pictures alone
    numbers["missing"] = [
        {"parts": parts, "reason": reason} for reason, parts in reasons.items()
    ]
    return write_folder(
        output, _FILES, f"Run {run.folder.resolve().name}", sections, numbers
    )
