"""Tables of the small-batch study, in Markdown."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from .paired_test import HYPOTHESES, holm, paired_difference, verdict
from .plan import (
    DECIDING,
    DECIDING_BATCH,
    EQUAL_TIME,
    LONGER,
    NORMS,
    OTHER_BATCH_NORMS,
    OTHER_BATCH_SEED,
    OTHER_BATCHES,
    VARIATIONS,
    Row,
    planned_iterations,
    scored_seeds,
)

Results = Mapping[Row, Mapping[str, Any]]
Times = Mapping[str, float]  # of a training iteration, by norm
BATCH_FIGURE = "batches.png"
#: AP below the best, within which a learning rate counts as one that a norm bears
TOLERANCE = 2.0


def scored(results: Results, norm: str, batch: int = DECIDING_BATCH, iterations: int = 0) -> dict[int, float]:
    """Return AP on "val" by seed; 0 means the planned number of iterations."""
    return {row.seed: results[row]["AP"] for row in scored_rows(results, norm, batch, iterations)}


def scored_rows(results: Results, norm: str, batch: int = DECIDING_BATCH, iterations: int = 0) -> list[Row]:
    """Return the rows of :func:`scored`."""
    return _rows(results, norm, batch, "val", iterations)


def grid(results: Results, norm: str) -> dict[float, float]:
    """Return AP on "tune" at the deciding batch size, by learning rate, in ascending order."""
    rows = _rows(results, norm, DECIDING_BATCH, "tune")
    return {row.lr: results[row]["AP"] for row in sorted(rows, key=lambda row: row.lr or 0.0) if row.lr is not None}


def _rows(results: Results, norm: str, batch: int, split: str, iterations: int = 0) -> list[Row]:
    wanted = (norm, batch, split, iterations or planned_iterations(batch))
    return [row for row in results if (row.norm, row.batch, row.split, row.iterations) == wanted]


def common_seeds(results: Results) -> set[int]:
    """Return the seeds that are scored for every norm with scored runs, at the deciding batch size."""
    found = [seeds for norm in NORMS if (seeds := set(scored(results, norm)))]
    return set.intersection(*found) if found else set()


def mean_features(results: Results, norm: str, kind: str) -> dict[str, float]:
    """Return the mean over common seeds of "kappa" or "gap" by layer, at the deciding batch size.

    Left out are layers where it is infinite for a seed, and shortcuts, whose input is that of another convolution.
    """
    seeds = common_seeds(results)
    found = [results[row]["features"] for row in scored_rows(results, norm) if row.seed in seeds]
    runs = [features[kind] for features in found if features]
    layers = [layer for layer in (runs[0] if runs else ()) if all(run[layer] is not None for run in runs)]
    return {layer: statistics.mean(run[layer] for run in runs) for layer in layers if "shortcut" not in layer}


def losses(results: Results, row: Row) -> dict[int, float]:
    """Return the training loss of a run by iteration. What it did again, from a checkpoint on, replaces the earlier."""
    kept: dict[int, float] = {}
    for iteration, loss in results[row]["losses"]:
        kept = {before: value for before, value in kept.items() if before < iteration} | {iteration: loss}
    return kept


def hypotheses(results: Results) -> str:
    """Return the table of the planned tests; the correction needs all of them."""
    found = {
        name: paired_difference(scored(results, first), scored(results, second))
        for name, (first, second) in HYPOTHESES.items()
        if all(len(scored(results, norm)) == len(scored_seeds(norm)) for norm in (first, second))
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
        lines.append(
            (
                norm,
                _rate(results, norm),
                _mean(values.values()),
                str(len(values))
                if len(values) == (planned := len(scored_seeds(norm)))
                else f"{len(values)} of {planned}",
                _difference(values, base) if norm != reference else "",
                f"{times[norm] / times['BN']:.2f}" if norm in times else "",
                _bearable(grid(results, norm)),
            )
        )
    difference_title = f"difference to {reference}, 95 % interval"
    rates_title = f"rates within {TOLERANCE:g} AP of the best"
    table = _table(lines, ("norm", "learning rate", "AP", "seeds", difference_title, "time", rates_title))
    missing = [norm for norm in norms if not scored(results, norm)]
    return f"{table}\n\nNot yet scored: {', '.join(missing)}." if missing else table


def longer_table(results: Results) -> str:
    """Return AP of the deciding norms after more iterations, and their differences there.

    A norm that has no runs of a length, which would take longer, is compared with its runs of equal time.
    """
    norms = {planned_iterations(DECIDING_BATCH): DECIDING, **LONGER}
    equal_time = {others: whitening for whitening, others in EQUAL_TIME.items()}

    def cells(norm: str, iterations: int) -> dict[int, float]:
        return scored(results, norm, iterations=iterations if norm in norms[iterations] else equal_time[iterations])

    if not any(scored(results, norm, iterations=iterations) for iterations in LONGER for norm in norms[iterations]):
        return "No longer run is finished."
    lines = [
        (norm, *(_mean(cells(norm, length).values()) if norm in norms[length] else "" for length in norms))
        for norm in NORMS
        if norm in DECIDING
    ]
    differences = [
        (
            f"{first} - {second}",
            *(_difference(cells(first, length), cells(second, length), count=True) for length in norms),
        )
        for first, second in HYPOTHESES.values()
    ]
    headers = [f"{length} iterations" for length in norms]
    compared = [f"{equal_time[length]} - {length}" if length in equal_time else str(length) for length in norms]
    return (
        f"{_table(lines, ('norm', *headers))}\n\n"
        f"{_table(differences, ('difference', *(f'{each} iterations' for each in compared)))}"
    )


def mechanism_table(results: Results) -> str:
    """Return the conditioning of features, BN's gap and the training loss of every norm, over common seeds."""
    mixed = mean_features(results, "BN+GW", "gap")  # of the layers that are BN in the mixtures, too
    seeds = common_seeds(results)
    lines = []
    for norm in NORMS:
        kappas = [value for layer, value in mean_features(results, norm, "kappa").items() if "stem" not in layer]
        gaps = mean_features(results, norm, "gap")
        ends = [
            loss
            for row in scored_rows(results, norm)
            for iteration, loss in losses(results, row).items()
            if row.seed in seeds and iteration >= 0.8 * row.iterations
        ]
        if kappas:
            at, elsewhere = ([gap for layer, gap in gaps.items() if (layer in mixed) == kept] for kept in (False, True))
            lines.append(
                (
                    norm,
                    f"{statistics.geometric_mean(kappas):.0f}",
                    *(f"{statistics.mean(found):.3f}" if found else "" for found in (at, elsewhere)),
                    f"{statistics.mean(ends):.3f}" if ends else "",
                )
            )
    if not lines:
        return "No features are measured."
    return _table(lines, ("norm", "kappa", "BN's gap at S1-B2", "BN's gap elsewhere", "loss of the last fifth"))


def has_other_batches(results: Results) -> bool:
    """Tell whether a scored run at another batch size is finished."""
    return any(scored(results, norm, batch) for norm in OTHER_BATCH_NORMS for batch in OTHER_BATCHES)


def batch_table(results: Results) -> str:
    """Return the link to the figure, and AP of the common seed at every batch size, with the mean over all seeds."""
    if not has_other_batches(results):
        return "No run at another batch size is finished."
    batches = sorted((DECIDING_BATCH, *OTHER_BATCHES))
    seed = OTHER_BATCH_SEED
    lines = []
    for norm in OTHER_BATCH_NORMS:
        found = [scored(results, norm, batch) for batch in batches]
        of_seed = [{seed: values[seed]} if seed in values else {} for values in found]
        lines.append((norm, *(_mean(values.values()) for values in (*of_seed, scored(results, norm)))))
    table = _table(lines, ("norm", *(f"batch {batch}" for batch in batches), f"batch {DECIDING_BATCH}, all seeds"))
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


def _difference(first: Mapping[int, float], second: Mapping[int, float], *, count: bool = False) -> str:
    """Return the mean difference of common seeds, with its interval from two seeds on."""
    seeds = first.keys() & second.keys()
    if not seeds:
        return "not run"
    found = paired_difference(first, second)
    mean = statistics.mean(first[seed] - second[seed] for seed in seeds)
    words = [f"{mean:+.1f}", *([_interval(found.low, found.high)] if found else [])]
    return " ".join([*words, *([f"({len(seeds)} seeds)"] if count and len(seeds) > 1 else [])])


def _interval(low: float, high: float) -> str:
    return f"[{low:+.2f}, {high:+.2f}]"


def _table(lines: Iterable[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(list(lines), headers, tablefmt="github", disable_numparse=True)
