"""Parsers of the commands: help with examples, flags between words, a run as the first word."""

import argparse
import os
import re
import shlex
import sys
from typing import Any


class MixedParser(argparse.ArgumentParser):
    """Parser that takes flags between words."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return self.parse_intermixed_args(args, namespace)


class RunParser(argparse.ArgumentParser):
    """Parser whose first word may be a RUN, a run folder or a checkpoint.

    ``run`` of its result is this word or None. A first word such as MODEL.WEIGHTS is a config key.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(
            usage="%(prog)s [RUN] [--help] [FLAGS] [KEY VALUE ...]", **options
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        run = words.pop(0) if words and _is_run(words[0]) else None

        parsed, unknown = super().parse_known_args(words, namespace)
        parsed.run = run

        later = getattr(parsed, "opts", None)
        if run is None and later and os.path.exists(later[0]):
            fix = f"put it first: {self.prog} {shlex.quote(later[0])} ..."
            self.error(f"RUN ('{later[0]}'): given after flags. Fix: {fix}")
        return parsed, unknown


def _is_run(word: str) -> bool:
    """Return whether a word is a path, and neither a flag nor a config key."""
    return os.path.exists(word) or not re.match(r"-|[A-Z0-9_]+(\.|$)", word)


def new_parser(
    description: str | None,
    *examples: str,
    note: str = "",
    kind: type = argparse.ArgumentParser,
    **options: Any,
) -> Any:
    """Create the parser of a command, whose help ends with a note and examples.

    Args:
        examples: the words after the command's name.
    """
    lines = ["examples:"]
    lines += [f"  %(prog)s {example}".rstrip() for example in examples]
    if note:
        lines = [note, "", *lines]

    return kind(
        description=description,
        epilog="\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def add_statistics_flags(parser: argparse.ArgumentParser, effect: str) -> None:
    """Add ``--mix`` and ``--adapt``; the help begins with their effect."""
    parser.add_argument(
        "--mix",
        default="",
        metavar="M",
        help=f"{effect} a share of each image's means and variances in the BN layers of the backbone, e.g. 0.5, for "
        "photos that look different from the training photos; or a norm name such as MixGW:alpha=0,mean=0.3",
    )
    parser.add_argument(
        "--adapt",
        default="",
        metavar="FOLDER",
        help=f"{effect} statistics of up to 32 photos of this folder in the BN layers of the backbone: 8 or more of "
        "the new camera or laboratory, without labels",
    )
