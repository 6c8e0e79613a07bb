#!/usr/bin/env python
"""Train, evaluate and draw a small detector; the same as `gw-detectron demo`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("demo")
