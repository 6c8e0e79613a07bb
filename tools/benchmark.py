#!/usr/bin/env python
"""Measure time and memory; the same as `gw-detectron benchmark`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("benchmark")
