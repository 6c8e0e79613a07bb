"""The Python and yaml of the documentation runs as it is written."""

import functools
import json
import os
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_model
from PIL import ExifTags, Image, ImageOps

from gw_detectron.config import read_config
from gw_detectron.layers import GroupWhitening2d, MixedWhitening2d
from gw_detectron.modeling import GWFPN
from gw_detectron.norms import resolve_norm
from gw_detectron.ops.solvers.solver import SOLVERS
from gw_detectron.weights import Preprocessing, open_checkpoint, open_start_weights
from gw_detectron.weights.network_record import PREPROCESSING
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.export import export_detector
from gw_detectron.workbench.images import read_image
from gw_detectron.workbench.predict import (
    find_sources,
    open_predictor,
    write_predictions,
)
from gw_detectron.workbench.run.checks import check_run

from ..photos import photo_names, write_photos
from ..tiny_run import arguments
from ..workbench.export.tiny_networks import build_detector, needs_export
from .pages import PAGES, ROOT, blocks, read

#: what blocks have in them that need a trained detector in the current folder: see the slow tests
RUN, EXPORT = ("output/", "predictions/"), ("exported",)
#: libraries of docs/your_model.md, which the development environment lacks
HOSTS = (
    "transformers",
    "rfdetr",
    "ultralytics",
    "nnunetv2",
    "monai",
    "lerobot",
)
#: not run: a slide; parts of files; a download, which weights/test_catalog.py does with other weights
NOT_RUN = ("slides/", "RMSNorm2d, _EPS", "denman_beavers", 'resume_or_load("gw://')
ALL = [
    (page, place, block)
    for page in PAGES
    for place, block in enumerate(blocks(page, "python"))
]


def has(block, parts):
    return any(part in block for part in parts)


def run_block(block):
    names: dict[str, Any] = {}
    exec(compile(block, "block", "exec"), names)
    return names


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{page}-{place}")
        for page, place, block in ALL
        if not has(block, RUN + EXPORT + NOT_RUN)
    ],
)
def test_python_runs(block, tmp_path, monkeypatch, one_thread):
    for host in HOSTS:
        if f"from {host}." in block or f"from {host} " in block:
            pytest.importorskip(host, reason=f"{host} is not installed")
    monkeypatch.chdir(tmp_path)
    run_block(block)


@pytest.mark.parametrize("turned", [6, 3, 5])
@pytest.mark.parametrize(
    "page", ["docs/export.md", "docs/quickstart.ipynb", "examples/onnx_detect.py"]
)
def test_photos_are_read_upright_as_in_evaluation(page, turned, tmp_path):
    photo = tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    Image.fromarray(np.arange(3600, dtype=np.uint8).reshape(30, 40, 3)).save(
        photo, exif=exif
    )

    if page.endswith(".py"):
        pytest.importorskip("onnxruntime")
        pixels = runpy.run_path(str(ROOT / page))["read"](str(photo))
    else:
        text = read(page)
        if page.endswith("ipynb"):
            cells = json.loads(text)["cells"]
            text = "\n".join("".join(cell["source"]) for cell in cells)
        lines = re.findall(
            r"^(?:\w+ = .*Image\.open|pixels = ).*$", text, flags=re.MULTILINE
        )
        names = {"np": np, "Image": Image, "ImageOps": ImageOps, "photo": photo}
        exec("\n".join(lines).replace('"photo.jpg"', "photo"), names)
        pixels = names["pixels"]

    assert (np.asarray(pixels) == read_image(photo, "RGB")).all()


def test_the_solver_of_contributing_is_one_function_and_one_line(monkeypatch):
    function, line, *_ = blocks("CONTRIBUTING.md", "python")
    names = {"torch": torch, "Tensor": torch.Tensor}
    exec(function, names)
    (solver,) = eval(f"{{{line}}}", names).values()
    monkeypatch.setitem(SOLVERS, "denman_beavers", solver)
    x = torch.randn(2, 16, 9, 9, dtype=torch.float64)

    whitened = resolve_norm("GW:groups=4,solver=denman_beavers")(16).double()(x)

    expected = resolve_norm("GW:groups=4,solver=zca")(16).double()(x)
    torch.testing.assert_close(whitened, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_python_that_needs_a_trained_detector_runs(
    small_dataset, tmp_path, monkeypatch, one_thread
):
    monkeypatch.chdir(tmp_path)
    main(arguments(Path("output/demo_BN"), MODEL__RESNETS__WHITEN_POSITIONS=""))
    for folder in ("output/demo", "output/mydata"):
        os.symlink("demo_BN", folder)
    write_photos(tmp_path, photo_names(1, first=1))
    predict = open_predictor("output/mydata", score_threshold=0)
    write_predictions(predict, find_sources(["photos"]), "predictions")

    for _, _, block in ALL:
        if has(block, RUN) and not has(block, NOT_RUN):
            run_block(block)

    (block,) = [block for _, _, block in ALL if "def write_start" in block]
    batch = [predict.input(np.zeros((64, 96, 3), np.uint8) + 99)]
    run_block(block)["write_start"]("output/mydata", batch, "output")
    start = open_checkpoint("output/start.pth")
    norms = start.network.norms or {}
    assert norms["backbone.bottom_up.stem.conv1.norm"].startswith("GW:")

    assert Path("output/converted.pth").is_file()
    assert Path("output/demo/report/report.html").is_file()


@needs_export
@pytest.mark.slow
def test_python_that_needs_an_exported_detector_runs(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    (name,) = photo_names(1)
    write_photos(tmp_path, [name])
    os.rename(f"photos/{name}", "photo.jpg")
    export = functools.partial(
        export_detector, build_detector("mask"), sides=(128, 256)
    )
    export("exported_pt2", one_image=True, paste_masks=True)
    export("exported", file_format="onnx", one_image=True, paste_masks=True)
    export("exported_batch", file_format="onnx")

    for _, _, block in ALL:
        if has(block, EXPORT):
            run_block(block)


def config_of(example, folder):
    """Read a yaml of a page, as if it were saved in the clone."""
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my.yaml").write_text(example)
    return read_config(str(folder / "my.yaml"), ["MODEL.DEVICE", "meta"])


def backbone_of(cfg):
    with torch.device("meta"):
        return build_model(cfg).backbone


@pytest.mark.parametrize("page", ["README.md", "docs/norms.md"])
def test_yaml_builds_the_model_that_it_describes(page, tmp_path):
    example = blocks(page, "yaml")[-1]
    cfg = config_of(example, tmp_path)
    backbone = backbone_of(cfg)

    assert isinstance(backbone, GWFPN)
    assert isinstance(backbone.bottom_up.stem.conv1.norm, GroupWhitening2d)
    assert backbone.fpn_output2.norm.num_groups == 32
    cfg.MODEL.DEVICE = "cpu"
    for error in check_run(cfg, open_start_weights(cfg.MODEL.WEIGHTS)).errors:
        assert error.startswith("Dataset 'coco_2017_")  # COCO is not here


def test_yaml_of_weights_that_were_trained_with_bn(tmp_path):
    example, _ = blocks("docs/norms.md", "yaml")
    cfg = config_of(example, tmp_path)
    resnet = backbone_of(cfg).bottom_up

    assert isinstance(resnet.res2[0].conv2.norm, MixedWhitening2d)
    assert isinstance(resnet.res2[0].conv1.norm, FrozenBatchNorm2d)
    assert Preprocessing.from_config(cfg) == PREPROCESSING["torchvision"]
    assert all(parameter.requires_grad for parameter in resnet.parameters())
