#!/usr/bin/env python
"""Compare weights in two networks; the same as `gw-detectron verify`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("verify")
