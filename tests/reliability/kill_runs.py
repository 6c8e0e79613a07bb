"""Kill runs by SIGKILL at random moments and check that nothing is lost: kill_runs.py --kills 100 --output DIR.

Each kill hits one kind of work: a training step, a checkpoint write, an evaluation, the generation of the synthetic
data, a download, an export or a conversion. After a training was killed, last_checkpoint has to name a complete file,
and the resumed run has to continue there and to remove unfinished files. The other kinds leave a whole result or none,
and the next attempt has to succeed and to remove what was left. The moments come from a seed. Exit status: 1 if
anything was lost.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from detectron2.modeling import build_backbone
from tabulate import tabulate

from gw_detectron.checkpoint import convert_file, read_weights_file
from gw_detectron.checkpoint.download import download
from gw_detectron.config import read_config
from gw_detectron.data.synthetic import SyntheticConfig, make_synthetic, register_synthetic
from gw_detectron.engine import main as run_main
from gw_detectron.export import Normalization, export_backbone
from tests.checkpoint.server import Server, serving
from tests.checkpoint.synthetic import authors_state, make_network, training_checkpoint
from tests.reliability.forked_run import CHECKPOINT, EVALUATION, STEP, Child, child, report_phases
from tests.tiny_run import CONFIG, DATA, OPTS, arguments

TRAINING = (STEP, CHECKPOINT, EVALUATION)
OTHERS = ("generation", "download", "export", "conversion")
BETWEEN = "between steps"  # a training that had left the phase before it was hit
_LONGEST = {STEP: 0.2, CHECKPOINT: 0.15, EVALUATION: 0.5}  # seconds of a phase, to choose a moment in it


class LostError(Exception):
    """A kill lost or damaged something."""


@dataclass
class Training:
    """A training that is killed and resumed until it is finished.

    Args:
        folder: its output folder.
        iterations: its length.
        exact: the final state has to equal that of an uninterrupted training, bit for bit.
    """

    folder: Path
    iterations: int
    exact: bool = False
    _runs: int = 0
    _last: int = -1  # iteration of the newest checkpoint
    _expected: dict | None = None

    def kill(self, kind: str, moments: random.Random) -> str:
        """Start or resume the training and kill it; return the phase that was hit, or "" if it finished before."""
        output = self.folder / f"training_{self._runs}"
        with child(self._work(output), self.folder / "log.txt") as run:
            self._check_start(run, output)
            if run.wait_for(kind, moments.randint(1, 3)):
                time.sleep(moments.uniform(0, _LONGEST[kind]))
            run.kill()
        self._check(output, finished=run.status == 0)
        if run.status == 0:
            self._runs, self._last = self._runs + 1, -1
            shutil.rmtree(output)
            return ""
        if run.status != -9:
            raise LostError(f"ended with status {run.status}:\n{run.output()[-3000:]}")
        return run.phase if run.phase in TRAINING else BETWEEN

    def finish(self) -> None:
        """Let the training come to its end."""
        output = self.folder / f"training_{self._runs}"
        with child(self._work(output), self.folder / "log.txt") as run:
            self._check_start(run, output)
            if run.wait():
                raise LostError(f"resumed, it ended with status {run.status}:\n{run.output()[-3000:]}")
        self._check(output, finished=True)

    def _work(self, output: Path) -> Callable[[Callable[[str], None]], None]:
        schedule = {"SOLVER__MAX_ITER": self.iterations, "SOLVER__STEPS": f"({self.iterations // 2},)"}
        args = arguments(output, "--resume", **schedule, SOLVER__CHECKPOINT_PERIOD=2, TEST__EVAL_PERIOD=5)

        def work(report: Callable[[str], None]) -> None:
            report_phases(report)
            run_main(args)

        self.folder.joinpath("log.txt").unlink(missing_ok=True)
        return work

    def _check_start(self, run: Child, output: Path) -> None:
        if self._last + 1 == self.iterations:
            return  # only the last evaluation is left to do
        if not run.wait_for(STEP):
            raise LostError(f"did not start:\n{run.output()[-3000:]}")
        if f"Starting training from iteration {self._last + 1}\n" not in run.output():
            raise LostError(f"did not continue at iteration {self._last + 1}:\n{run.output()[-3000:]}")
        left = [path.name for path in output.glob(".*.tmp") if f".{run.pid}." not in path.name]
        if left:
            raise LostError(f"unfinished files stay: {left}")

    def _check(self, output: Path, *, finished: bool) -> None:
        tag = output / "last_checkpoint"
        if not tag.exists():
            if self._last >= 0 or finished:
                raise LostError("last_checkpoint is gone")
            return
        newest = output / tag.read_text()
        checkpoint = read_weights_file(newest).value  # verifies the checksums
        iteration = checkpoint["iteration"]
        if iteration < self._last or checkpoint["trainer"]["iteration"] != iteration:
            raise LostError(f"{newest.name} has iteration {iteration} after {self._last}")
        if any(not value.isfinite().all() for value in checkpoint["model"].values()):
            raise LostError(f"{newest.name} has values that are not finite")
        self._last = iteration
        for older in output.glob("model_*.pth"):
            if older != newest:
                older.unlink()
        if finished and (newest.name, iteration) != ("model_final.pth", self.iterations - 1):
            raise LostError(f"finished with {newest.name} of iteration {iteration}")
        if finished and self.exact:
            self._compare(checkpoint)

    def _compare(self, checkpoint: dict) -> None:
        if self._expected is None:
            uninterrupted = Training(self.folder / "uninterrupted", self.iterations)
            uninterrupted.folder.mkdir()
            uninterrupted.finish()
            self._expected = _tensors(read_weights_file(uninterrupted.folder / "training_0" / "model_final.pth").value)
        found = _tensors(checkpoint)
        different = [name for name, value in self._expected.items() if not torch.equal(found[name], value)]
        if different:
            raise LostError(f"{len(different)} of {len(found)} tensors differ from the uninterrupted training")


def _tensors(value: object, name: str = "") -> dict[str, torch.Tensor]:
    """Flatten the model and the momenta of a checkpoint."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    return {key: tensor for part, inner in items for key, tensor in _tensors(inner, f"{name}.{part}").items()}


@dataclass
class Attempt:
    """Work that leaves a whole result or none.

    Args:
        folder: of the result alone.
        log: file of the output.
        work: makes the result.
        result: describes the result, or returns None without one; raises LostError if it is not whole.
    """

    folder: Path
    log: Path
    work: Callable[[], object]
    result: Callable[[Path], object]
    _seconds: float = 0.0
    _expected: object = None

    def kill(self, moments: random.Random) -> bool:
        """Kill an attempt, then let the next one finish; tell whether the first was killed before its end."""
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
        if run.status not in (0, -9):
            raise LostError(f"ended with status {run.status}:\n{run.output()[-3000:]}")
        if self.result(self.folder) not in (None, self._expected):
            raise LostError("the result differs from that of an uninterrupted attempt")
        self._finish()
        return run.status == -9

    def _finish(self) -> float:
        """Let an attempt finish and check it; return its seconds."""
        self.folder.mkdir(exist_ok=True)
        with child(self._reported, self.log) as run:
            if run.wait():
                raise LostError(f"the next attempt ended with status {run.status}:\n{run.output()[-3000:]}")
        found = self.result(self.folder)
        if found is None or self._expected not in (None, found):
            raise LostError("the next attempt has no result, or another one than an uninterrupted attempt")
        self._expected = found
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(".") or "part" in path.suffix]
        if left:
            raise LostError(f"the next attempt leaves unfinished files: {left}")
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
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _exported(folder: Path) -> object:
    target = folder / "exported"
    if not target.exists():
        return None
    hashes = _hashes(target)
    parity = json.loads((target / "parity.json").read_text())
    if hashes[parity["file"]] != parity["sha256"] or set(hashes) != {parity["file"], "parity.json", "README.md"}:
        raise LostError(f"a damaged export: {sorted(hashes)}")
    return hashes[parity["file"]]


def _converted(folder: Path) -> object:
    target = folder / "converted.pkl"
    if not target.exists():
        return None
    read_weights_file(target)
    return hashlib.sha256(target.read_bytes()).hexdigest()


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


def kill_runs(folder: Path, kills: int, seed: int, *, iterations: int = 60, exact: bool = False) -> dict:
    """Kill runs in an empty folder; return the counts per kind and the losses."""
    moments = random.Random(seed)
    begin = time.monotonic()
    root = folder / "datasets"
    make_synthetic(root, DATA)
    register_synthetic(root, DATA)
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in (*TRAINING, BETWEEN, *OTHERS)}
    losses = []
    training = Training(folder, iterations, exact)
    with serving(random.Random(0).randbytes(60_000_000)) as server:
        attempts = make_attempts(folder, server)
        while sum(count["survived"] for count in counts.values()) < kills and len(losses) < 10:
            kind = min((*TRAINING, *OTHERS), key=lambda kind: (counts[kind].total(), moments.random()))
            try:
                hit = training.kill(kind, moments) if kind in TRAINING else kind if attempts[kind].kill(moments) else ""
                counts[hit or kind]["survived" if hit else "finished before the kill"] += 1
            except LostError as error:
                counts[kind]["lost"] += 1
                losses.append(f"{kind}: {error}")
                print(losses[-1], flush=True)
            print(f"\r{sum(count['survived'] for count in counts.values())} of {kills}", end="", flush=True)
    print()
    try:
        training.finish()
    except LostError as error:
        losses.append(f"the last training: {error}")
        print(losses[-1], flush=True)
    return {
        "kills": sum(count["survived"] for count in counts.values()),
        "seed": seed,
        "exact": exact,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "kinds": {kind: dict(count) for kind, count in counts.items()},
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("output/kills"), help="folder to create (%(default)s)")
    parser.add_argument(
        "--exact", action="store_true", help="the final state has to equal that of an uninterrupted training"
    )
    args = parser.parse_args()
    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    result = kill_runs(args.output, args.kills, args.seed, exact=args.exact)
    (args.output / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    columns = ("survived", "finished before the kill", "lost")
    rows = [[kind, *(count.get(column, 0) for column in columns)] for kind, count in result["kinds"].items()]
    table = tabulate(rows, headers=["kind", *columns])
    (args.output / "kills.txt").write_text(table + "\n")
    print(f"{table}\n{result['kills']} kills in {result['minutes']} minutes, {len(result['losses'])} losses.")
    raise SystemExit(bool(result["losses"]))


if __name__ == "__main__":
    main()
