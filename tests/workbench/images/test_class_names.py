"""Class names in pictures: a font that has them, or a number and a warning."""

from matplotlib.font_manager import findfont, fontManager
from matplotlib.ft2font import FT2Font

from gw_detectron.errors import printable
from gw_detectron.workbench.images.class_names import class_labels, shown_names


def test_names_are_escaped_cut_and_different():
    names = ["cup", "a\nb", "x" * 100, "x" * 99, "cup"]
    shown = shown_names(names)

    assert shown[:2] == ["cup", "a\\nb"]
    assert shown[2:] == ["x" * 60 + "...", "x" * 60 + "... (3)", "cup (4)"]


def test_spaces_and_joiners_of_scripts_stay():
    for text in ("\u7ec6\u3000\u80de", "\u0645\u06cc\u200c\u062e"):
        assert printable(text) == text
    for text in ("\x1b[31m", "\u202eexe", "\x85", "\ud800"):
        assert printable(text).isascii()


def test_a_font_that_has_the_characters_is_chosen(caplog):
    sign = "\u2312"  # not in DejaVu Sans, the usual one
    labels = class_labels(("cup", f"arc {sign}"))

    assert labels.names == ["cup", f"arc {sign}"]
    assert ord(sign) in FT2Font(findfont(labels.font)).get_charmap()
    assert class_labels(("cup",)).font == "DejaVu Sans"
    assert not caplog.text


def test_a_name_that_no_font_has_is_its_number(monkeypatch, caplog):
    monkeypatch.setattr(fontManager, "ttflist", [])  # only the usual font
    class_labels.cache_clear()
    name = "\u7ec6\u80de"

    assert class_labels(("cup", name)).names == ["cup", "#1"]
    assert f"#1 for {name}" in caplog.text
    class_labels.cache_clear()
