"""Training iterations of networks, at sizes of no interest."""

import pytest
import torch

from benchmarks import MODELS, ModelSettings, Sizes, benchmark_model, models_with, planned_model, summary, variants
from benchmarks import model as model_file
from benchmarks.model import PAPER, Variant
from benchmarks.networks import classifier, detector, made_up_batch
from benchmarks.providers import PRECISIONS
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.model_zoo import get_config, list_configs

CPU = torch.device("cpu")
SIZES = Sizes(batch=2, image=32, detector_batch=2, detector_image=64)
DEMO = "quick_schedules/mask_rcnn_R_18_FPN_{}_demo.yaml"


def whitening_layers(positions: str, architecture: str = "R-50") -> int:
    built = classifier(architecture, "BN", "GW", positions, SIZES, PRECISIONS["fp32"], CPU)
    return sum(isinstance(module, GroupWhitening2d) for module in built.model.modules())


def test_networks_have_the_papers_number_of_whitening_layers():
    counts = {positions: whitening_layers(positions) for positions in ("S1", "S1-B2", "S1-B12", "ALL")}
    assert counts == {"S1": 1, "S1-B2": 17, "S1-B12": 33, "ALL": 53}  # supplement, section 6.2; R-50 has 53 norms


def test_the_papers_ratios():
    ratios = {name: f"{PAPER['R-50'][name] / PAPER['R-50']['BN'] - 1:.1%}" for name in PAPER["R-50"]}
    assert ratios["GW-S1-B1"] == "23.6%" and ratios["GW-S1-B2"] == "22.7%" and ratios["GW-S1-B12"] == "40.6%"
    assert ratios["BW-S1-B2"] == "31.3%" and ratios["GW-ALL"] == "90.0%"
    assert all(set(of_model) <= set(MODELS[model]) for model, of_model in PAPER.items())


def test_every_detector_has_a_shipped_config():
    configs = [variant.config for of_model in MODELS.values() for variant in of_model.values() if variant.config]
    assert len(configs) == 3 and set(configs) <= set(list_configs())


def test_each_model_is_a_multiple_of_its_own_first_variant(monkeypatch):
    classifiers = {"BN": Variant("BN"), "GN": Variant("GN"), "GW-S1-B2": Variant("BN", "GW", "S1-B2")}
    detectors = {norm: Variant(config=DEMO.format(norm)) for norm in ("BN", "GW")}
    unknown = {"GW-S1": Variant("BN", "NoSuchNorm", "S1")}
    monkeypatch.setattr(model_file, "MODELS", {"R-18": classifiers | unknown, "small_detector": detectors})
    settings = ModelSettings(CPU, ["R-18", "small_detector"], ["GW", "GW-S1", "GW-S1-B2"], "fp32", SIZES, repeats=1)
    table = benchmark_model(settings, "the command")
    rows = {(row["model"], row["variant"]): row for row in table.rows}
    assert list(rows) == [
        ("R-18", "BN"),
        ("R-18", "GW-S1-B2"),
        ("R-18", "GW-S1"),
        ("small_detector", "BN"),
        ("small_detector", "GW"),
    ]
    for (model, variant), row in rows.items():
        assert set(row) <= set(table.columns.all)
        if variant == "GW-S1":
            assert "unknown norm 'NoSuchNorm'" in row["note"] and "to_bn" not in row
            continue
        base = rows[model, "BN"]
        assert row["to_bn"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert row["saved_to_bn"] == pytest.approx(row["saved_mib"] / base["saved_mib"])
        assert (row["batch"], row["image"]) == ("2", "32x32" if model == "R-18" else "64x85")
    assert rows["R-18", "GW-S1-B2"]["saved_to_bn"] != 1
    assert "unknown norm 'NoSuchNorm'" in summary(table)
    plan = planned_model(settings)
    assert plan.kind == table.kind and plan.header.items() <= table.header.items()
    for planned, measured in zip(plan.rows, table.rows, strict=True):
        assert [planned[name] for name in plan.columns.key] == [measured[name] for name in plan.columns.key]
        assert all((name in planned) == (name in measured) for name in plan.columns.watched)


def test_every_iteration_of_a_detector_does_the_same():
    built = detector(DEMO.format("GW"), SIZES, PRECISIONS["fp32"], CPU)
    regions = []
    built.model.roi_heads.mask_head.register_forward_pre_hook(lambda module, args: regions.append(len(args[0])))
    before = {name: value.clone() for name, value in built.model.named_parameters()}
    losses = [built.forward().item() for _ in range(2)]
    built.step.run()
    assert losses[0] == losses[1]
    assert all(torch.equal(value, before[name]) for name, value in built.model.named_parameters())
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in built.model.parameters())
    # as many regions as the mask head can have: a quarter of 64 for each of the two images
    assert regions == [2 * 16] * 3


def test_made_up_boxes_and_masks_lie_in_their_image():
    batch = made_up_batch(get_config(DEMO.format("GW")), SIZES)
    assert len(batch) == 2
    for record in batch:
        assert record["image"].shape == (3, 64, 85) and record["image"].dtype == torch.uint8
        boxes = record["instances"].gt_boxes
        assert boxes.area().min() > 0
        assert boxes.tensor.min() >= 0 and boxes.inside_box((64, 85)).all()
        outlines = record["instances"].gt_masks.get_bounding_boxes()
        assert torch.allclose(outlines.tensor, boxes.tensor)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_weights_stay_in_every_precision(precision):
    built = classifier("R-18", "BN", "GW", "S1-B2", SIZES, PRECISIONS[precision], CPU)
    before = [value.clone() for value in built.model.parameters()]
    for _ in range(2):
        built.step.run()
    assert all(torch.equal(now, then) for now, then in zip(built.model.parameters(), before, strict=True))
    assert torch.isfinite(built.forward())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": ["R-49"]}, "unknown model 'R-49'; allowed are R-50"),
        ({"variants": ["S1"]}, "unknown variant 'S1'; allowed are BN"),
        ({"precision": "bf16-pure"}, "unknown dtype 'bf16-pure'; allowed are fp32, bf16, fp16"),
        ({"repeats": 0}, "repeats 0"),
        ({"sizes": Sizes(batch=0)}, "batch 0"),
        ({"sizes": Sizes(image=31)}, "image 31: give at least 32"),
        ({"sizes": Sizes(detector_image=63)}, "detector_image 63: give at least 64"),
        ({"sizes": Sizes(batch=1, image=32)}, "batch 1 with image 32: .* give at least batch 2 or image 33"),
        (
            {"models": ["R-101"], "variants": ["GW-S1"]},
            "none of .* GW-S1: .* R-101 has BN, GN, BW-S1-B2, GW-S1-B2",
        ),
        ({"models": ["R-50", "R-101"], "variants": ["GW-S1"]}, "model R-101 has none of"),
        ({"models": ["R-101"], "variants": ["BN", "GW-S1"]}, "variant GW-S1 is one of no model .*: R-101 has BN, GN"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelSettings(CPU, **arguments)


def test_the_smallest_sizes_can_be_trained():
    sizes = Sizes(batch=1, image=33, detector_batch=1, detector_image=64)
    ModelSettings(CPU, sizes=sizes)
    for iteration in (
        classifier("R-18", "BN", "GW", "ALL", sizes, PRECISIONS["fp32"], CPU),
        detector(DEMO.format("GW"), sizes, PRECISIONS["fp32"], CPU),
    ):
        iteration.step.run()
        assert iteration.forward().isfinite()


def test_models_that_have_a_variant():
    assert models_with(["GW-ALL"]) == ["R-50"]
    assert models_with(["GW-ALL", "FrozenBN"]) == ["R-50", "mask_rcnn_R-50"]
    assert models_with(None) == list(MODELS)


def test_all_variants_are_named():
    assert {"BN", "GN", "BW-S1-B2", "GW-S1-B2", "GW-ALL", "FrozenBN", "GW"} <= set(variants())
