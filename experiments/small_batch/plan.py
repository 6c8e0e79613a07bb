"""Plan of the small-batch study: which runs, in which order.

For each norm and batch size, a grid of learning rates is trained with one seed. The best rate on the split "tune" is
then trained with other seeds, which are scored on the split "val".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

NORMS: dict[str, dict[str, object]] = {
    "BN": {},
    "GN": {"MODEL.RESNETS.NORM": "GN"},
    "GW": {"MODEL.RESNETS.NORM": "GW"},
    "BN+GW": {"MODEL.RESNETS.WHITEN_POSITIONS": "S1-B2"},
    "BN+GN": {"MODEL.RESNETS.WHITEN_POSITIONS": "S1-B2", "MODEL.RESNETS.WHITEN_NORM": "GN:groups=64"},
    "BN_PreciseBN": {"TEST.PRECISE_BN.ENABLED": True},
    "FrozenBN": {"MODEL.RESNETS.NORM": "FrozenBN"},
    "GN+WS": {"MODEL.RESNETS.NORM": "GN", "MODEL.RESNETS.CONV": "WS"},
    "GW+WS": {"MODEL.RESNETS.NORM": "GW", "MODEL.RESNETS.CONV": "WS"},
}
DECIDING = ("BN", "GN", "GW", "BN+GW", "BN+GN")
BATCHES = (2, 1, 4, 8)  # the deciding size first
TRAINING_IMAGES = 2400  # of every run
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)  # at 2 images; proportional to the batch size
LOWEST_RATE, HIGHEST_RATE = RATES[0] / 4, RATES[-1] * 4
GRID_SEED = 0


@dataclass(frozen=True)
class Row:
    """One run of the study.

    Args:
        norm: a key of `NORMS`.
        batch: images per iteration.
        lr: SOLVER.BASE_LR; None while the grid that decides it is incomplete.
        seed: SEED.
        iterations: SOLVER.MAX_ITER.
    """

    norm: str
    batch: int
    lr: float | None
    seed: int
    iterations: int

    @property
    def name(self) -> str:
        rate = "chosen" if self.lr is None else self.lr
        return f"{self.norm}_b{self.batch}_lr{rate}_s{self.seed}_i{self.iterations}"

    def config_keys(self) -> dict[str, object]:
        """Return the keys to change in the study's config."""
        return {
            **NORMS[self.norm],
            "SOLVER.IMS_PER_BATCH": self.batch,
            "SOLVER.BASE_LR": self.lr,
            "SOLVER.MAX_ITER": self.iterations,
            "SOLVER.STEPS": (self.iterations * 3 // 4, self.iterations * 9 // 10),
            "SOLVER.WARMUP_ITERS": self.iterations // 10,
            "SOLVER.CHECKPOINT_PERIOD": max(1, self.iterations // 4),
            "SEED": self.seed,
        }


def planned_rows(tune_ap: Mapping[Row, float]) -> Iterator[Row]:
    """Yield the rows of the study in their order.

    Args:
        tune_ap: AP of finished rows on the split "tune". It extends the grids and decides the rates of scored rows.
    """
    for batch in BATCHES:
        for norm in NORMS:
            grid = _grid(norm, batch, tune_ap)
            yield from grid
            best = max(grid, key=tune_ap.__getitem__).lr if all(row in tune_ap for row in grid) else None
            for seed in scored_seeds(norm, batch):
                yield _row(norm, batch, best, seed)


def scored_seeds(norm: str, batch: int) -> range:
    """Return the seeds that are scored at the chosen rate."""
    if batch != BATCHES[0]:
        return range(1, 2)
    return range(1, 6) if norm in DECIDING else range(1, 4)


def _grid(norm: str, batch: int, tune_ap: Mapping[Row, float]) -> list[Row]:
    """Return the rows of a grid, with neighbors of a best rate at its edge."""

    def row(rate: float) -> Row:
        return _row(norm, batch, rate * batch / 2, GRID_SEED)

    rates = list(RATES)
    while all(row(rate) in tune_ap for rate in rates):
        best = max(rates, key=lambda rate: tune_ap[row(rate)])  # of equal ones the lowest
        if best == rates[0] and best > LOWEST_RATE:
            rates.insert(0, best / 2)
        elif best == rates[-1] and best < HIGHEST_RATE:
            rates.append(best * 2)
        else:
            break
    return [row(rate) for rate in rates]


def _row(norm: str, batch: int, lr: float | None, seed: int) -> Row:
    return Row(norm, batch, lr, seed, TRAINING_IMAGES // batch)
