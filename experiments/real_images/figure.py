"""Draw the AP of each norm, seed by seed: python -m experiments.real_images.figure OUTPUT.png RESULTS.jsonl ..."""

import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from gw_detectron.atomic import atomic_write
from gw_detectron.workbench.dataset.coco_scores import COCO_TASKS


def draw(files: list[Path]) -> pyplot.Figure:
    """Draw the scored runs of each file, and their mean."""
    figure, all_axes = pyplot.subplots(
        1,
        len(files),
        figsize=(5.5 * len(files), 3),
        squeeze=False,
        layout="constrained",
    )
    for axes, file in zip(all_axes[0], files, strict=True):
        # seed 0 chose the rates
        runs = [
            run for run in map(json.loads, file.read_text().splitlines()) if run["seed"]
        ]
        # the study's own results name the task in place of the score
        score = runs[0].get("score") or f"{runs[0]['task']}/AP"
        task, _, name = score.partition("/")
        # from top to bottom
        norms = list(dict.fromkeys(run["norm"] for run in runs))[::-1]
        for place, norm in enumerate(norms):
            values = [run["AP"] for run in runs if run["norm"] == norm]
            axes.plot(values, [place] * len(values), "o", color="#3f51b5", alpha=0.6)
            axes.plot(mean(values), place, "|", color="black", markersize=22)
            axes.annotate(
                f"{mean(values):.1f}",
                (mean(values), place + 0.4),
                ha="center",
                fontsize=9,
            )
        axes.set(
            title=file.parent.name,
            xlabel=f"{COCO_TASKS[task].noun} {name}",
            ylim=(-0.6, len(norms)),
        )
        axes.set_yticks(range(len(norms)), norms)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
    return figure


if __name__ == "__main__":
    with atomic_write(Path(sys.argv[1])) as temporary:
        draw([Path(name) for name in sys.argv[2:]]).savefig(
            temporary, format="png", dpi=110
        )
