"""Run the tests of the layers, and those that need Detectron2, on other versions; update the table of CONTRIBUTING.md.

``make matrix`` builds an environment in build/matrix for the lowest and the newest versions that pyproject.toml allows,
and for the libraries of docs/your_model.md.
``--python`` tests one of yours, such as Detectron2 compiled from its repository: ``--python PYTHON HEAD``.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, BUILD = ROOT / "CONTRIBUTING.md", ROOT / "build" / "matrix"
#: options of `uv pip install` beside the requirements of pyproject.toml
COMBINATIONS = {
    "lowest": ["--resolution", "lowest-direct", "numpy==1.26.4", "pillow==10.0.*"],
    "newest": [],
    # libraries of docs/your_model.md; lerobot needs an older torch than the others
    "hosts": ["transformers", "rfdetr[train]", "ultralytics", "nnunetv2", "monai"],
    "lerobot": ["lerobot==0.3.3"],
}
TESTS = [
    "layers",
    "norms",
    "modeling",
    "weights",
    "workbench/dataset",
    "workbench/run",
    "workbench/export",
    "test_configs.py",
]
CONFIG = "quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml"
DEMO = [
    "MODEL.DEVICE",
    "cpu",
    "SOLVER.MAX_ITER",
    "20",
    "SOLVER.CHECKPOINT_PERIOD",
    "10",
]
PROBE = """
import json, platform, detectron2.modeling
from importlib.metadata import version
from gw_detectron.installation import has_compiled_operators
build = "compiled" if has_compiled_operators() else "pure Python"
versions = [version(name) for name in ("torch", "torchvision", "numpy", "pillow")]
print(json.dumps([platform.python_version(), f"{detectron2.__version__}, {build}", *versions]))
"""


def build_environment(name: str) -> Path:
    """Create a virtual environment with one combination; return its interpreter."""
    folder, wheels = BUILD / name, BUILD / "wheel"
    subprocess.run(
        [
            sys.executable,
            ROOT / "tools" / "install_detectron2.py",
            "--wheel-dir",
            wheels,
        ],
        check=True,
    )
    uv, python = Path(sys.executable).with_name("uv"), folder / "bin" / "python"
    subprocess.run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder],
        check=True,
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = [
        "-r",
        ROOT / "pyproject.toml",
        "--extra",
        "weights",
        "--extra",
        "tools",
        "--extra",
        "test",
        "setuptools>=68",  # the lowest of all cannot be built
    ]
    # its torch is newer than the lowest
    needed += [line for line in extras["export"] if not line.startswith("torch")]
    install = [
        uv,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        *wheels.glob("*.whl"),
        *needed,
    ]
    subprocess.run([*install, *COMBINATIONS[name]], check=True)
    return python


def run_combination(python: Path) -> list[str]:
    """Run the fast tests, then train, evaluate and resume the demo; return the cells of the table."""

    def run(*words: str, **options: bool) -> subprocess.CompletedProcess[str]:
        variables = {
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        }
        return subprocess.run(
            [python, *words], cwd=ROOT, env=os.environ | variables, text=True, **options
        )

    versions = json.loads(
        run("-c", PROBE, check=True, capture_output=True).stdout.splitlines()[-1]
    )
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        options = [
            "-q",
            "-m",
            "not slow",
            "-p",
            "no:cacheprovider",
            f"--junitxml={folder}/report.xml",
        ]
        run("-m", "pytest", *options, *(f"tests/{name}" for name in TESTS))
        (suite,) = ElementTree.parse(f"{folder}/report.xml").getroot()
        tests, failures, errors, skipped = (
            int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")
        )
        failed = failures + errors
        shapes = Path(folder, "shapes")
        run("-m", "examples.shapes", str(shapes), check=True)
        data = [
            *("--train-json", f"{shapes}/annotations/instances_train.json"),
            *("--train-images", f"{shapes}/train"),
            *("--val-json", f"{shapes}/annotations/instances_val.json"),
            *("--val-images", f"{shapes}/val"),
        ]
        output = Path(folder, "demo")
        saved = ["tools/train_net.py", "--config-file", f"{output}/config.yaml"]
        commands = [
            [
                "tools/train_net.py",
                "--config-file",
                CONFIG,
                *data,
                *DEMO,
                "OUTPUT_DIR",
                str(output),
            ],
            [*saved, "--eval-only", "MODEL.WEIGHTS", f"{output}/model_final.pth"],
            [*saved, "--resume", "SOLVER.MAX_ITER", "25"],
        ]
        tools = ["failed" if run(*command).returncode else "ok" for command in commands]
    counts = [str(count) for count in (tests - failed - skipped, failed, skipped)]
    return [*versions, *counts, *tools, datetime.date.today().isoformat()]


def write_row(name: str, cells: list[str]) -> None:
    """Replace the row of this name in the table of the page, or append it."""
    before, mark, table = PAGE.read_text().partition("<!-- matrix: begin -->\n")
    table, end, after = table.partition("<!-- matrix: end -->")
    lines = [line for line in table.splitlines() if not line.startswith(f"| {name} |")]
    lines.append(f"| {' | '.join([name, *cells])} |")
    PAGE.write_text(before + mark + "\n".join(lines) + "\n" + end + after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(COMBINATIONS)}, or the name of a row",
    )
    parser.add_argument(
        "--python", type=Path, help="interpreter of your environment, for one NAME"
    )
    args = parser.parse_args()
    names = args.names or list(COMBINATIONS)
    if len(names) != 1 if args.python else set(names) - set(COMBINATIONS):
        parser.error(
            f"NAME ({' '.join(names)}): give one name with --python, or some of {', '.join(COMBINATIONS)}."
        )
    good = True
    for name in names:
        cells = run_combination(args.python or build_environment(name))
        write_row(name, cells)
        good &= cells[7] == "0" and "failed" not in cells
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
