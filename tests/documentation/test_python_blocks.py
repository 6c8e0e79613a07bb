"""The Python and yaml of the documentation runs as it is written."""

import os
from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model

from gw_detectron.checkpoint import open_start_weights
from gw_detectron.config import read_config
from gw_detectron.engine import main
from gw_detectron.export import export_detector
from gw_detectron.layers import GroupWhitening2d
from gw_detectron.modeling import GWFPN
from gw_detectron.prediction import find_sources, open_predictor, write_predictions
from gw_detectron.preflight import preflight

from ..export.tiny_networks import build_detector, needs_export
from ..photos import photo_names, write_photos
from ..tiny_run import arguments
from .pages import PAGES, ROOT, blocks

#: code that makes what a block of Python expects, by page and place of the block
GIVEN = {
    ("docs/whitening_analyses.md", 0): """
import torch
from gw_detectron import model_zoo
from detectron2.modeling import build_model

cfg = model_zoo.get_config("quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml")
cfg.MODEL.DEVICE = "cpu"
model = build_model(cfg).eval()
tiles = torch.rand(2, 3, 64, 64)
""",
}
#: blocks that need a trained detector or its export in the current folder: see the slow tests
NEED_A_RUN = {
    *(("docs/your_model.md", 1), ("docs/export.md", 0), ("docs/report.md", 0)),
    *((page, place) for page in ("docs/prediction.md", "docs/deployment.md") for place in (0, 1)),
}
#: blocks that are not run, with the reason
NOT_RUN = {
    ("docs/your_model.md", 5): "needs the authors' weights; checkpoint/test_checkpointer.py does it with others",
    **{("CONTRIBUTING.md", place): "parts of files" for place in range(3)},
}
ALL = [(page, place) for page in PAGES for place in range(len(blocks(page, "python")))]


def run_block(page, place):
    names: dict[str, object] = {}
    exec(compile(GIVEN.get((page, place), ""), page, "exec"), names)
    exec(compile(blocks(page, "python")[place], page, "exec"), names)


@pytest.mark.parametrize(("page", "place"), [block for block in ALL if block not in NEED_A_RUN | NOT_RUN.keys()])
def test_python_runs(page, place, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    run_block(page, place)


def test_every_exception_is_needed():
    assert NEED_A_RUN | NOT_RUN.keys() | GIVEN.keys() <= set(ALL)


@pytest.mark.slow
def test_python_that_needs_a_trained_detector_runs(small_dataset, tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.chdir(tmp_path)
    main(arguments(Path("output/demo_BN"), MODEL__RESNETS__WHITEN_POSITIONS=""))
    capsys.readouterr()
    run_block("docs/your_model.md", 1)
    assert "norm layers converted" in capsys.readouterr().out and Path("output/converted.pth").is_file()
    for folder in ("output/demo", "output/mydata"):
        os.symlink("demo_BN", folder)
    run_block("docs/report.md", 0)
    assert Path("output/demo/report/report.html").is_file()
    write_photos(tmp_path, photo_names(1))
    os.rename(Path("photos", photo_names(1)[0]), "photos/IMG_0001.jpg")
    write_predictions(open_predictor("output/mydata", score_threshold=0), find_sources(["photos"]), "predictions")
    for place in (0, 1):
        run_block("docs/prediction.md", place)


@needs_export
@pytest.mark.slow
def test_python_that_needs_an_exported_detector_runs(tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    export_detector(build_detector("mask"), "exported_pt2", sides=(128, 256), one_image=True, paste_masks=True)
    write_photos(tmp_path, photo_names(1))
    os.rename(tmp_path / "photos" / photo_names(1)[0], "photo.jpg")
    run_block("docs/export.md", 0)
    export_detector(
        build_detector("mask"), "exported", file_format="onnx", sides=(128, 256), one_image=True, paste_masks=True
    )
    export_detector(build_detector("mask"), "exported_batch", file_format="onnx", sides=(128, 256))
    for place in (0, 1):
        run_block("docs/deployment.md", place)


@pytest.mark.parametrize("page", ["README.md", "docs/norm_names.md"])
def test_yaml_builds_the_model_that_it_describes(page, tmp_path):
    (example,) = blocks(page, "yaml")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yaml").write_text(example)
    cfg = read_config(str(tmp_path / "my.yaml"), ["MODEL.DEVICE", "meta"])
    with torch.device("meta"):
        backbone = build_model(cfg).backbone
    assert isinstance(backbone, GWFPN) and isinstance(backbone.bottom_up.stem.conv1.norm, GroupWhitening2d)
    assert backbone.fpn_output2.norm.num_groups == 32
    cfg.MODEL.DEVICE = "cpu"
    errors = preflight(cfg, open_start_weights(cfg)).errors
    assert errors and all(error.startswith("Dataset 'coco_2017_") for error in errors)  # COCO is not here
