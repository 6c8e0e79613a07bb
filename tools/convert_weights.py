#!/usr/bin/env python
"""Convert ImageNet weights; the same as `gw-detectron weights convert`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("weights", "convert")
