#!/usr/bin/env python
"""Export a backbone; the same as `gw-detectron export-backbone`."""

from gw_detectron.commands import run

if __name__ == "__main__":
    run("export-backbone")
