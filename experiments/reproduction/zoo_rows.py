"""Run the rows of a table, one after the other, and write their results."""

import fnmatch
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gw_detectron.atomic import atomic_write
from gw_detectron.errors import ConfigError, MissingFileError
from gw_detectron.model_zoo import get_config_file

from ..job_runner import LOG, run_jobs, start_python
from ..json_lines import read_lines, write_lines
from .run_result import changed_options, final_metrics, read_run
from .zoo_page import fill_page, table_rows

_TRAIN = (str(Path(__file__).parents[2] / "tools" / "train_net.py"),)


@dataclass(frozen=True)
class ZooRow:
    """A config of a table.

    Args:
        config: its name below ``configs/``.
        gpus: the number of GPUs that the table states.
    """

    config: str
    gpus: int

    @property
    def name(self) -> str:
        return self.config.removesuffix(".yaml")


def select_rows(zoo: Path, table: str, patterns: Sequence[str] = ()) -> list[ZooRow]:
    """Return the rows of a table.

    Args:
        zoo: MODEL_ZOO.md.
        table: see :func:`.table_rows`.
        patterns: shell patterns of file names of configs, such as ``*_GW``; empty means all.

    Raises:
        MissingFileError: there is no such page.
        ConfigError: no heading or no row matches.
    """
    if not zoo.is_file():
        raise MissingFileError(f"--zoo ('{zoo}'): file not found (cwd: {Path.cwd()}). Fix: run it in the repository.")
    rows = [ZooRow(config, gpus) for config, gpus in table_rows(zoo.read_text(), table).items()]
    if not rows:
        raise ConfigError(f"--table ({table!r}): no heading in {zoo} with rows has it. Fix: give 4, 5 or a heading.")
    files = {row: Path(row.name).name for row in rows}
    for pattern in patterns:
        if not fnmatch.filter(files.values(), pattern):
            raise ConfigError(f"--rows ({pattern!r}): none in this table. Fix: see the names with --dry-run.")
    return [row for row in rows if any(fnmatch.fnmatchcase(files[row], pattern) for pattern in patterns or ("*",))]


def state_of(row: ZooRow, output: Path) -> str:
    """Describe how far a row is."""
    folder = output / row.name
    if (metrics := final_metrics(folder)) is not None:
        return f"finished: {_scores(metrics)}"
    tag = folder / "last_checkpoint"
    return f"continues from {tag.read_text().strip()}" if tag.is_file() else "not started"


def run_table(
    rows: Sequence[ZooRow],
    output: Path,
    gpus: int,
    options: Sequence[str] = (),
    report: Callable[[str], object] = print,
) -> list[ZooRow]:
    """Run all unfinished rows.

    Args:
        rows: in their order.
        output: each row has the folder of its name there.
        gpus: of a run, or 1 for a row of one GPU; 0 for the CPU.
        options: config keys to change, as KEY VALUE KEY VALUE.
        report: called with a line of progress.

    Returns:
        The rows that failed.

    Raises:
        ConfigError: a folder holds a run with other options.
    """
    for row in rows:
        if changes := changed_options(output / row.name, row.config, list(options)):
            found = "; ".join(f"{key} {change}" for key, change in changes.items())
            raise ConfigError(
                f"--output ('{output}'): {row.name} was run with other options: {found}. Fix: give the same options, "
                "or another --output."
            )

    def ready() -> list[ZooRow]:
        return [row for row in rows if final_metrics(output / row.name) is None]

    def start(row: ZooRow) -> subprocess.Popen:
        folder = output / row.name
        report(f"[{rows.index(row) + 1}/{len(rows)}] start {row.name}, {state_of(row, output)}; log: {folder / LOG}")
        words = ["--config-file", get_config_file(row.config), "--num-gpus", str(min(gpus, row.gpus)), "--resume"]
        return start_python([*_TRAIN, *words, *options, "OUTPUT_DIR", str(folder)], folder)

    def ended(row: ZooRow, status: int) -> bool:
        metrics = final_metrics(output / row.name)
        if metrics is None:
            lines = (output / row.name / LOG).read_text(errors="replace").strip().splitlines() or ["no output"]
            report(f"FAILED {row.name}: exit status {status}: {lines[-1]}")
        else:
            report(f"done {row.name}: {_scores(metrics)}")
        return metrics is not None

    return run_jobs(ready, start, 1, ended)


def _scores(metrics: dict[str, float]) -> str:
    names = {"bbox/AP": "box AP", "segm/AP": "mask AP"}
    return ", ".join(f"{title} {metrics[name]:.2f}" for name, title in names.items() if name in metrics) or "no box AP"


def collect_rows(rows: Sequence[ZooRow], output: Path, log_url: str | None = None) -> list[dict[str, Any]]:
    """Return the records of the finished runs, see :func:`.read_run`.

    Args:
        rows: in their order.
        output: see :func:`run_table`.
        log_url: address under which ``output`` is published; None names the path of the log.
    """
    place = log_url.rstrip("/") if log_url else output.as_posix()
    runs = (read_run(row.config, row.gpus, output / row.name, f"{place}/{row.name}/log.txt") for row in rows)
    return [run for run in runs if run]


def write_zoo(zoo: Path, records: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Add runs to the records, and write all records into the page.

    A new run replaces that of the same config and the same changes.
    """
    known = {_identity(run): run for run in [*read_records(records), *runs]}
    page = fill_page(zoo.read_text(), known.values())
    write_lines(records, known.values())
    with atomic_write(zoo) as temporary:
        temporary.write_text(page)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of runs.

    Raises:
        DataError: a line is damaged.
    """

    def parse(run: dict[str, Any]) -> dict[str, Any]:
        _identity(run), run["commits"], run["versions"], float(run["seconds"])
        return run

    return read_lines(path, parse)


def _identity(run: dict[str, Any]) -> tuple[str, str]:
    return run["config"], json.dumps(run["changes"], sort_keys=True)
