"""What studies with one row for each run share: a results file that a second call continues, and a training."""

import csv
import functools
import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gw_detectron.config import changed_config
from gw_detectron.workbench.compare.plan import SEARCH_SEED, schedule_keys
from gw_detectron.workbench.run import RunRequest, Trainer, prepare


class ResultsFile:
    """A CSV of results. Rows are written as they come, so that a second call does only what is left.

    Args:
        path: of the file; its rows are kept.
        keys: the columns that identify a row.
        values: the other columns.
    """

    def __init__(self, path: str, keys: Sequence[str], values: Sequence[str]) -> None:
        self.path = Path(path)
        self.keys = tuple(keys)
        self.fields = (*keys, *values)
        self.rows: dict[tuple[str, ...], dict[str, str]] = {}
        if self.path.exists():
            with self.path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[key] for key in keys)] = row

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return tuple(map(str, key)) in self.rows

    def append(self, *row: Any) -> None:
        """Write the values of all columns as a row."""
        texts = [str(value) for value in row]
        is_new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if is_new:
                writer.writerow(self.fields)
            writer.writerow(texts)
        key = tuple(texts[: len(self.keys)])
        self.rows[key] = dict(zip(self.fields, texts, strict=True))

    def score(self, key: tuple[Any, ...], compute: Callable[[], float]) -> float:
        """Return the score of a row; unless the file has it, compute and write it, and the seconds it took.

        A score that is not finite, as the AP of a detector without detections, counts as 0.
        """
        if key not in self:
            begin = time.time()
            value = compute()
            value = value if math.isfinite(value) else 0.0
            self.append(*key, round(value, 2), round(time.time() - begin))
        score, _ = self.fields[len(self.keys) :]
        return float(self.rows[tuple(map(str, key))][score])


def best_rate(rates: Sequence[float], score: Callable[[float], float]) -> float:
    """Score all learning rates, if there are several, and return the best."""
    return max(rates, key=score) if len(rates) > 1 else rates[0]


def climb(rates: Sequence[float], score: Callable[[float], float]) -> float:
    """Go from the second highest of ascending rates downwards while the score rises, else upwards; return the top."""
    index = start = len(rates) - 2
    for step in (-1, 1):
        while 0 <= index + step < len(rates):
            if score(rates[index + step]) <= score(rates[index]):
                break
            index += step
        if index != start:
            break
    return rates[index]


def score_arms(
    file: ResultsFile,
    arms: Sequence[tuple[Any, ...]],
    run: Callable[..., float],
    rates: Sequence[float],
    seeds: Sequence[int],
    search: Callable[[Sequence[float], Callable[[float], float]], float] = best_rate,
) -> None:
    """Score arms with the learning rate that a search with its own seed finds, all arms seed by seed.

    Args:
        file: its keys are those of an arm, a rate and a seed.
        run: function of the keys that returns the score.
        search: function of the rates and of their scores that returns one.
    """

    def score(arm: tuple[Any, ...], rate: float, seed: int) -> float:
        return file.score((*arm, rate, seed), lambda: run(*arm, rate, seed))

    best = {
        arm: search(rates, functools.partial(score, arm, seed=SEARCH_SEED))
        for arm in arms
    }
    for seed in seeds:
        for arm, rate in best.items():
            score(arm, rate, seed)


def train(
    config: str,
    data: tuple[str, str, str],
    iterations: int,
    keys: Mapping[str, Any],
    trainer_class: type[Trainer] = Trainer,
) -> float:
    """Train a detector on the CPU, and return its AP: of masks, or of boxes without masks.

    Args:
        config: a yaml.
        data: the COCO files of training and evaluation, and the folder of the images of both, or "TRAIN,VAL".
        iterations: the length, to which the schedule of the config is fitted.
        keys: other config keys, such as SEED and OUTPUT_DIR.
    """
    train_json, val_json, images = data
    train_images, _, val_images = images.partition(",")
    opts = {"MODEL.DEVICE": "cpu", **keys}
    flags = Namespace(
        config_file=config,
        num_gpus=0,
        opts=[value for pair in opts.items() for value in pair],
        train_json=train_json,
        train_images=train_images,
        val_json=val_json,
        val_images=val_images or train_images,
    )
    cfg = prepare(RunRequest.from_flags(flags)).cfg
    cfg = changed_config(cfg, schedule_keys(cfg, iterations, evaluations=1))

    trainer = trainer_class(cfg, resume=False, overwrite=True)
    trainer.resume_or_load()
    scores = trainer.train()
    assert scores is not None, "of the main process"
    return scores["segm" if cfg.MODEL.MASK_ON else "bbox"]["AP"]
