#!/usr/bin/env python
"""Export a whole detector; the same as `gw-detectron export`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("export")
