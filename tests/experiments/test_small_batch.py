"""The study's dataset: its scenes, and the numbers of its page."""

import hashlib
import itertools
import json

from experiments.small_batch import scored
from experiments.small_batch.dataset import HardSyntheticConfig
from gw_detectron.workbench.compare.verdict import paired_difference
from gw_detectron.workbench.dataset.polygons import to_coco
from gw_detectron.workbench.dataset.synthetic import draw_scene

from ..tiny_run import ROOT

CONFIG = HardSyntheticConfig()


def test_the_scenes_are_those_of_the_study():
    """With NumPy 2 and Pillow 13."""
    pinned = hashlib.sha256()
    for split, index in itertools.product(CONFIG.splits, range(5)):
        drawn = draw_scene(CONFIG, split, index)
        pinned.update(drawn.image().tobytes())
        pinned.update(json.dumps([to_coco(obj, index, 1) for obj in drawn.objects]).encode())
    assert (
        pinned.hexdigest() == "9dbf2619cecce4b113cd74b3836ff82fe5ef4f39127e848ab30376ff36363e50"
    )


def test_the_hypotheses_of_the_page_are_those_of_the_raw_lines():
    page = (ROOT / "experiments" / "small_batch" / "results.md").read_text()
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in page.splitlines()
        if line.startswith("| H")
    ]
    assert len(rows) == 4
    for _, _, names, mean, interval, *_ in rows:
        found = paired_difference(*(scored(norm, 2) for norm in names.split(" - ")))
        assert found.seeds == 5
        assert (mean, interval) == (
            f"{found.mean:+.2f}",
            f"[{found.low:+.2f}, {found.high:+.2f}]",
        ), names
