"""Check this installation: versions, devices, and what works.

The whitening layers are tried on the CPU and on the GPU, forward and backward. Nothing is downloaded or written. The
exit status is 1 if an installed part fails, and 0 if parts are only missing.
"""

import argparse
import json

from tabulate import tabulate

from ..cli import new_parser
from ..installation import check_installation, describe_installation


def get_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    parser = new_parser(__doc__, "", "--json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def main(args: argparse.Namespace) -> bool:
    """Print what is installed and what works; return False if a part is broken."""
    facts, checks = describe_installation(), check_installation()
    healthy = not any(check.broken for check in checks)
    if args.json:
        print(json.dumps({"installation": facts, "checks": [check._asdict() for check in checks]}, indent=2))
        return healthy
    print(tabulate(facts.items(), tablefmt="plain"), end="\n\n")
    rows = [(check.part, "BROKEN" if check.broken else "yes" if check.works else "no", check.note) for check in checks]
    print(tabulate(rows, headers=["part", "works", "why"], maxcolwidths=[None, None, 80]))
    return healthy
