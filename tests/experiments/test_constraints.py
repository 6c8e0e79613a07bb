"""Constraints against the rank of their Jacobian, and shapes of norm inputs against a real forward pass."""

import csv
import json

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
        rows, columns = x.shape
        identity = torch.eye(rows, dtype=x.dtype)
        white = x @ x.T - columns * identity
        return torch.cat([x.sum(1), white.flatten()])

    rank = 0
    for rows, columns in blocks:
        x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
        x -= x.mean(1, keepdim=True)
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        solution = columns**0.5 * u @ v
        assert equations(solution).abs().max() < 1e-10

        derivative = jacobian(equations, solution).flatten(1)
        rank += torch.linalg.matrix_rank(derivative).item()
    return rank


def test_the_number_of_constraints_is_the_rank_of_their_jacobian():
    standardized = batch_constraints(5, 12)
    rows = [(1, 12)] * 5
    assert standardized.number == independent_equations(*rows)

    whitened = batch_constraints(5, 12, 5)
    assert whitened.number == independent_equations((5, 12))

    in_groups = batch_constraints(5, 12, 2)
    assert in_groups.number == independent_equations((2, 12), (2, 12), (1, 12))

    normalized = group_constraints(24, 2, 4, whiten=False)
    rows = [(1, 6)] * 8
    assert normalized.number == independent_equations(*rows)

    whitened = group_constraints(24, 2, 4, whiten=True)
    groups = [(4, 6)] * 2
    assert whitened.number == independent_equations(*groups)


def test_shapes_are_those_of_a_real_batch():
    cfg = read_config(str(CONFIG), ["MODEL.DEVICE", "cpu"])
    model = build_model(cfg)
    seen = {}

    def record(layer, args):
        seen[names[layer]] = tuple(args[0].shape)

    names = {model.get_submodule(row.layer): row.layer for row in norm_rows(model)}
    for layer in names:
        layer.register_forward_pre_hook(record)
    model.backbone(torch.zeros(2, 3, 64, 96))
    assert len(seen) > 20

    rows = norm_shapes(cfg, 50, 90, 2)  # rounded up to multiples of 32

    shapes = {row.layer: row.shape for row in rows}
    assert shapes | seen == shapes
    assert all(shapes.values())  # every head is reached


def test_the_command_writes_table_figure_and_findings(tmp_path, capsys):
    words = [
        *("constraints", "--config-file", str(CONFIG), "--output", str(tmp_path)),
        *("--batch-size", "64", "--examples", "640", "--height", "64", "--width", "64"),
    ]
    main(get_parser().parse_args(words))

    assert "NO   every layer of the model is feasible" in capsys.readouterr().out
    assert (tmp_path / "constraints.png").stat().st_size > 1000
    settings = json.loads((tmp_path / "constraints.json").read_text())["settings"]
    assert settings["height"] == 64

    with open(tmp_path / "constraints.csv", newline="") as file:
        table = list(csv.DictReader(file))
    # d = 256, m = 64, g = 16: 2d, d(d+3)/2, 2gm, mg(g+3)/2
    expected = {"BN": "512", "BW": "33152", "GN": "2048", "GW": "9728"}
    of_norms = {row["norm"]: row for row in table if "=" in row["layer"]}
    assert {norm: of_norms[norm]["constraints"] for norm in expected} == expected
    assert of_norms["GW"]["over_examples"] == "97280"
    of_layers = {row["layer"]: row["remark"] for row in table}
    assert "64 rows over 32" in of_layers["backbone.bottom_up.res5.0.conv2.norm"]
