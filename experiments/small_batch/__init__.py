"""Small-batch study: AP of norms at 1 to 8 images per batch, see study.md."""

import json
from pathlib import Path

RESULTS = Path(__file__).with_name("results.jsonl")
_TRAINING_IMAGES = 4000  # of every run but the longer ones


def scored(norm: str, batch: int, results: Path = RESULTS) -> dict[int, float]:
    """Return AP on "val" by seed, at the chosen rate after 4000 images. Seed 0 chose the rate."""
    lines = map(json.loads, results.read_text().splitlines())
    wanted = (norm, batch, _TRAINING_IMAGES // batch)
    return {
        line["seed"]: line["AP"]
        for line in lines
        if line["seed"] and (line["norm"], line["batch"], line["iterations"]) == wanted
    }
