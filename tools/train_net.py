#!/usr/bin/env python
"""Train or evaluate a detector; the same as `gw-detectron train`."""

from gw_detectron.workbench.commands import run

if __name__ == "__main__":
    run("train")
