"""Kill runs at random moments and check for losses: kill_runs.py --kills 100.

Each kill hits one kind of work: a training step, a checkpoint write, an evaluation, the generation of the synthetic
data, a download, an export or a conversion. After a training was killed, last_checkpoint must name a complete file, and
the resumed run must continue there and remove unfinished files. Its final state must equal that of an uninterrupted
training, bit for bit. The other kinds leave a whole result or none, and the next attempt must succeed and remove
unfinished files. The moments come from a seed. Exit status: 1 if anything was lost.
"""

import argparse
import contextlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from detectron2.modeling import build_backbone
from tabulate import tabulate

from gw_detectron.config import read_config
from gw_detectron.data import SyntheticConfig, make_synthetic
from gw_detectron.export import Normalization, export_backbone
from gw_detectron.weights import convert_file, read_weights_file
from gw_detectron.weights.download import download
from gw_detectron.weights.provenance import sha256_of
from tests.reliability.forked_run import (
    CHECKPOINT,
    EVALUATION,
    STEP,
    Child,
    RunError,
    child,
    remove_older_checkpoints,
    training,
)
from tests.tiny_run import CONFIG, OPTS, arguments, dataset
from tests.weights.server import Server, serving
from tests.weights.synthetic import authors_state, make_network, training_checkpoint

TRAINING = (STEP, CHECKPOINT, EVALUATION)
OTHERS = ("generation", "download", "export", "conversion")
BETWEEN = "between steps"  # a training that had left the phase before it was hit
_LONGEST = {STEP: 0.2, CHECKPOINT: 0.15, EVALUATION: 0.5}  # seconds of a phase, to choose a moment in it


@dataclass
class Training:
    """A training to kill and resume until its end, again and again.

    Args:
        folder: of the output folder and the log.
        iterations: its length.
    """

    folder: Path
    iterations: int
    _last: int = -1  # iteration of the newest checkpoint
    _expected: dict | None = None  # final state of the first training

    def kill(self, kind: str, moments: random.Random) -> str:
        """Start or resume, then kill; return the phase hit, "" if finished."""
        with self._started() as run:
            if run.wait_for(kind, moments.randint(1, 3)):
                time.sleep(moments.uniform(0, _LONGEST[kind]))
            run.kill()
        run.expect_status(0, -9)
        self._check(finished=run.status == 0)
        if run.status == 0:
            return ""
        return run.phase if run.phase in TRAINING else BETWEEN

    def finish(self) -> None:
        """Start or resume the training and wait for its end."""
        with self._started() as run:
            run.expect_status(0)
        self._check(finished=True)

    @contextlib.contextmanager
    def _started(self) -> Iterator[Child]:
        output, log = self.folder / "training", self.folder / "log.txt"
        schedule = {"SOLVER__MAX_ITER": self.iterations, "SOLVER__STEPS": f"({self.iterations // 2},)"}
        args = arguments(output, "--resume", **schedule, SOLVER__CHECKPOINT_PERIOD=2, TEST__EVAL_PERIOD=5)
        log.unlink(missing_ok=True)
        with child(training(args), log) as run:
            if self._last + 1 < self.iterations:  # else only the last evaluation is left to do
                run.expect_start(self._last + 1)
                left = [path.name for path in output.glob(".*.tmp") if f".{run.pid}." not in path.name]
                if left:
                    raise RunError(f"unfinished files stay: {left}")
            yield run

    def _check(self, *, finished: bool) -> None:
        output = self.folder / "training"
        tag = output / "last_checkpoint"
        if not tag.exists():
            if self._last >= 0 or finished:
                raise RunError("last_checkpoint is gone")
            return
        newest = output / tag.read_text()
        checkpoint = read_weights_file(newest).value  # verifies the checksums
        iteration = checkpoint["iteration"]
        if iteration < self._last or checkpoint["trainer"]["iteration"] != iteration:
            raise RunError(f"{newest.name} has iteration {iteration} after {self._last}")
        if any(not value.isfinite().all() for value in checkpoint["model"].values()):
            raise RunError(f"{newest.name} has values that are not finite")
        self._last = iteration
        remove_older_checkpoints(output)
        if finished:
            if (newest.name, iteration) != ("model_final.pth", self.iterations - 1):
                raise RunError(f"finished with {newest.name} of iteration {iteration}")
            self._compare(checkpoint)
            self._last = -1
            shutil.rmtree(output)

    def _compare(self, checkpoint: dict) -> None:
        momenta = checkpoint["trainer"]["_trainer"]["optimizer"]["state"]
        found = {"model": checkpoint["model"], "momenta": momenta}
        self._expected = self._expected or found
        try:
            torch.testing.assert_close(found, self._expected, rtol=0, atol=0)
        except AssertionError as error:
            raise RunError(f"the final state is not that of the uninterrupted training: {error}") from error


@dataclass
class Attempt:
    """Work that leaves a whole result or none.

    Args:
        folder: of the result alone.
        log: file of the output.
        work: makes the result.
        result: describes the result, or returns None without one; raises RunError if it is not whole.
    """

    folder: Path
    log: Path
    work: Callable[[], object]
    result: Callable[[Path], object]
    _seconds: float = 0.0
    _expected: object = None

    def kill(self, moments: random.Random) -> bool:
        """Kill an attempt, then finish the next one.

        Returns:
            Whether the first attempt was killed before its end.
        """
        if self._expected is None:
            self._finish()
            self._seconds = self._finish()
        if moments.random() < 0.5:  # otherwise the attempt replaces an earlier result
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        with child(self._reported, self.log) as run:
            run.wait_for("begin")
            time.sleep(moments.uniform(0, self._seconds))
            run.kill()
        run.expect_status(0, -9)
        if self.result(self.folder) not in (None, self._expected):
            raise RunError("the result differs from that of an uninterrupted attempt")
        self._finish()
        return run.status == -9

    def _finish(self) -> float:
        """Finish an attempt and check it; return its seconds."""
        self.folder.mkdir(exist_ok=True)
        with child(self._reported, self.log) as run:
            run.expect_status(0)
        found = self.result(self.folder)
        if found is None or self._expected not in (None, found):
            raise RunError("the next attempt has no result, or another one than an uninterrupted attempt")
        self._expected = found
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(".") or "part" in path.suffix]
        if left:
            raise RunError(f"the next attempt leaves unfinished files: {left}")
        return run.changes[1].at - run.changes[0].at

    def _reported(self, report: Callable[[str], None]) -> None:
        report("begin")
        self.work()
        report("end")


def _hashes(folder: Path) -> dict[str, str] | None:
    """Hash all files of a folder; None if it does not exist."""
    if not folder.exists():
        return None
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): sha256_of(path) for path in files}


def _exported(folder: Path) -> object:
    target = folder / "exported"
    if not target.exists():
        return None
    hashes = _hashes(target)
    parity = json.loads((target / "parity.json").read_text())
    if hashes[parity["file"]] != parity["sha256"] or set(hashes) != {parity["file"], "parity.json", "README.md"}:
        raise RunError(f"a damaged export: {sorted(hashes)}")
    return hashes[parity["file"]]


def _converted(folder: Path) -> object:
    target = folder / "converted.pkl"
    return read_weights_file(target).sha256 if target.exists() else None


def make_attempts(folder: Path, server: Server) -> dict[str, Attempt]:
    """Prepare the work that is not a training."""
    opts = [str(word) for pair in OPTS.items() for word in pair]
    cfg = read_config(str(CONFIG), opts)
    backbone, normalization = build_backbone(cfg), Normalization.from_config(cfg)
    source = folder / "source.pth"
    torch.save(training_checkpoint(authors_state(make_network("R-18", "S1-B2"))), source)
    generated = SyntheticConfig(num_train=30, num_val=5)
    places = {kind: folder / kind for kind in OTHERS}

    def fetch() -> None:
        (places["download"] / "weights.pth").unlink(missing_ok=True)  # an attempt downloads, although gdown would not
        download(server.url(), places["download"] / "weights.pth")

    work: dict[str, tuple[Callable[[], object], Callable[[Path], object]]] = {
        "generation": (
            lambda: make_synthetic(places["generation"], generated),
            lambda place: _hashes(place / "gw_synthetic"),
        ),
        "download": (fetch, lambda place: _hashes(place) if (place / "weights.pth").exists() else None),
        "export": (
            lambda: export_backbone(
                backbone, places["export"] / "exported", normalization, file_format="safetensors", fpn=True
            ),
            _exported,
        ),
        "conversion": (
            lambda: convert_file(source, places["conversion"] / "converted.pkl", overwrite=True),
            _converted,
        ),
    }
    return {kind: Attempt(places[kind], folder / f"{kind}.log", *work[kind]) for kind in OTHERS}


def kill_runs(folder: Path, kills: int, seed: int, *, iterations: int = 60) -> dict:
    """Kill runs in an empty folder; return the counts per kind and the losses."""
    moments = random.Random(seed)
    begin = time.monotonic()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, BETWEEN, *OTHERS)}
    losses = []
    run = Training(folder, iterations)
    with dataset(folder / "datasets"), serving(random.Random(0).randbytes(60_000_000)) as server:
        run.finish()  # without a kill: the state that the others have to reach
        attempts = make_attempts(folder, server)
        while sum(count["survived"] for count in counts.values()) < kills and len(losses) < 10:
            kind = min((*TRAINING, *OTHERS), key=lambda kind: (counts[kind].total(), moments.random()))
            try:
                hit = run.kill(kind, moments) if kind in TRAINING else kind if attempts[kind].kill(moments) else ""
                counts[hit or kind]["survived" if hit else "finished before the kill"] += 1
            except RunError as error:
                counts[kind]["lost"] += 1
                losses.append(f"{kind}: {error}")
                print(losses[-1], flush=True)
            print(f"\r{sum(count['survived'] for count in counts.values())} of {kills}", end="", flush=True)
        print()
        try:
            run.finish()
        except RunError as error:
            losses.append(f"the last training: {error}")
            print(losses[-1], flush=True)
    return {
        "kills": sum(count["survived"] for count in counts.values()),
        "seed": seed,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "kinds": {kind: dict(count) for kind, count in counts.items()},
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output/kills"), help="folder to create (%(default)s)")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"--output {args.output}: exists. Fix: remove it, or give another folder.")
    args.output.mkdir(parents=True)
    result = kill_runs(args.output, args.kills, args.seed)
    (args.output / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    columns = ("survived", "finished before the kill", "lost")
    rows = [[kind, *(count.get(column, 0) for column in columns)] for kind, count in result["kinds"].items()]
    table = tabulate(rows, headers=["kind", *columns])
    (args.output / "kills.txt").write_text(table + "\n")
    print(f"{table}\n{result['kills']} kills in {result['minutes']} minutes, {len(result['losses'])} losses.")
    raise SystemExit(bool(result["losses"]))


if __name__ == "__main__":
    main()
