#!/usr/bin/env python
"""Trains or evaluates a detector from a yaml. It takes Detectron2's flags, see --help, and runs under torchrun too."""

from gw_detectron.engine.launch import launch_from_args
from gw_detectron.engine.trainer import get_parser, main

if __name__ == "__main__":
    launch_from_args(main, get_parser().parse_args())
