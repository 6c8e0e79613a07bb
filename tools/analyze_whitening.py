#!/usr/bin/env python
"""Analyze whitening layers and models; the same as `gw-detectron analyze`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("analyze")
