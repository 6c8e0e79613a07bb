#!/usr/bin/env python
"""Export a detector or a backbone; the same as `gw-detectron export`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("export")
