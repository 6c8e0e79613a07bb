"""Reports of a run: scores, curves, confusion and pictures on one page."""

from .run_folder import ReportOptions, RunFolder
from .run_report import NUMBERS, PAGE, write_report

__all__ = ["NUMBERS", "PAGE", "ReportOptions", "RunFolder", "write_report"]
