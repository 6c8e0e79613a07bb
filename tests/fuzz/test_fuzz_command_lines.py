"""Random arguments of the tools: help, a usage line or an error of one sentence, never a traceback."""

import io
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..tiny_run import CONFIG, ROOT
from .examples import fuzz

# tool -> flags, and words that stop it before minutes of work whatever else is given
TOOLS = {
    "train_net": (
        "--config-file --num-gpus --resume --eval-only --allow-partial --train-json --train-images --val-json "
        "--val-images --val-fraction --dataset --datasets",
        ["SOLVER.MAX_ITER", "0"],
    ),
    "demo": ("--config-file", ["DATASETS.TEST", "()"]),
    "convert_weights": ("--arch --positions --keep-fc --pool-norm --force", []),
    "verify_weights": ("--config-file --images --source", []),
    "describe_checkpoint": ("--json", []),
    "export_backbone": ("--config-file --weights --output --format --layout --no-fpn", ["MODEL.WEIGHTS", "none.pth"]),
    "export_model": (
        "--config-file --output --format --detections --one-image --paste-masks --class-names --image --dataset",
        ["MODEL.WEIGHTS", "none.pth"],
    ),
    "benchmark": ("layer network --output --shapes --groups --repeats --compare", ["--no-such-flag"]),
}
WORDS = st.one_of(
    st.sampled_from(
        ["--help", "", "-1", "0", "nan", "none.pth", "missing/x.yaml", str(CONFIG), str(ROOT), "MODEL.WEIGHTS"]
    ),
    st.sampled_from(
        ["SOLVER.BASE_LR", "MODEL.NO_KEY", "=", "--", "-x", "gw://none", "gw://file/none", "s3://x", "\udc80"]
    ),
    st.text(max_size=4),
)


@pytest.mark.parametrize("tool", sorted(TOOLS))
@given(data=st.data())
@fuzz(5)
def test_a_tool_ends_without_a_traceback(tool, tmp_path, monkeypatch, data):
    flags, stop = TOOLS[tool]
    words = data.draw(st.lists(st.sampled_from(flags.split()) | WORDS, max_size=5))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [tool, *words, *stop])
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    assert ended.value.code in (0, 1, 2), ended.value.code
    text = errors.getvalue()
    assert "Traceback" not in text
    if ended.value.code == 1:
        assert "Fix: " in text, text


@pytest.mark.parametrize("tool", ["convert_weights", "verify_weights", "describe_checkpoint"])
def test_a_file_named_like_the_end_of_the_flags_is_refused(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [tool, "--", "--"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    assert ended.value.code == 2 and "Fix: write a file of this name as ./--" in capsys.readouterr().err
