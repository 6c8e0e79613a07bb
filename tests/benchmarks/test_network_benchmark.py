"""Network benchmark at tiny sizes."""

import pytest
import torch

from benchmarks import network_benchmark, timing
from benchmarks.network_benchmark import (
    MODELS,
    PAPER,
    NetworkSettings,
    all_variants,
    models_with,
    plan_networks,
    run_networks,
)
from benchmarks.networks import Sizes, Variant, backbone, classifier, detector, random_batch
from benchmarks.providers import PRECISIONS
from gw_detectron.errors import UserError
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.model_zoo import get_config, list_configs

CPU = torch.device("cpu")
SIZES = Sizes(batch_size=2, image_size=32, detector_batch=2, detector_image=64)
DEMO = "quick_schedules/mask_rcnn_R_18_FPN_{}_demo.yaml"


@pytest.mark.parametrize(("positions", "count"), [("S1", 1), ("S1-B2", 17), ("S1-B12", 33), ("ALL", 53)])
def test_networks_have_the_papers_number_of_whitening_layers(positions, count):
    built = classifier("R-50", Variant("BN", "GW", positions), SIZES, PRECISIONS["fp32"], CPU)
    found = sum(isinstance(module, GroupWhitening2d) for module in built.model.modules())
    assert found == count  # supplement, section 6.2; R-50 has 53 norms


def test_models_variants_and_the_papers_ratios():
    ratios = {name: f"{PAPER['R-50'][name] / PAPER['R-50']['BN'] - 1:.1%}" for name in PAPER["R-50"]}
    assert ratios["GW-S1-B1"] == "23.6%" and ratios["GW-S1-B2"] == "22.7%" and ratios["GW-S1-B12"] == "40.6%"
    assert ratios["BW-S1-B2"] == "31.3%" and ratios["GW-ALL"] == "90.0%"
    assert all(set(times) <= set(MODELS[model]) for model, times in PAPER.items())
    configs = [variant.config for variants in MODELS.values() for variant in variants.values() if variant.config]
    assert set(configs) <= set(list_configs())
    assert models_with(["GW-ALL"]) == ["R-50"]
    assert models_with(["GW-ALL", "FrozenBN"]) == ["R-50", "mask_rcnn_R-50", "R-50-FPN-inference"]
    assert models_with(None) == list(MODELS)
    assert {"BN", "GN", "BW-S1-B2", "GW-S1-B2", "GW-ALL", "FrozenBN", "GW"} <= set(all_variants())


def test_each_model_is_divided_by_its_first_variant(monkeypatch):
    classifiers = {"BN": Variant("BN"), "GN": Variant("GN"), "GW-S1-B2": Variant("BN", "GW", "S1-B2")}
    detectors = {norm: Variant(config=DEMO.format(norm)) for norm in ("BN", "GW")}
    monkeypatch.setattr(network_benchmark, "MODELS", {"R-18": classifiers, "small_detector": detectors})
    monkeypatch.setattr(timing, "WARM_UP", 0)
    settings = NetworkSettings(CPU, ["R-18", "small_detector"], ["GW", "GW-S1-B2"], "fp32", SIZES, repeats=1)
    table = run_networks(settings, "the command")
    rows = {(row["model"], row["variant"]): row for row in table.rows}
    assert list(rows) == [("R-18", "BN"), ("R-18", "GW-S1-B2"), ("small_detector", "BN"), ("small_detector", "GW")]
    for (model, _), row in rows.items():
        assert set(row) <= set(table.columns.all)
        base = rows[model, "BN"]
        assert row["to_bn"] == pytest.approx(row["median_ms"] / base["median_ms"])
        assert row["saved_to_bn"] == pytest.approx(row["saved_mib"] / base["saved_mib"])
        assert (row["batch"], row["image"]) == ("2", "32x32" if model == "R-18" else "64x85")
    assert rows["R-18", "GW-S1-B2"]["saved_to_bn"] != 1
    plan = plan_networks(settings)
    assert plan.kind == table.kind and plan.header.items() <= table.header.items()
    for planned, measured in zip(plan.rows, table.rows, strict=True):
        assert [planned[name] for name in plan.columns.key] == [measured[name] for name in plan.columns.key]
        assert all((name in planned) == (name in measured) for name in plan.columns.watched)


def test_inference_by_torch_and_by_onnx_runtime(monkeypatch):
    variants = {
        "torch": Variant(config=DEMO.format("GW")),
        "ONNX": Variant(config=DEMO.format("GW"), runtime="onnx"),
    }
    monkeypatch.setattr(network_benchmark, "MODELS", {"small": variants})
    built = []

    def recorded(*args, **kwargs):
        built.append(backbone(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(network_benchmark, "_INFERENCE", {"small": recorded})
    settings = NetworkSettings(CPU, ["small"], None, "fp32", SIZES, repeats=1)
    rows = run_networks(settings).rows
    assert [row["variant"] for row in rows] == ["torch", "ONNX"]
    assert all(row["to_bn"] > 0 and "saved_mib" not in row for row in rows)
    by_torch, by_onnx_runtime = (iteration.step.run() for iteration in built)
    for expected, found in zip(by_torch.values(), by_onnx_runtime, strict=True):
        assert torch.allclose(expected, found, atol=1e-4)


def test_inference_of_a_classifier_has_no_graph():
    logits = classifier("R-18", Variant("BN"), SIZES, PRECISIONS["fp32"], CPU, training=False).step.run()["linear"]
    assert logits.shape == (2, 1000) and not logits.requires_grad


def test_all_iterations_of_a_detector_are_equal():
    built = detector(Variant(config=DEMO.format("GW")), SIZES, PRECISIONS["fp32"], CPU)
    regions = []
    built.model.roi_heads.mask_head.register_forward_pre_hook(lambda module, args: regions.append(len(args[0])))
    before = {name: value.clone() for name, value in built.model.named_parameters()}
    losses = [built.forward().item() for _ in range(2)]
    built.step.run()
    assert losses[0] == losses[1]
    assert all(torch.equal(value, before[name]) for name, value in built.model.named_parameters())
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in built.model.parameters())
    # the most regions that the mask head can have: a quarter of 64 for each of the two images
    assert regions == [2 * 16] * 3


def test_random_boxes_and_masks_are_inside_their_image():
    batch = random_batch(get_config(DEMO.format("GW")), SIZES)
    assert len(batch) == 2
    for record in batch:
        assert record["image"].shape == (3, 64, 85) and record["image"].dtype == torch.uint8
        boxes = record["instances"].gt_boxes
        assert boxes.area().min() > 0
        assert boxes.tensor.min() >= 0 and boxes.inside_box((64, 85)).all()
        outlines = record["instances"].gt_masks.get_bounding_boxes()
        assert torch.allclose(outlines.tensor, boxes.tensor)


@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_the_weights_do_not_change(precision):
    built = classifier("R-18", Variant("BN", "GW", "S1-B2"), SIZES, PRECISIONS[precision], CPU)
    before = [value.clone() for value in built.model.parameters()]
    for _ in range(2):
        built.step.run()
    assert all(torch.equal(now, then) for now, then in zip(built.model.parameters(), before, strict=True))
    assert torch.isfinite(built.forward())


def test_the_smallest_sizes_can_be_trained():
    sizes = Sizes(batch_size=1, image_size=33, detector_batch=1, detector_image=64)
    NetworkSettings(CPU, sizes=sizes)
    for iteration in (
        classifier("R-18", Variant("BN", "GW", "ALL"), sizes, PRECISIONS["fp32"], CPU),
        detector(Variant(config=DEMO.format("GW")), sizes, PRECISIONS["fp32"], CPU),
    ):
        iteration.step.run()
        assert iteration.forward().isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": ["R-49"]}, r"--models \('R-49'\): unknown. Fix: use R-50"),
        ({"variants": ["S1"]}, r"--variants \('S1'\): unknown. Fix: use BN"),
        ({"dtype": "bf16-pure"}, r"--dtype \('bf16-pure'\): unknown. Fix: use fp32, bf16, fp16"),
        ({"repeats": 0}, r"--repeats \(0\)"),
        ({"sizes": Sizes(batch_size=0)}, r"--batch-size \(0\)"),
        ({"sizes": Sizes(image_size=31)}, r"--image-size \(31\): too small. Fix: give 32 or more"),
        ({"sizes": Sizes(detector_image=63)}, r"--detector-image \(63\): too small. Fix: give 64 or more"),
        ({"sizes": Sizes(batch_size=1, image_size=32)}, r"--batch-size \(1\) with .* give .* --image-size 33"),
        ({"models": ["R-101"], "variants": ["GW-S1"]}, "has none of GW-S1; R-101 has BN, GN, BW-S1-B2, GW-S1-B2"),
        ({"models": ["R-50", "R-101"], "variants": ["GW-S1"]}, r"--models \('R-101'\): has none of"),
        ({"models": ["R-101"], "variants": ["BN", "GW-S1"]}, r"--variants \('GW-S1'\): no measured model has it"),
    ],
)
def test_bad_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        NetworkSettings(CPU, **arguments)
    assert isinstance(caught.value, UserError)
