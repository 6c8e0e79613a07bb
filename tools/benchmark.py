#!/usr/bin/env python
"""Measure time and memory of layers, networks, detectors and kernels; see docs/performance.md."""

import sys
from pathlib import Path

# benchmarks/ is not part of the package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.command import get_parser, main
from gw_detectron.workbench.console import errors_reported

if __name__ == "__main__":
    with errors_reported():
        main(get_parser().parse_args())
