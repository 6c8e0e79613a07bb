"""The rows of MODEL_ZOO.md: which configs a table links, how far each run is, and running them one after the other."""

import fnmatch
import math
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gw_detectron.checkpoint.records import config_differences
from gw_detectron.config import read_config
from gw_detectron.engine.output_folder import METRICS, read_metrics
from gw_detectron.errors import ConfigError, MissingFileError
from gw_detectron.model_zoo import get_config_file

from .job_runner import LOG, run_jobs, start_python

#: keys that do not change what is trained and measured
HARMLESS = {
    "DATALOADER.NUM_WORKERS",
    "MODEL.DEVICE",
    "OUTPUT_DIR",
    "SEED",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
    "VIS_PERIOD",
}
_TRAIN = (str(Path(__file__).parents[1] / "tools" / "train_net.py"),)
_LINK = re.compile(r"\]\(configs/([^)]+\.yaml)\)")
_EVALUATION = re.compile(r"(bbox|sem_seg)/")
_METRIC = re.compile(r"(bbox|segm)/AP(50|75)?")


@dataclass(frozen=True)
class ZooRow:
    """A config of a table.

    Args:
        config: its name below ``configs/``.
        gpus: the number of GPUs that the table states: 1 in a column "one GPU", else 8.
    """

    config: str
    gpus: int

    @property
    def name(self) -> str:
        return self.config.removesuffix(".yaml")


def zoo_rows(page: str) -> Iterator[tuple[str, ZooRow]]:
    """Yield heading and row of each config that a table links, in the order of the page."""
    heading = ""
    titles: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("#"):
            heading = line
        elif not line.startswith("|"):
            titles = []
        elif not titles:
            titles = cells
        else:
            for title, cell in zip(titles, cells, strict=False):
                if found := _LINK.search(cell):
                    yield heading, ZooRow(found[1], 1 if "one GPU" in title else 8)


def select_rows(zoo: Path, table: str, patterns: Sequence[str] = ()) -> list[ZooRow]:
    """Return the rows of a table.

    Args:
        zoo: MODEL_ZOO.md.
        table: the paper's number, such as ``4``, or a part of the heading; "" for all tables.
        patterns: shell patterns of file names of configs, such as ``*_GW``; empty means all.

    Raises:
        MissingFileError: there is no such page.
        ConfigError: no heading or no row matches.
    """
    if not zoo.is_file():
        raise MissingFileError(f"--zoo ('{zoo}'): file not found (cwd: {Path.cwd()}). Fix: run it in the repository.")
    wanted = re.compile(rf"\(Table {table}\b" if table.isdigit() else re.escape(table), re.IGNORECASE)
    rows = list(dict.fromkeys(row for heading, row in zoo_rows(zoo.read_text()) if wanted.search(heading)))
    if not rows:
        raise ConfigError(f"--table ({table!r}): no heading in {zoo} with rows has it. Fix: give 4, 5 or a heading.")
    files = {row: Path(row.name).name for row in rows}
    for pattern in patterns:
        if not fnmatch.filter(files.values(), pattern):
            raise ConfigError(f"--rows ({pattern!r}): none in this table. Fix: see the names with --dry-run.")
    return [row for row in rows if any(fnmatch.fnmatchcase(files[row], pattern) for pattern in patterns or ("*",))]


def final_metrics(folder: Path) -> dict[str, float] | None:
    """Return box and mask AP after the last iteration of a run, in percent; None before that evaluation."""
    if not (folder / "config.yaml").is_file() or not (folder / "model_final.pth").is_file():
        return None
    last = read_config(str(folder / "config.yaml")).SOLVER.MAX_ITER - 1
    final = [line for line in read_metrics(folder / METRICS) if line["iteration"] >= last]  # Detectron2 writes last + 1
    evaluations = [line for line in final if any(map(_EVALUATION.match, line))]
    if not evaluations:
        return None
    found = {name: value for name, value in evaluations[-1].items() if _METRIC.fullmatch(name)}
    # without any detection the AP is NaN
    return {name: 0.0 if math.isnan(value) else round(value, 3) for name, value in found.items()}


def changed_options(folder: Path, config: str, options: list[str]) -> dict[str, str]:
    """Describe how the run in a folder differs from a row with these options: key -> description."""
    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    row = read_config(get_config_file(config), options).dump()
    return {
        key: text.removeprefix(f"{key} ").replace("the checkpoint", "the folder")
        for key, text in config_differences({"config": file.read_text()}, row).items()
        if key not in HARMLESS
    }


def state_of(row: ZooRow, output: Path) -> str:
    """Describe how far a row is, and how its run differs from its config."""
    folder = output / row.name
    if (metrics := final_metrics(folder)) is not None:
        changes = ", ".join(changed_options(folder, row.config, []))
        return f"finished: {_scores(metrics)}{f'; changed: {changes}' if changes else ''}"
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
