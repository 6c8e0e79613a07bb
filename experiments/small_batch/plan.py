"""Plan of the small-batch study: which runs, in which order.

For each norm and batch size, a grid of learning rates is trained with one seed and evaluated on the split "tune". The
best rate is then trained with other seeds, which are evaluated on the split "val". A variation of a norm is trained at
the rate of that norm.
"""

from collections.abc import Iterator, Mapping, Sequence
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
#: variation -> the norm whose rate it takes, and its keys
VARIATIONS: dict[str, tuple[str, dict[str, object]]] = {
    "BN+GW_S1": ("BN+GW", {"MODEL.RESNETS.WHITEN_POSITIONS": "S1"}),
    "BN+GW_S1-B1": ("BN+GW", {"MODEL.RESNETS.WHITEN_POSITIONS": "S1-B1"}),
    "BN+GW_S1-B12": ("BN+GW", {"MODEL.RESNETS.WHITEN_POSITIONS": "S1-B12"}),
    "BN+GN_S1": ("BN+GN", {"MODEL.RESNETS.WHITEN_POSITIONS": "S1", "MODEL.RESNETS.WHITEN_NORM": "GN:groups=64"}),
    "BN+GN_S1-B1": ("BN+GN", {"MODEL.RESNETS.WHITEN_POSITIONS": "S1-B1", "MODEL.RESNETS.WHITEN_NORM": "GN:groups=64"}),
    "GW_g8": ("GW", {"MODEL.RESNETS.NORM": "GW:groups=8"}),
    "GW_g16": ("GW", {"MODEL.RESNETS.NORM": "GW:groups=16"}),
    "GW_g32": ("GW", {"MODEL.RESNETS.NORM": "GW:groups=32"}),
    "GW_T3": ("GW", {"MODEL.RESNETS.NORM": "GW:iters=3"}),
    "GW_T7": ("GW", {"MODEL.RESNETS.NORM": "GW:iters=7"}),
    "GW_zca": ("GW", {"MODEL.RESNETS.NORM": "GW:solver=zca"}),
}
DECIDING = ("BN+GW", "BN+GN", "BN", "GN", "GW")
DECIDING_BATCH = 2
OTHER_BATCHES = (1, 4, 8)
#: norms that are also trained at the other batch sizes
OTHER_BATCH_NORMS = (*DECIDING, "GN+WS")
TRAINING_IMAGES = 4000  # of every run but the longer ones
#: iterations of GW -> those of a norm without whitening that take about as long
EQUAL_TIME = {2000: 2500, 6000: 7500}
#: iterations -> norms that are also trained so long at DECIDING_BATCH, at their own rates. No verdict rests on them.
LONGER: dict[int, tuple[str, ...]] = {
    2500: ("BN+GN", "BN", "GN"),
    6000: DECIDING,
    7500: ("BN+GN", "BN", "GN"),
}
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)
MOST_EXTENSIONS = 2  # of a grid at each side
GRID_SEED = 0
_SEEDS = range(1, 4)
OTHER_BATCH_SEED = 1  # the scored seed at the other batch sizes


@dataclass(frozen=True)
class Row:
    """One run of the study.

    Args:
        norm: a key of `NORMS` or `VARIATIONS`.
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

    @property
    def split(self) -> str:
        """The split that it is evaluated on."""
        return "tune" if self.seed == GRID_SEED else "val"

    def config_keys(self) -> dict[str, object]:
        """Return the keys to change in the study's config."""
        return {
            **(NORMS[self.norm] if self.norm in NORMS else VARIATIONS[self.norm][1]),
            "DATASETS.TEST": (f"gw_synthetic_hard_{self.split}",),
            "SOLVER.IMS_PER_BATCH": self.batch,
            "SOLVER.BASE_LR": self.lr,
            "SOLVER.MAX_ITER": self.iterations,
            "SOLVER.STEPS": (self.iterations * 3 // 4, self.iterations * 9 // 10),
            "SOLVER.WARMUP_ITERS": self.iterations // 10,
            "SOLVER.CHECKPOINT_PERIOD": max(1, self.iterations // 4),
            "SEED": self.seed,
        }

    def config_words(self) -> list[str]:
        """Return :meth:`config_keys` as KEY VALUE KEY VALUE."""
        return [str(word) for pair in self.config_keys().items() for word in pair]


def planned_iterations(batch: int) -> int:
    """Return the iterations of every run but the longer ones."""
    return TRAINING_IMAGES // batch


def scored_seeds(norm: str) -> range:
    """Return the seeds that are scored at `DECIDING_BATCH`."""
    return range(1, 6) if norm in DECIDING else _SEEDS


def planned_rows(ap: Mapping[Row, float]) -> Iterator[Row]:
    """Yield the rows of the study in their order.

    Args:
        ap: AP of finished rows. That of grids extends them and decides the rates of the other rows.
    """
    chosen: dict[str, float | None] = {}  # at the deciding batch
    for norm in (*DECIDING, *(norm for norm in NORMS if norm not in DECIDING)):
        grid = _grid(norm, DECIDING_BATCH, RATES if norm in DECIDING else RATES[1:-1], ap)
        yield from grid
        chosen[norm] = _best(grid, ap)
        for seed in scored_seeds(norm):
            yield _row(norm, DECIDING_BATCH, chosen[norm], seed)
    for variation, (norm, _) in VARIATIONS.items():
        for seed in scored_seeds(variation):
            yield _row(variation, DECIDING_BATCH, chosen[norm], seed)
    for iterations, norms in LONGER.items():
        for seed in _SEEDS:
            for norm in norms:
                yield Row(norm, DECIDING_BATCH, chosen[norm], seed, iterations)
    for batch in OTHER_BATCHES:
        for norm in OTHER_BATCH_NORMS:
            rate, best = chosen[norm], None
            if rate is not None:
                rate *= batch / DECIDING_BATCH
                grid = _grid(norm, batch, (rate / 2, rate, rate * 2), ap)
                yield from grid
                best = _best(grid, ap)
            yield _row(norm, batch, best, OTHER_BATCH_SEED)


def _grid(norm: str, batch: int, rates: Sequence[float], ap: Mapping[Row, float]) -> list[Row]:
    """Return the rows of a grid, with neighbors of a best rate at its edge."""
    grid = [_row(norm, batch, rate, GRID_SEED) for rate in rates]
    lowest, highest = rates[0] / 2**MOST_EXTENSIONS, rates[-1] * 2**MOST_EXTENSIONS
    while (best := _best(grid, ap)) is not None:
        if best == grid[0].lr and best > lowest:
            grid.insert(0, _row(norm, batch, best / 2, GRID_SEED))
        elif best == grid[-1].lr and best < highest:
            grid.append(_row(norm, batch, best * 2, GRID_SEED))
        else:
            break
    return grid


def _best(grid: Sequence[Row], ap: Mapping[Row, float]) -> float | None:
    """Return the rate of the highest AP, of equal ones the lowest; None while a row is missing."""
    return max(grid, key=ap.__getitem__).lr if all(row in ap for row in grid) else None


def _row(norm: str, batch: int, lr: float | None, seed: int) -> Row:
    return Row(norm, batch, lr, seed, planned_iterations(batch))
