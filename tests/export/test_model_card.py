"""Model cards: what the hub reads in them, and that they say nothing that is not recorded."""

import argparse
import json
import re

import pytest
import torch
import yaml
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model

from gw_detectron.checkpoint.records import RUN_RECORD, RunRecord
from gw_detectron.commands.export_flags import add_export_flags, requested_card
from gw_detectron.errors import ConfigError
from gw_detectron.export import EvaluationImages, card_facts, export_backbone, export_detector
from gw_detectron.export.model_card import card_text
from gw_detectron.weights import convert_file

from ..tiny_run import dataset
from ..weights.synthetic import authors_state, make_network
from .tiny_networks import build_detector, detector_config, tiny_backbone

NO_REPORT = {"norm_layers": {}, "outputs": {}, "source": {}}


def front_matter(card):
    """Return the metadata as the hub's own client reads them."""
    return pytest.importorskip("huggingface_hub").ModelCard(card).data


def sections(card):
    return re.findall(r"^## (.*)$", card, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The config of a run and its checkpoint, with its record."""
    cfg = detector_config("mask", SOLVER__STEPS=(2, 3), SOLVER__MAX_ITER=4)
    folder = tmp_path_factory.mktemp("run")
    record = RunRecord(cfg.dump(), 7)
    checkpointer = DetectionCheckpointer(build_model(cfg), str(folder))
    checkpointer.add_checkpointable(RUN_RECORD, record)
    checkpointer.save("model", iteration=3)
    cfg.MODEL.WEIGHTS = str(folder / "model.pth")
    return cfg


def test_the_card_of_a_measured_detector(trained, tmp_path, run_readme):
    facts = card_facts(trained, "shapes", "apache-2.0")
    with dataset(tmp_path / "data"):
        images = EvaluationImages.load(trained, "gw_synthetic_val", 2)
        model, out = build_detector("mask", "GW:groups=4"), tmp_path / "out"
        names = ["a|b", *"cdefg"]
        export_detector(
            model, out, file_format="torchscript", evaluation=images, class_names=names, card=facts, source={}
        )
    card, report = (out / "README.md").read_text(), json.loads((out / "parity.json").read_text())
    data = front_matter(card)
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "pytorch", "image-segmentation")
    assert data.datasets == ["gw_synthetic_train"] and data.tags == ["detectron2", "group-whitening", "torchscript"]
    assert data.model_name == "shapes"
    found = {(result.task_type, result.metric_name): result.metric_value for result in data.eval_results}
    exported = report["accuracy"]["exported"]
    assert found == {
        ("object-detection", "box AP on 2 images"): pytest.approx(exported["bbox"], abs=1e-3),
        ("image-segmentation", "mask AP on 2 images"): pytest.approx(exported["segm"], abs=1e-3),
    }
    assert {result.dataset_name for result in data.eval_results} == {"gw_synthetic_val"}
    assert sections(card) == ["Model", "Training", "Results", "model.ts", "Limits"]
    assert "| Network | Mask R-CNN, ResNet-18 |" in card and r"| Classes | a\|b, c, d, e, f, g |" in card
    assert "| Schedule | 4 of 4 iterations of 4 images, learning rate 0.05, `WarmupMultiStepLR` at 2, 3 |" in card
    assert "| Processes | 1 |" in card and "| Parts |" not in card
    assert "| Seed | 7 |" in card and f"torch {torch.__version__}" in card and "random initial values" in card
    assert "2 images of `gw_synthetic_val`" in card and "at most 12 detections" in card
    assert "boxes" in run_readme(out)  # the code that loads the file


def test_the_card_of_a_backbone_states_what_is_unknown(trained, tmp_path, normalization):
    weights = tmp_path / "model.pth"
    torch.save({"model": build_model(trained).state_dict()}, weights)
    cfg = trained.clone()
    cfg.MODEL.WEIGHTS = str(weights)
    facts = card_facts(cfg, "shapes")
    assert "training" not in facts
    export_backbone(
        tiny_backbone("BN", "BN", None), tmp_path / "out", normalization, file_format="safetensors", card=facts
    )
    card = (tmp_path / "out" / "README.md").read_text()
    data = front_matter(card)
    assert (data.license, data.datasets, data.eval_results) == (None, None, None)
    assert (data.library_name, data.pipeline_tag) == ("gw_detectron", "image-feature-extraction")
    assert "group-whitening" not in data.tags
    assert "ResNet-18 of a Mask R-CNN, without its heads" in card
    for unknown in (
        "| License | not stated |",
        "unknown: the weights have no record of a training run",
        "not measured",
    ):
        assert unknown in card


def test_the_front_matter_alone_is_yaml_of_the_documented_keys(trained):
    text = card_text({**NO_REPORT, "card": card_facts(trained, "shapes")}, "onnx", "# usage\n")
    _, front, body = text.split("---\n", 2)
    assert set(yaml.safe_load(front)) == {"library_name", "pipeline_tag", "tags", "datasets"}
    assert body.startswith("\n# shapes\n")


def test_an_ap_of_nothing_found_is_not_a_result(trained):
    accuracy = {"dataset": "d", "images": 1, "model": {"bbox": float("nan")}, "exported": {"bbox": float("nan")}}
    report = {**NO_REPORT, "detections": 3, "accuracy": accuracy, "card": card_facts(trained, "shapes")}
    text = card_text(report, "onnx", "# usage\n")
    assert "model-index" not in text and "Nothing was found in 1 images of `d`." in text


def test_origin_and_license_of_published_weights(trained, tmp_path, monkeypatch):
    torch.save(authors_state(make_network("R-18", "S1-B2")), tmp_path / "authors.pth")
    convert_file(tmp_path / "authors.pth", tmp_path / "R-18.pkl", norm="GW")
    cfg = trained.clone()
    cfg.MODEL.WEIGHTS = str(tmp_path / "R-18.pkl")
    facts = card_facts(cfg, "shapes")
    assert facts["converted_from"]["source"] == "authors.pth" and facts["weights_license"] is None
    monkeypatch.setattr("gw_detectron.export.model_card.open_checkpoint", lambda address: opened(cfg))
    cfg.MODEL.WEIGHTS = "gw://imagenet/R-50"
    text = card_text({**NO_REPORT, "card": card_facts(cfg, "shapes")}, "onnx", "# usage\n")
    assert "| License of the weights | not stated by the authors" in text
    training = card_facts(cfg, "shapes")["training"]
    assert training["start_weights"] == {"address": "gw://imagenet/R-101", "sha256": "0" * 64}
    assert "`gw://imagenet/R-101`, SHA-256 000" in text and "| License of the start weights | not stated" in text


def opened(cfg):
    record = RunRecord(cfg.dump(), 7)
    start = argparse.Namespace(address="gw://imagenet/R-101", sha256="0" * 64, metadata={})
    record.set_start_weights(start)
    return argparse.Namespace(metadata={RUN_RECORD: record.state_dict()})


def test_a_run_of_several_parts_says_so(trained):
    facts = card_facts(trained, "shapes")
    facts["training"] |= {"parts": 2, "start_weights": {"address": "/home/me/R-50.pkl", "sha256": "0" * 64}}
    text = card_text({**NO_REPORT, "card": facts}, "onnx", "# usage\n")
    assert "| Parts | 2, with other configs, software or processes; this table is of the last one |" in text
    assert "| Start | `R-50.pkl`, SHA-256 000" in text and "/home/me" not in text


def parse(*words):
    parser = argparse.ArgumentParser()
    add_export_flags(parser)
    return parser.parse_args(["--output", "out", "--config-file", *words])


def test_flags(trained):
    assert requested_card(parse("a/b.yaml"), trained) is None
    assert requested_card(parse("a/b.yaml", "--card"), trained)["name"] == "b"
    assert requested_card(parse("a/run/config.yaml", "--card"), trained)["name"] == "run"
    with pytest.raises(ConfigError, match=r"--license \('mit'\): .* Fix: add --card"):
        requested_card(parse("a.yaml", "--license", "mit"), trained)
    with pytest.raises(ConfigError, match=r"license \('my own: words'\): no identifier. Fix: give one of https"):
        card_facts(trained, "shapes", "my own: words")


def test_without_a_card_the_readme_has_no_metadata(tmp_path, normalization):
    export_backbone(tiny_backbone(), tmp_path / "out", normalization, file_format="safetensors")
    assert (tmp_path / "out" / "README.md").read_text().startswith("# backbone.safetensors\n")
