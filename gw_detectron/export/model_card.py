"""Model card of an export: README.md in the form of the Hugging Face hub."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode

from ..checkpoint import open_checkpoint
from ..checkpoint.records import RUN_RECORD
from ..config import parse_config
from ..errors import ConfigError
from ..weights import CATALOG
from ..weights.catalog import PREFIX
from ..weights.provenance import PROVENANCE

_LICENSE = re.compile("[a-z0-9][a-z0-9.-]*")
_LIBRARIES = {"onnx": "onnx", "detectron2": "gw_detectron"}
_DETECTORS = {"RetinaNet": "RetinaNet", "GWRetinaNet": "RetinaNet"}
#: task of Detectron2 -> task of the hub, name of its AP
_TASKS = {"bbox": ("object-detection", "box AP"), "segm": ("image-segmentation", "mask AP")}
_SCHEDULE = ("IMS_PER_BATCH", "BASE_LR", "LR_SCHEDULER_NAME", "STEPS", "MAX_ITER")
_UNKNOWN = "unknown: the weights have no record of a training run"


def card_facts(cfg: CfgNode, name: str, license_id: str | None = None) -> dict[str, Any]:
    """Collect what a model card says and an export does not know: the network and its training.

    Args:
        cfg: the config of the model; ``MODEL.WEIGHTS`` is read.
        name: of the model.
        license_id: identifier of the weights' license on the hub; None if unknown.

    Returns:
        Plain values: ``name``, ``license``, ``detector``, ``backbone``, ``weights_license`` (of published weights), and
        ``training`` or ``converted_from`` if the weights record it.

    Raises:
        ConfigError: the license is no identifier.
        UserError: the weights cannot be read, see :func:`gw_detectron.checkpoint.open_checkpoint`.
    """
    if license_id is not None and not _LICENSE.fullmatch(license_id):
        raise ConfigError(
            f"license ({license_id!r}): no identifier. Fix: give one of https://huggingface.co/docs/hub/"
            "repositories-licenses, e.g. apache-2.0."
        )
    checkpoint = open_checkpoint(cfg.MODEL.WEIGHTS)
    resnets, architecture = cfg.MODEL.RESNETS, cfg.MODEL.META_ARCHITECTURE
    rcnn = {"GeneralizedRCNN": "Mask R-CNN" if cfg.MODEL.MASK_ON else "Faster R-CNN"}
    facts = {
        "name": name,
        "license": license_id,
        "detector": (_DETECTORS | rcnn).get(architecture, architecture),
        "backbone": f"ResNe{'Xt' if resnets.NUM_GROUPS > 1 else 't'}-{resnets.DEPTH}",
        "weights_license": _published_license(cfg.MODEL.WEIGHTS),
    }
    record, provenance = checkpoint.metadata.get(RUN_RECORD), checkpoint.metadata.get(PROVENANCE)
    if isinstance(record, Mapping) and isinstance(record.get("config"), str):
        facts["training"] = _training(record, checkpoint.metadata.get("iteration"))
    elif provenance:
        facts["converted_from"] = {key: provenance[key] for key in ("source", "source_sha256", "tool")}
    return facts


def _training(record: Mapping[str, Any], iteration: Any) -> dict[str, Any]:
    config = parse_config(record["config"], RUN_RECORD)
    start = dict(record.get("start_weights") or {})
    return {
        "datasets": list(config["DATASETS"]["TRAIN"]),
        "iterations": iteration + 1 if isinstance(iteration, int) else None,
        "schedule": {key: config["SOLVER"][key] for key in _SCHEDULE},
        "processes": record.get("processes"),
        "parts": 1 + len(record.get("earlier_parts") or ()),
        "seed": record.get("seed"),
        "versions": dict(record.get("versions") or {}),
        "start_weights": {key: start[key] for key in ("address", "sha256") if key in start},
        "start_weights_license": _published_license(start.get("address", "")),
    }


def _published_license(address: str) -> str | None:
    weights = CATALOG.get(address.removeprefix(PREFIX))
    return weights.license if weights else None


def card_text(report: Mapping[str, Any], kind: str, usage: str) -> str:
    """Format the model card of an export.

    Args:
        report: the content of ``parity.json``, with the result of :func:`card_facts` as ``card``.
        kind: the format, or the layout of weights.
        usage: README of the export, whose title becomes a heading of the card.
    """
    facts, detector = report["card"], "detections" in report
    network = "{detector}, {backbone}" if detector else "{backbone} of a {detector}, without its heads"
    tables = {
        "Model": {
            "Network": network.format(**facts),
            "Norm layers": ", ".join(f"{count} `{spec}`" for spec, count in report["norm_layers"].items()) or "none",
            "Classes": ", ".join(report.get("class_names") or ()) or ("names unknown" if detector else None),
            "Config": f"`{Path(report['source']['config']).name}`" if "config" in report["source"] else None,
            "License": facts["license"] or "not stated",
            "License of the weights": facts["weights_license"],
        },
        "Training": dict(_training_rows(facts)),
    }
    sections = [f"## {title}\n\n{_table(rows)}" for title, rows in tables.items()]
    front = yaml.safe_dump(_front_matter(report, kind), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{front}---\n\n# {facts['name']}",
        *sections,
        f"## Results\n\n{_results(report)}",
        f"#{usage.rstrip()}",
        "## Limits\n\n" + "\n".join(f"- {line}" for line in _limits(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Mapping[str, str | None]) -> str:
    cells = [(name, value.replace("|", "\\|")) for name, value in rows.items() if value]
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)])


def _training_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    if source := facts.get("converted_from"):
        yield "Converted from", f"`{source['source']}`, SHA-256 {source['source_sha256']}, by {source['tool']}"
    training = facts.get("training")
    if not training:
        yield "Data and schedule", _UNKNOWN
        return
    schedule, done, start = training["schedule"], training["iterations"], training["start_weights"]
    yield "Data", ", ".join(f"`{name}`" for name in training["datasets"])
    steps = f" at {', '.join(map(str, schedule['STEPS']))}" if "MultiStep" in schedule["LR_SCHEDULER_NAME"] else ""
    yield (
        "Schedule",
        f"{'an unknown number' if done is None else done} of {schedule['MAX_ITER']} iterations of "
        f"{schedule['IMS_PER_BATCH']} images, learning rate {schedule['BASE_LR']}, "
        f"`{schedule['LR_SCHEDULER_NAME']}`{steps}",
    )
    yield "Processes", str(training["processes"] or "unknown")
    if training["parts"] > 1:
        yield "Parts", f"{training['parts']}, with other configs, software or processes; this table is of the last one"
    address = start.get("address", "")
    origin = address if "://" in address else Path(address).name  # without the folders of this machine
    yield "Start", f"`{origin}`, SHA-256 {start['sha256']}" if start else "random initial values"
    yield "License of the start weights", training["start_weights_license"]
    yield "Seed", str(training["seed"])
    yield "Software", ", ".join(f"{name} {version}" for name, version in training["versions"].items())


def _front_matter(report: Mapping[str, Any], kind: str) -> dict[str, Any]:
    facts, masks = report["card"], "masks" in report["outputs"]
    task = _TASKS["segm" if masks else "bbox"][0] if "detections" in report else "image-feature-extraction"
    datasets = facts.get("training", {}).get("datasets")
    results = [
        {
            "task": {"type": task},
            "dataset": {"name": report["accuracy"]["dataset"], "type": report["accuracy"]["dataset"]},
            "metrics": [
                {"type": "AP", "name": f"{name} on {report['accuracy']['images']} images", "value": round(value, 3)}
            ],
        }
        for task, name, _, value in _accuracy(report)
    ]
    return {
        **({"license": facts["license"]} if facts["license"] else {}),
        "library_name": _LIBRARIES.get(kind, "pytorch"),
        "pipeline_tag": task,
        "tags": sorted({"detectron2", "group-whitening", kind} if _whitened(report) else {"detectron2", kind}),
        **({"datasets": datasets} if datasets else {}),
        **({"model-index": [{"name": facts["name"], "results": results}]} if results else {}),
    }


def _whitened(report: Mapping[str, Any]) -> bool:
    return any(spec.startswith("GW") for spec in report["norm_layers"])


def _accuracy(report: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """Yield task and AP name on the hub, and the AP of model and file; without a detection there is none."""
    found = report.get("accuracy", {"exported": {}})
    for task, value in found["exported"].items():
        if math.isfinite(value):
            yield (*_TASKS[task], found["model"][task], value)


def _results(report: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {model:.2f} | {exported:.2f} |" for _, name, model, exported in _accuracy(report)]
    if "accuracy" not in report:
        return "AP: not measured."
    images = f"{report['accuracy']['images']} images of `{report['accuracy']['dataset']}`"
    if not rows:
        return f"Nothing was found in {images}."
    return "\n".join([f"COCO AP on {images}, in percent:\n", "| | model | this file |", "| --- | --- | --- |", *rows])


def _limits(report: Mapping[str, Any]) -> Iterator[str]:
    if "detections" not in report:
        yield "Features alone: detections need the heads of the detector."
    else:
        yield "It finds the classes of its training data alone."
        yield f"It returns at most {report['detections']} detections of an image."
    if accuracy := report.get("accuracy"):
        yield f"Its AP was measured on the images above alone, the first {accuracy['images']} of the dataset."
    yield "Nothing is known about other data, fairness or robustness."
