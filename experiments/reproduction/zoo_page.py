"""Read which configs the tables of MODEL_ZOO.md have, and fill their columns "ours".

The page is the source of truth. A column "AP, ours", "AP50, ours", "box AP, ours" or "mask AP, ours" belongs to the
config that the column "Config" links; "AP, ours, one GPU" to that of the column "Config, one GPU".
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_OURS = re.compile(r"(?:(?P<kind>box|mask) )?(?P<metric>AP\d*), ours(?:, (?P<gpus>.*))?")
_CONFIG = re.compile(r"Config(?:, (?P<gpus>.*))?")
_LINK = re.compile(r"\]\(configs/([^)]+)\)")
_GPUS = re.compile(r"(one|\d+) GPUs?")
_SEPARATOR = re.compile(r"\|(\s*:?-+:?\s*\|)+")
_DEFAULT_GPUS = 8
_RUNS, _CHANGED = '## Runs behind the columns "ours"', "## Runs with changed options"
_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "Config": lambda run: f"[{run['config'].removesuffix('.yaml')}](configs/{run['config']})",
    "box AP": lambda run: _number(run, "bbox/AP"),
    "mask AP": lambda run: _number(run, "segm/AP"),
    "Changed": lambda run: "; ".join(f"`{key}`: {value}" for key, value in run["changes"].items()),
    "Commit": lambda run: ", ".join(
        f"{commit.removesuffix('-dirty')[:10]}{' with local changes' * commit.endswith('-dirty')}"
        for commit in run["commits"]
    ),
    "Hardware": lambda run: f"{run['processes']} x {run['versions'].get('gpu', 'CPU')}",
    "Training": lambda run: f"{run['seconds'] / 3600:.1f} h",
    "Software": lambda run: ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "detectron2")),
    "Log": lambda run: f"[log]({run['log']})" if "://" in run["log"] else f"`{run['log']}`",
}


@dataclass(frozen=True)
class ResultCell:
    """A cell of a column "ours".

    Args:
        heading: of the section.
        line, column: of the cell in the page.
        config: name of the config below ``configs/``.
        metric: as in ``metrics.json``: ``bbox/AP``, ``bbox/AP50``, ``segm/AP``, ...
        gpus: the number of GPUs of the row.
    """

    heading: str
    line: int
    column: int
    config: str
    metric: str
    gpus: int


def result_cells(page: str) -> Iterator[ResultCell]:
    """Yield the cells of all columns "ours", row by row; rows without a linked config have none."""
    heading, header, lines = "", [], page.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            header, heading = [], (line if line.startswith("## ") else heading)
        elif number + 1 < len(lines) and _SEPARATOR.fullmatch(lines[number + 1].strip()):
            header = _cells(line)
        elif header and not _SEPARATOR.fullmatch(line.strip()):
            yield from _row_cells(heading, number, header, _cells(line))


def _row_cells(heading: str, line: int, header: Sequence[str], row: Sequence[str]) -> Iterator[ResultCell]:
    links = {
        found["gpus"]: link[1]
        for title, cell in zip(header, row, strict=False)
        if (found := _CONFIG.fullmatch(title)) and (link := _LINK.search(cell))
    }
    for column, title in enumerate(header):
        if (found := _OURS.fullmatch(title)) and found["gpus"] in links:
            metric = f"{'segm' if found['kind'] == 'mask' else 'bbox'}/{found['metric']}"
            yield ResultCell(heading, line, column, links[found["gpus"]], metric, _number_of_gpus(found["gpus"]))


def _number_of_gpus(title: str | None) -> int:
    found = _GPUS.fullmatch(title or "")
    return _DEFAULT_GPUS if found is None else 1 if found[1] == "one" else int(found[1])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table_rows(page: str, table: str) -> dict[str, int]:
    """Return the configs of a table in their order, with the number of GPUs of each.

    Args:
        page: the content of MODEL_ZOO.md.
        table: the paper's number, such as ``4``, or a part of the section's heading; "" for all tables.
    """
    pattern = re.compile(rf"\(Table {table}\b" if table.isdigit() else re.escape(table), re.IGNORECASE)
    return {cell.config: cell.gpus for cell in result_cells(page) if pattern.search(cell.heading)}


def fill_page(page: str, runs: Iterable[Mapping[str, Any]]) -> str:
    """Write the numbers of runs into the columns "ours", and the tables of these runs at the end of the page.

    Args:
        page: the content of MODEL_ZOO.md.
        runs: their records, see :func:`.run_result.read_run`. One with changed options has a table of its own.
    """
    runs = list(runs)
    rows = {run["config"]: run for run in runs if not run["changes"]}
    lines = _without_runs(page).splitlines()
    for cell in result_cells(page):
        cells = _cells(lines[cell.line])
        cells[cell.column] = _number(rows.get(cell.config, {}), cell.metric)
        lines[cell.line] = _line(cells)
    return "\n".join(lines).rstrip() + "\n" + _table(_RUNS, rows.values()) + _changed_table(runs)


def _changed_table(runs: Iterable[Mapping[str, Any]]) -> str:
    changed = [run for run in runs if run["changes"]]
    return _table(f"{_CHANGED}\n\nThese numbers belong to no row above: options of the config were changed.", changed)


def _without_runs(page: str) -> str:
    return re.split(f"^(?:{re.escape(_RUNS)}|{re.escape(_CHANGED)})$", page, maxsplit=1, flags=re.MULTILINE)[0]


def _table(heading: str, runs: Iterable[Mapping[str, Any]]) -> str:
    runs = list(runs)
    if not runs:
        return ""
    columns = [name for name in _COLUMNS if name != "Changed" or any(run["changes"] for run in runs)]
    body = [_line([_COLUMNS[name](run).replace("|", "\\|") for name in columns]) for run in runs]
    return "\n".join(["", heading, "", _line(columns), _line(["---"] * len(columns)), *body]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _number(run: Mapping[str, Any], metric: str) -> str:
    return f"{run[metric]:.2f}" if metric in run else ""
