"""Class names as people see them: in pictures, tables and on pages."""

import functools
import logging
import string
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.font_manager import findfont, fontManager
from matplotlib.ft2font import FT2Font

from ...errors import printable, summarize_names

log = logging.getLogger(__name__)

_LONGEST = 60  # characters of a name that are shown
_USUAL_FONT = "DejaVu Sans"  # of matplotlib, as the next one, a box for any character
_LAST_RESORT = "Last Resort High-Efficiency"
#: what stands beside class names
_OTHER_TEXT = frozenset(map(ord, string.ascii_letters + string.digits + " %.()#\\"))


def shown_names(names: Iterable[str]) -> list[str]:
    """Return class names without control characters, not too long, all different."""
    shown: list[str] = []
    for number, name in enumerate(names):
        text = printable(name)
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}..."
        if text in shown:
            text = f"{text} ({number})"
        shown.append(text)
    return shown


class Labels(NamedTuple):
    """Class names in pictures, and the font that has their characters."""

    names: list[str]
    font: str


@functools.cache
def class_labels(names: tuple[str, ...]) -> Labels:
    """Return the labels of classes; a name that no font can draw is its number.

    The font is the one with most of the characters. A warning lists the numbers.
    """
    shown = shown_names(names)
    font = _best_font(frozenset(map(ord, "".join(shown))))
    characters = _characters(findfont(font))

    labels = []
    replaced = []
    for number, name in enumerate(shown):
        if characters.issuperset(map(ord, name)):
            labels.append(name)
        else:
            labels.append(f"#{number}")
            replaced.append(f"#{number} for {name}")
    if replaced:
        log.warning(
            "class names: no installed font has all their characters; pictures show numbers (%s). "
            "Fix: install a font, e.g. Noto Sans CJK.",
            summarize_names(replaced),
        )
    return Labels(labels, font)


def _best_font(needed: frozenset[int]) -> str:
    """Choose the font family with most of the characters, the usual one if it has all."""
    if needed <= _characters(findfont(_USUAL_FONT)):
        return _USUAL_FONT

    best, most = _USUAL_FONT, 0
    for font in fontManager.ttflist:
        characters = _characters(font.fname)
        count = len(needed & characters)
        is_text = font.name != _LAST_RESORT and characters >= _OTHER_TEXT
        if is_text and count > most:
            best, most = font.name, count
    return best


@functools.cache
def _characters(file: str) -> frozenset[int]:
    return frozenset(FT2Font(file).get_charmap())
