"""Constraints against the rank of their Jacobian, and shapes of norm inputs against a real forward pass."""

import csv
import json

import numpy as np
import torch
from detectron2.modeling import build_model
from torch.autograd.functional import jacobian

from experiments.__main__ import get_parser, main
from experiments.feasibility import batch_constraints, group_constraints
from experiments.norm_shapes import norm_shapes
from gw_detectron.config import read_config
from gw_detectron.norms.listing import norm_rows

from ..tiny_run import CONFIG


def independent_equations(*blocks: tuple[int, int]) -> int:
    """Rank of the equations "centered and white" for matrices of these sizes, at a random solution."""
    generator = torch.Generator().manual_seed(0)

    def equations(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [x.sum(1), (x @ x.T - x.shape[1] * torch.eye(len(x), dtype=x.dtype)).flatten()]
        )

    rank = 0
    for rows, columns in blocks:
        x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        x = x - x.mean(1, keepdim=True)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        solution = columns**0.5 * u @ v
        assert equations(solution).abs().max() < 1e-10
        rank += np.linalg.matrix_rank(jacobian(equations, solution).flatten(1).numpy())
    return rank


def test_the_number_of_constraints_is_the_rank_of_their_jacobian():
    d, m, g = 5, 12, 4
    assert batch_constraints(d, m).number == independent_equations(*[(1, m)] * d)
    assert batch_constraints(d, m, d).number == independent_equations((d, m))
    assert batch_constraints(d, m, 2).number == independent_equations((2, m), (2, m), (1, m))
    d, m = 24, 2
    assert group_constraints(d, m, g, whiten=False).number == independent_equations(
        *[(1, 6)] * g * m
    )
    assert group_constraints(d, m, g, whiten=True).number == independent_equations(
        *[(g, 6)] * m
    )


def test_shapes_are_those_of_a_real_batch():
    cfg = read_config(str(CONFIG), ["MODEL.DEVICE", "cpu"])
    model, seen = build_model(cfg), {}
    for row in norm_rows(model):
        record = lambda module, args, name=row.layer: seen.update({name: tuple(args[0].shape)})  # noqa: E731
        model.get_submodule(row.layer).register_forward_pre_hook(record)
    model.backbone(torch.zeros(2, 3, 64, 96))
    rows = norm_shapes(cfg, 50, 90, 2)  # rounded up to multiples of 32
    assert (
        len(seen) > 20 and {row.layer: row.shape for row in rows if row.layer in seen} == seen
    )
    assert all(row.shape for row in rows)  # every head is reached


def test_the_command_writes_table_figure_and_findings(tmp_path, capsys):
    words = [
        "constraints",
        "--output",
        str(tmp_path),
        "--batch-size",
        "64",
        "--examples",
        "640",
    ]
    main(
        get_parser().parse_args(
            [*words, "--config-file", str(CONFIG), "--height", "64", "--width", "64"]
        )
    )
    assert "NO   every layer of the model is feasible" in capsys.readouterr().out
    assert (tmp_path / "constraints.png").stat().st_size > 1000
    assert json.loads((tmp_path / "constraints.json").read_text())["settings"]["height"] == 64
    with open(tmp_path / "constraints.csv", newline="") as file:
        rows = {
            row["norm"] if "=" in row["layer"] else row["layer"]: row
            for row in csv.DictReader(file)
        }
    # d = 256, m = 64, g = 16: 2d, d(d+3)/2, 2gm, mg(g+3)/2
    assert [int(rows[name]["constraints"]) for name in ("BN", "BW", "GN", "GW")] == [
        512,
        33152,
        2048,
        9728,
    ]
    assert int(rows["GW"]["over_examples"]) == 97280
    assert rows["backbone.bottom_up.res5.0.conv2.norm"]["remark"].startswith(
        "infeasible: whitening 64 rows over 32"
    )
