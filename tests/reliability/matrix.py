"""Run the tests that need Detectron2 on several versions; write the table of docs/reliability.md.

``make matrix`` runs every combination that a package registry can provide. Each gets an environment of its own in
``build/matrix``. ``--python`` runs the same tests in an environment that you made, for example one with Detectron2
compiled from its repository. All results are kept in ``matrix.json`` beside this file.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "reliability.md"
BUILD = ROOT / "build" / "matrix"

# Options of `uv pip install` beside the requirements of pyproject.toml and Detectron2 v0.5.
# The releases of opencv before 4.10.0.84 were built for NumPy 1.
COMBINATIONS = {
    "lowest": ["--resolution", "lowest-direct", "numpy==1.26.4", "pillow==10.0.*"],
    "lowest for export": [
        "--resolution",
        "lowest-direct",
        "--extra",
        "export",
        "numpy>=2",
        "pillow>=13",
        "opencv-python-headless>=4.10.0.84",
    ],
    "NumPy 1": ["numpy==1.26.4", "pillow==10.*"],
    "newest": [],
}
SUITES = ["modeling", "weights", "checkpoint", "engine", "preflight", "export", "test_env.py", "test_configs.py"]
SUITES += ["test_model_zoo.py"]
DEMO = ["MODEL.DEVICE", "cpu", "SOLVER.MAX_ITER", "20", "SOLVER.CHECKPOINT_PERIOD", "10"]
COLUMNS = ["Python", "Detectron2", "torch", "torchvision", "NumPy", "Pillow"]

# Runs in the environment under test.
PROBE = """
import json, platform, sys
from importlib.metadata import version
import detectron2.modeling
operators = sys.modules.get("detectron2._C") or __import__("detectron2._C")._C
build = "pure Python" if hasattr(operators, "PURE_BUILD") else "compiled"
packages = {"torch": "torch", "torchvision": "torchvision", "NumPy": "numpy", "Pillow": "pillow"}
found = {name: version(package) for name, package in packages.items()}
print(json.dumps({"Python": platform.python_version(), "Detectron2": f"{detectron2.__version__}, {build}", **found}))
"""


def build_environment(name: str) -> Path:
    """Create a virtual environment with one combination; return its interpreter."""
    uv = [str(Path(sys.executable).with_name("uv"))]
    wheels = BUILD / "wheel"
    installer = [sys.executable, str(ROOT / "tools" / "install_detectron2.py"), "--wheel-dir", str(wheels)]
    subprocess.run(installer, check=True)
    folder = BUILD / name.replace(" ", "-")
    python = folder / "bin" / "python"
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
    requirements = ["--requirement", str(ROOT / "pyproject.toml"), *map(str, wheels.glob("*.whl")), "setuptools>=77"]
    for extra in ("weights", "tools", "test"):
        requirements += ["--extra", extra]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # of the extra export without its torch, for the tests that the lowest torch passes
    requirements += [line for line in project["optional-dependencies"]["export"] if not line.startswith("torch")]
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", str(python), *requirements, *COMBINATIONS[name]], check=True
    )
    return python


def run_tests(python: Path, folder: Path, pytest_args: list[str]) -> dict[str, int]:
    """Run the fast tests of SUITES; return the counts of pytest."""
    report = folder / "report.xml"
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, *(f"tests/{suite}" for suite in SUITES), *pytest_args], cwd=ROOT, env=environment())
    if not report.is_file():
        return {"passed": 0, "failed": 1, "skipped": 0}  # pytest did not start
    (suite,) = ElementTree.parse(report).getroot()
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
    }


def run_tools(python: Path, folder: Path) -> dict[str, str]:
    """Train the demo for 20 iterations, evaluate its checkpoint, and resume it; return "ok" or "failed"."""
    output = folder / "demo"
    saved = ["--config-file", str(output / "config.yaml")]
    checkpoint = str(output / "model_final.pth")
    commands = {
        "demo": ["tools/demo.py", *DEMO, "OUTPUT_DIR", str(output)],
        "--eval-only": ["tools/train_net.py", *saved, "--eval-only", "MODEL.WEIGHTS", checkpoint],
        "--resume": ["tools/train_net.py", *saved, "--resume", "SOLVER.MAX_ITER", "25"],
    }
    results = {}
    for name, command in commands.items():
        code = subprocess.run([str(python), *command], cwd=ROOT, env=environment()).returncode
        results[name] = "failed" if code else "ok"
    return results


def environment() -> dict[str, str]:
    """Return variables under which this checkout is imported and downloads nothing."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DETECTRON2_DATASETS": str(BUILD / "datasets"),
        "PYTHONWARNINGS": "ignore",
    }


def run_combination(python: Path, note: str, pytest_args: list[str]) -> dict[str, object]:
    """Run the tests and the tools with one interpreter; return a row of the table."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.environment import cpu_name
    from gw_detectron.installation import git_commit

    probe = subprocess.run([str(python), "-c", PROBE], capture_output=True, text=True, cwd=BUILD.parent.parent)
    if probe.returncode:
        sys.exit(f"{python}: Detectron2 cannot be imported:\n{probe.stderr}Fix: install it in that environment.")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        row = {
            **json.loads(probe.stdout.splitlines()[-1]),
            **run_tests(python, Path(folder), pytest_args),
            **run_tools(python, Path(folder)),
        }
    return {
        **row,
        "note": note,
        "seconds": round(time.monotonic() - begin),
        "date": datetime.date.today().isoformat(),
        "processor": f"{cpu_name()}, {os.cpu_count()} cores",
        "commit": git_commit(ROOT)[:10],
    }


def write_table(rows: dict[str, dict]) -> None:
    """Write the rows between the two marks of docs/reliability.md."""
    columns = [*COLUMNS, "passed", "failed", "skipped", "demo", "--eval-only", "--resume", "date", "note"]
    lines = ["| combination | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(str(row[column]) for column in columns) + " |")
    processors = sorted({row["processor"] for row in rows.values()})
    lines += ["", f"Processor: {'; '.join(processors)}."]
    begin, end = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"combinations to run: {', '.join(COMBINATIONS)}")
    parser.add_argument("--python", type=Path, help="interpreter of your environment; NAME is the name of its row")
    parser.add_argument("--note", default="", help="text for the last column of the row")
    parser.add_argument("--pytest-args", default="", help="e.g. '-x -k resnet'")
    args = parser.parse_args()
    if args.python and len(args.names) != 1:
        parser.error("--python: give one NAME for the row.")
    if not args.python and (unknown := set(args.names) - set(COMBINATIONS)):
        parser.error(f"NAME ({sorted(unknown)}): unknown. Fix: choose from {list(COMBINATIONS)}.")
    failed = False
    for name in args.names or COMBINATIONS:
        print(f"=== {name} ===", flush=True)
        python = args.python or build_environment(name)
        row = run_combination(python, args.note, shlex.split(args.pytest_args))
        rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        rows[name] = row
        RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
        write_table(rows)
        failed |= bool(row["failed"]) or "failed" in row.values()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
