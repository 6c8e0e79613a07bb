"""A run within a number of minutes: the length that measured seconds allow, and what stays of the timing."""

import re

import pytest

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.run import RunRequest, prepare
from gw_detectron.workbench.run import train as runs
from gw_detectron.workbench.run.timing import budget_of, few_passes

from ...photos import photo_names, write_photos
from ...tiny_run import words


@pytest.mark.parametrize(
    ("minutes", "step", "evaluation", "iterations", "evaluations"),
    [
        (10, 0.5, 10, 1040, 5),
        (10, 0.5, 100, 940, 1),
        (60, 0.5, 300, 5640, 2),
        (1, 1, 30, 27, 1),
    ],
)
def test_iterations_and_evaluations_fill_the_time(
    minutes, step, evaluation, iterations, evaluations
):
    budget = budget_of(minutes, step, evaluation)
    assert budget.evaluations == evaluations
    assert budget.iterations == iterations


def test_too_little_time_is_refused():
    with pytest.raises(ConfigError, match=r"--minutes \(1\).*give 2.5 or more"):
        budget_of(1, 4, 60)


def test_seconds_are_written_in_full():
    reason = budget_of(60, 1.234, 1834).reason
    assert reason == "60 min, an iteration takes 1.2 s, an evaluation 1800 s"


@pytest.mark.parametrize(("step", "evaluation"), [(11, 20), (4, 60), (1, 1), (30, 2)])
def test_the_minutes_that_are_named_are_enough(step, evaluation):
    with pytest.raises(ConfigError) as refused:
        budget_of(0.1, step, evaluation)
    named = re.search(r"give ([\d.]+) or more", str(refused.value))

    budget = budget_of(float(named[1]), step, evaluation)

    assert budget.iterations >= 20


@pytest.mark.parametrize(
    ("minutes", "epoch", "enough"),
    [(8, 77.5, 41), (50, 77.5, None), (8, 9, None), (8, 5000, 88)],
)
def test_a_length_in_which_nothing_is_learned_is_a_warning(minutes, epoch, enough):
    step, evaluation = 8, 220
    warning = few_passes(budget_of(minutes, step, evaluation), step, evaluation, epoch)

    assert bool(warning) is (enough is not None)
    if enough:
        assert f"give {enough} or more" in warning
        better = budget_of(enough, step, evaluation)
        assert not few_passes(better, step, evaluation, epoch)


def test_less_than_half_of_the_recipe_is_a_warning():
    budget = budget_of(8, 0.74, 33)
    warning = few_passes(budget, 0.74, 33, 109.5, usual=2847)
    assert "iterations are 4.8 passes" in warning
    assert "half of the 2,847 that --auto takes" in warning
    assert "Fix: give 47 or more" in warning

    longer = budget_of(24, 0.74, 33)
    assert not few_passes(longer, 0.74, 33, 109.5, usual=2847)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused_before_the_timing(command, minutes):
    with pytest.raises(ConfigError, match=r"--minutes \(.*not a time"):
        prepare(RunRequest.from_flags(command(f"--minutes={minutes}")))


@pytest.fixture
def command(tmp_path):
    write_photos(tmp_path, photo_names(8))
    data = [
        *("--train-json", f"{tmp_path}/annotations.json"),
        *("--train-images", f"{tmp_path}/photos"),
        *("--val-fraction", "0.3", "--num-gpus", "0"),
    ]

    def parsed(*flags):
        run = words(tmp_path / "run", *flags, *data)
        for key in (
            "SOLVER.MAX_ITER",
            "SOLVER.STEPS",
            "SOLVER.CHECKPOINT_PERIOD",
            "TEST.EVAL_PERIOD",
        ):
            place = run.index(key)
            run[place : place + 2] = []
        return get_parser().parse_args(run)

    return parsed


def test_a_run_within_minutes_and_its_resumption(tmp_path, command, monkeypatch):
    """The steps that are timed leave nothing behind; a resumed run keeps its length."""
    # with the losses, an evaluation takes twice as long
    monkeypatch.setattr(runs, "evaluation_seconds", lambda _: 1.0)
    monkeypatch.setattr(runs, "step_seconds", _timed)
    main(command("--minutes", "0.44"))

    run = tmp_path / "run"
    cfg = read_config(run / "config.yaml")
    assert cfg.SOLVER.MAX_ITER == 21
    assert cfg.TEST.EVAL_PERIOD == 11
    assert cfg.SOLVER.CHECKPOINT_PERIOD == 2
    assert list(cfg.SOLVER.STEPS) == [15, 18]
    assert len(list(run.glob("events.*"))) == 1
    assert (run / "last_checkpoint").read_text() == "model_final.pth"
    assert "--minutes: SOLVER.MAX_ITER 21: 0.44 min" in (run / "log.txt").read_text()

    monkeypatch.setattr(runs, "step_seconds", pytest.fail)
    main(command("--minutes", "0.44", "--resume"))
    assert read_config(run / "config.yaml").SOLVER.MAX_ITER == 21


def _timed(trainers, _):
    for trainer in trainers.values():
        trainer.model.requires_grad_(False)  # what the run must not inherit
    return dict.fromkeys(trainers, 1.0)


@pytest.mark.parametrize("other", [("--epochs", "3"), ("SOLVER.MAX_ITER", "9")])
def test_two_lengths_are_refused(command, other):
    args = command("--minutes", "5")
    if other[0] == "--epochs":
        args.epochs = 3.0
    else:
        args.opts += other
    with pytest.raises(ConfigError, match=f"--minutes: given together with {other[0]}"):
        main(args)
