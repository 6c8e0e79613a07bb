"""gw-detectron export: the model is loaded strictly, and the flags reach the export."""

import json
import shutil

import pytest
import safetensors
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from PIL import Image

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, WeightsError
from gw_detectron.weights import (
    RUN_RECORD_KEY,
    Preprocessing,
    RunRecord,
    load_checkpoint,
    load_model,
    open_checkpoint,
)
from gw_detectron.workbench.commands.export import get_parser, main

from ...tiny_run import CONFIG

SMALL = [
    "MODEL.FPN.OUT_CHANNELS",
    32,
    "MODEL.ROI_BOX_HEAD.FC_DIM",
    16,
    "MODEL.ROI_BOX_HEAD.NUM_CONV",
    1,
]


@pytest.fixture(scope="module")
def cfg():
    cfg = read_config("quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml")
    cfg.merge_from_list(SMALL)
    return cfg


@pytest.fixture(scope="module")
def trained(cfg, tmp_path_factory):
    """A detector and its weights file."""
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    folder = tmp_path_factory.mktemp("trained")
    DetectionCheckpointer(model, str(folder)).save("model")
    return model, folder / "model.pth"


def with_weights(cfg, weights):
    cfg = cfg.clone()
    cfg.MODEL.WEIGHTS = str(weights)
    return cfg


def export(*words):
    main(get_parser().parse_args([*map(str, words), *map(str, SMALL)]))


def test_weights_without_a_needed_part_are_refused(cfg, trained, tmp_path):
    tensors = {
        f"backbone.bottom_up.{k}": v
        for k, v in trained[0].backbone.bottom_up.state_dict().items()
    }
    torch.save({"model": tensors}, tmp_path / "resnet.pth")
    with pytest.raises(
        WeightsError,
        match=r"24 tensors are missing .*\(backbone.fpn_lateral2.weight, .*--no-fpn",
    ):
        load_model(with_weights(cfg, tmp_path / "resnet.pth"), needed="backbone.")
    loaded = load_model(
        with_weights(cfg, tmp_path / "resnet.pth"), needed="backbone.bottom_up."
    ).backbone.bottom_up
    assert torch.equal(
        loaded.res5[1].conv2.weight, trained[0].backbone.bottom_up.res5[1].conv2.weight
    )
    torch.save(
        {"model": {k: v for k, v in tensors.items() if "res4.1" not in k}},
        tmp_path / "part.pth",
    )
    with pytest.raises(WeightsError, match="Missing: backbone.bottom_up.res4.1"):
        load_model(
            with_weights(cfg, tmp_path / "part.pth"), needed="backbone.bottom_up."
        )
    with pytest.raises(ConfigError, match="no weights"):
        load_model(with_weights(cfg, ""))


def test_a_backbone(trained, tmp_path, capsys, quick_file):
    quick_file()
    words = (trained[1], "--config-file", CONFIG, "--output", tmp_path / "out")
    export(*words, "--backbone")
    assert "differ from the model's by at most" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["source"] == {"config": str(CONFIG), "weights": str(trained[1])}
    assert list(report["outputs"]) == ["p2", "p3", "p4", "p5", "p6"]
    export(*words, "--backbone", "--no-fpn")
    assert (
        list(json.loads((tmp_path / "out" / "parity.json").read_text())["outputs"])[-1]
        == "res5"
    )
    with pytest.raises(ConfigError, match="--one-image: only works without --backbone"):
        export(*words, "--backbone", "--one-image")
    with pytest.raises(ConfigError, match="--no-fpn: only works with --backbone"):
        export(*words, "--no-fpn")


def test_mixed_statistics_are_exported(trained, tmp_path, quick_file):
    quick_file()
    output = tmp_path / "out"
    flags = ("--config-file", CONFIG, "--output", output, "--backbone")

    export(trained[1], *flags, "--mix", "0.5")

    report = json.loads((output / "parity.json").read_text())
    mixed = [norm for norm in report["norm_layers"] if norm.startswith("MixBN:")]
    assert mixed == ["MixBN:alpha=0.5,mean=0.5,eps=1e-05"]
    assert report["source"]["mix"] == "0.5"


@pytest.mark.parametrize("parts", [[], ["--no-fpn"]])
def test_the_weights_of_a_backbone_are_loaded_into_another_detector(
    cfg, trained, tmp_path, parts
):
    model, file = trained
    words = (file, "--config-file", CONFIG, "--output", tmp_path / "out")

    export(*words, "--backbone", "--format", "safetensors", *parts)
    weights = tmp_path / "out" / "backbone.safetensors"
    other = build_model(cfg)
    report = load_checkpoint(other, open_checkpoint(weights))

    assert not report.missing and not report.unexpected
    needed = model.backbone.bottom_up if parts else model.backbone
    loaded = (other.backbone.bottom_up if parts else other.backbone).state_dict()
    for name, tensor in needed.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    record = open_checkpoint(weights).network
    assert record.preprocessing == Preprocessing.from_config(cfg)
    with safetensors.safe_open(weights, "pt") as opened:
        assert opened.metadata()["format"] == "pt"


def test_the_weights_of_a_backbone_fit_no_other_norm(cfg, trained, tmp_path):
    words = (trained[1], "--config-file", CONFIG, "--output", tmp_path / "out")
    export(*words, "--backbone", "--format", "safetensors")
    weights = tmp_path / "out" / "backbone.safetensors"
    other = cfg.clone()
    other.merge_from_list(["MODEL.RESNETS.WHITEN_NORM", "GW:groups=32"])

    with pytest.raises(WeightsError, match="GW:groups=32"):
        load_model(with_weights(other, weights), needed="backbone.")


def test_a_detector_is_not_exported_as_weights(trained, tmp_path):
    words = (trained[1], "--config-file", CONFIG, "--output", tmp_path / "out")

    with pytest.raises(ConfigError, match="--format safetensors: .* add --backbone"):
        export(*words, "--format", "safetensors")

    assert not (tmp_path / "out").exists()


def test_flags_and_the_best_weights_of_a_run_reach_the_export(
    cfg, trained, tmp_path, monkeypatch
):
    own, given = cfg.clone(), {}
    own.INPUT.PERCENTILES = (1.0, 99.0)
    (tmp_path / "config.yaml").write_text(own.dump())
    for name in ("model_final.pth", "model_best.pth"):
        shutil.copy(trained[1], tmp_path / name)
    report = {
        "worst": {},
        "worst_relative": 0.0,
        "detections_compared": 1,
        "unmatched": 0,
        "file": "x",
    }
    for name in ("backbone", "detector"):
        take = lambda *args, **options: given.update(options, args=args) or report  # noqa: E731
        monkeypatch.setattr(
            f"gw_detectron.workbench.commands.export.export_{name}", take
        )
    export(tmp_path, "--output", tmp_path / "out", "--one-image", "--paste-masks")
    assert (
        given["one_image"]
        and given["paste_masks"]
        and tuple(given["percentiles"]) == (1.0, 99.0)
    )
    assert given["source"]["weights"] == str(tmp_path / "model_best.pth")
    export(
        tmp_path,
        "--output",
        tmp_path / "out",
        "MODEL.WEIGHTS",
        tmp_path / "model_final.pth",
    )
    assert given["source"]["weights"] == str(tmp_path / "model_final.pth")
    export(tmp_path, "--output", tmp_path / "out", "--backbone", "--no-fpn")
    assert not given["fpn"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_detector_with_the_classes_of_its_run(
    cfg, trained, tmp_path, small_dataset, capsys, quick_file, moved
):
    data = small_dataset
    entry = {
        "json": str(data / "annotations" / "instances_val.json"),
        "images": str(data / "val"),
    }
    if moved:
        classes = {number: f"cell {number}" for number in (1, 2, 3, 5, 8, 13)}
    else:
        listed = json.loads((data / "annotations" / "instances_val.json").read_text())[
            "categories"
        ]
        classes = {each["id"]: each["name"] for each in listed}
        (tmp_path / "datasets.yaml").write_text(
            json.dumps({"val": {"export_test_val": entry}})
        )
    content, weights = torch.load(trained[1], weights_only=True), tmp_path / "own.pth"
    torch.save(
        content
        | ({RUN_RECORD_KEY: RunRecord("", 1, classes).state_dict()} if moved else {}),
        weights,
    )
    own = cfg.clone()
    own.DATASETS.TEST = ("export_test_val",)
    (tmp_path / "config.yaml").write_text(own.dump())
    Image.effect_noise((80, 60), 90).convert("RGB").save(tmp_path / "image.png")
    export(
        *(
            "--config-file",
            tmp_path / "config.yaml",
            "--output",
            tmp_path / "out",
            "--image",
            tmp_path / "image.png",
        ),
        *("MODEL.WEIGHTS", weights, "TEST.DETECTIONS_PER_IMAGE", "7"),
    )
    assert "detections compared, 0 without counterpart" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert report["detections"] == 7
    assert (
        dict(zip(report["category_ids"], report["class_names"], strict=True)) == classes
    )
