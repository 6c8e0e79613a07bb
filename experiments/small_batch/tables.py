"""Tables of the small-batch study, in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from .paired_test import HYPOTHESES, holm, paired_difference, verdict
from .plan import DECIDING_BATCH, NORMS, OTHER_BATCHES, VARIATIONS, Row

Results = Mapping[Row, Mapping[str, Any]]
Times = Mapping[str, float]  # of a training iteration, by norm
BATCH_FIGURE = "small_batch_batches.png"
#: AP below the best, within which a learning rate counts as one that a norm bears
TOLERANCE = 2.0


def scored(results: Results, norm: str, batch: int = DECIDING_BATCH) -> dict[int, float]:
    """Return AP on "val" by seed."""
    rows = _rows(results, norm, batch, "val")
    return {row.seed: results[row]["AP"] for row in rows}


def grid(results: Results, norm: str, batch: int = DECIDING_BATCH) -> dict[float, float]:
    """Return AP on "tune" by learning rate, in ascending order."""
    rows = _rows(results, norm, batch, "tune")
    return {row.lr: results[row]["AP"] for row in sorted(rows, key=lambda row: row.lr or 0.0) if row.lr is not None}


def _rows(results: Results, norm: str, batch: int, split: str) -> list[Row]:
    return [row for row in results if (row.norm, row.batch, row.split) == (norm, batch, split)]


def hypotheses(results: Results) -> str:
    """Return the table of the planned tests; the correction needs all of them."""
    found = {
        name: paired_difference(scored(results, first), scored(results, second))
        for name, (first, second) in HYPOTHESES.items()
    }
    complete = {name: difference for name, difference in found.items() if difference}
    if len(complete) < len(HYPOTHESES):
        return "The scored runs of the hypotheses are not finished."
    corrected = holm([difference.p for difference in complete.values()])
    lines = [
        (
            name,
            " - ".join(HYPOTHESES[name]),
            f"{difference.mean:+.2f}",
            _interval(difference.low, difference.high),
            f"{difference.p:.2g}",
            f"{p:.2g}",
            verdict(difference, p),
        )
        for (name, difference), p in zip(complete.items(), corrected, strict=True)
    ]
    return _table(lines, ("", "comparison", "AP difference", "95 % interval", "p", "p, corrected", "verdict"))


def main_table(results: Results, times: Times) -> str:
    """Return AP and time of every norm at the deciding batch size."""
    return _norm_table(results, times, NORMS, "BN")


def variation_table(results: Results, times: Times) -> str:
    """Return AP and time of the variations, beside the norms that they vary."""
    return "\n\n".join(
        _norm_table(results, times, [norm, *(name for name, (base, _) in VARIATIONS.items() if base == norm)], norm)
        for norm in dict.fromkeys(base for base, _ in VARIATIONS.values())
    )


def _norm_table(results: Results, times: Times, norms: Sequence[str], reference: str) -> str:
    """Return a table of the norms that have a scored run."""
    base = scored(results, reference)
    lines = []
    for norm in norms:
        if not (values := scored(results, norm)):
            continue
        difference = paired_difference(values, base) if norm != reference else None
        lines.append(
            (
                norm,
                _rate(results, norm),
                _mean(values.values()),
                len(values),
                f"{difference.mean:+.1f} {_interval(difference.low, difference.high)}" if difference else "",
                f"{times[norm] / times['BN']:.2f}" if norm in times else "",
                _bearable(grid(results, norm)),
            )
        )
    difference_title = f"difference to {reference}, 95 % interval"
    rates_title = f"rates within {TOLERANCE:g} AP of the best"
    table = _table(lines, ("norm", "learning rate", "AP", "seeds", difference_title, "time", rates_title))
    missing = [norm for norm in norms if not scored(results, norm)]
    return f"{table}\n\nNot finished: {', '.join(missing)}." if missing else table


def has_other_batches(results: Results) -> bool:
    """Tell whether a scored run at another batch size is finished."""
    return any(scored(results, norm, batch) for norm in NORMS for batch in OTHER_BATCHES)


def batch_table(results: Results) -> str:
    """Return AP of every norm at every batch size, and the link to its figure."""
    if not has_other_batches(results):
        return "No run at another batch size is finished."
    batches = sorted((DECIDING_BATCH, *OTHER_BATCHES))
    lines = [(norm, *(_mean(scored(results, norm, batch).values()) for batch in batches)) for norm in NORMS]
    table = _table(lines, ("norm", *(f"batch {batch}" for batch in batches)))
    return f"![Box AP over the images per batch]({BATCH_FIGURE})\n\n{table}"


def grid_table(results: Results) -> str:
    """Return AP on "tune" over the learning rates at the deciding batch size."""
    grids = {norm: curve for norm in NORMS if (curve := grid(results, norm))}
    rates = sorted({rate for values in grids.values() for rate in values})
    lines = [
        (norm, *(f"{values[rate]:.1f}" if rate in values else "" for rate in rates)) for norm, values in grids.items()
    ]
    return _table(lines, ("norm", *(f"{rate:g}" for rate in rates)))


def _rate(results: Results, norm: str) -> str:
    rates = {row.lr for row in _rows(results, norm, DECIDING_BATCH, "val")}
    return ", ".join(f"{rate:g}" for rate in rates)


def _bearable(values: Mapping[float, float]) -> str:
    if not values:
        return ""
    best = max(values.values())
    return ", ".join(f"{rate:g}" for rate, ap in values.items() if ap >= best - TOLERANCE)


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "not run"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _interval(low: float, high: float) -> str:
    return f"[{low:+.2f}, {high:+.2f}]"


def _table(lines: Iterable[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(list(lines), headers, tablefmt="github", disable_numparse=True)
