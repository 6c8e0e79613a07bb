#!/usr/bin/env python
"""Trains or evaluates a detector from a yaml. It takes Detectron2's flags, see --help, and runs under torchrun too."""

from gw_detectron.engine import get_parser, main
from gw_detectron.launch import launch_from_args

if __name__ == "__main__":
    launch_from_args(main, get_parser().parse_args())
