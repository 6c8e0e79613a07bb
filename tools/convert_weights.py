#!/usr/bin/env python
"""Convert ImageNet weights; the same as `gw-detectron convert`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("convert")
