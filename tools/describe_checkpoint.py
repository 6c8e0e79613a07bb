#!/usr/bin/env python
"""Describe a checkpoint; the same as `gw-detectron describe`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("describe")
