"""The study's dataset: its scenes, and the numbers of its page."""

import re

from experiments.small_batch import scored
from experiments.small_batch.dataset import HardShapesConfig
from gw_detectron.workbench.compare.verdict import paired_difference

from ..shapes import scenes_digest
from ..tiny_run import ROOT


def test_the_scenes_are_those_of_the_study():
    """With NumPy 2 and Pillow 13."""
    expected = "9dbf2619cecce4b113cd74b3836ff82fe5ef4f39127e848ab30376ff36363e50"
    assert scenes_digest(HardShapesConfig(), 5) == expected


def test_the_hypotheses_of_the_page_are_those_of_the_raw_lines():
    page = (ROOT / "experiments" / "small_batch" / "results.md").read_text()
    pattern = r"^\| H\d \| (\S+) - (\S+) +\| (\S+) +\| (\[.*?\])"
    rows = re.findall(pattern, page, flags=re.MULTILINE)
    assert len(rows) == 4

    for first, second, mean, interval in rows:
        difference = paired_difference(scored(first, 2), scored(second, 2))

        assert difference.seeds == 5
        assert mean == f"{difference.mean:+.2f}"
        low = f"{difference.low:+.2f}"
        high = f"{difference.high:+.2f}"
        assert interval == f"[{low}, {high}]"
