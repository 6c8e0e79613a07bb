"""What a run is asked for: taken from parsed flags once, and never changed."""

import argparse
from dataclasses import FrozenInstanceError, fields

import pytest

from gw_detectron.errors import ConfigError
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.run import RunRequest
from gw_detectron.workbench.run.request import DatasetFlags


def test_a_request_takes_only_its_own_flags():
    flags = argparse.Namespace(
        config_file="a.yaml",
        resume=True,
        num_gpus=0,
        train_json="a.json",
        dist_url="tcp://",
        fun=1,
    )

    request = RunRequest.from_flags(flags)

    data = DatasetFlags(train_json="a.json")
    assert request == RunRequest(
        config_file="a.yaml", resume=True, num_gpus=0, data=data
    )


def test_the_parser_has_all_flags_of_a_request():
    flags = vars(get_parser().parse_args([]))
    own = [field.name for field in fields(RunRequest) if field.name != "data"]
    for name in own + [field.name for field in fields(DatasetFlags)]:
        assert name in flags


@pytest.mark.parametrize(
    ("given", "opts"),
    [
        (["--", "SEED", "1"], ("SEED", "1")),
        # which reading the config refuses
        (
            ["SEED", "1", "--", "X"],
            ("SEED", "1", "--", "X"),
        ),
    ],
)
def test_only_the_first_separator_that_argparse_keeps_is_left_out(given, opts):
    args = get_parser().parse_args(given)
    assert RunRequest.from_flags(args).opts == opts


def test_a_request_is_frozen():
    request = RunRequest()
    with pytest.raises(FrozenInstanceError):
        request.resume = True
    with pytest.raises(FrozenInstanceError):
        request.data.dataset = "table"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"val_fraction": 0.1}, "--train-json"),
        ({"val_json": __file__}, "--val-images"),
        ({"train_json": __file__, "train_images": "."}, "--val-json or --val-fraction"),
        (
            {"train_json": __file__, "train_images": ".", "val_fraction": 1.0},
            r"--val-fraction \(1.0\)",
        ),
        ({"datasets": "d.yaml", "val_fraction": 0.1}, "--val-fraction"),
    ],
)
def test_flags_of_datasets_that_do_not_fit(flags, named):
    with pytest.raises(ConfigError, match=named):
        DatasetFlags(**flags).read()
