#!/usr/bin/env python
"""Train or evaluate a detector from a yaml, with Detectron2's flags (--help) and optionally under torchrun."""

import gw_detectron.needs_detectron2  # noqa: F401

# isort: split

from gw_detectron.engine import get_parser, main
from gw_detectron.engine.launch import launch_from_args

if __name__ == "__main__":
    launch_from_args(main, get_parser().parse_args())
