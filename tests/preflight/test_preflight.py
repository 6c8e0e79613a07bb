"""Every check before a run: its message, its fix, and that a sound run passes."""

import json
import os
import pickle
import unicodedata
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.modeling import ResNet, build_model
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager
from PIL import ExifTags, Image

from gw_detectron.checkpoint import StartWeights
from gw_detectron.errors import PreflightError
from gw_detectron.preflight import Findings, preflight
from gw_detectron.preflight.config_checks import check_device

from .sound_run import config, one

RGB = {
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
}


def test_a_sound_run_passes(check):
    assert check() == Findings([], [])


def test_all_problems_are_raised_together(tmp_path, coco):
    coco()
    cfg = config(tmp_path, MODEL__BACKBONE__FREEZE_AT=2, MODEL__ROI_HEADS__NUM_CLASSES=7)
    with pytest.raises(PreflightError, match="(?s)has 2 problems.*FREEZE_AT.*NUM_CLASSES") as raised:
        preflight(cfg, StartWeights()).raise_problems()
    assert len(raised.value.problems) == 2
    preflight(config(tmp_path), StartWeights()).raise_problems()


class TestModel:
    @pytest.mark.parametrize(
        ("key", "layer"),
        [
            ("MODEL__RESNETS__NORM", "backbone.bottom_up."),
            ("MODEL__FPN__NORM", "backbone.fpn_"),
            ("MODEL__ROI_BOX_HEAD__NORM", "roi_heads.box_head."),
            ("MODEL__ROI_MASK_HEAD__NORM", "roi_heads.mask_head."),
        ],
    )
    def test_frozen_bn_from_scratch(self, check, key, layer):
        problem = one(check(**{key: "FrozenBN"}))
        assert "FrozenBN" in problem and layer in problem
        assert f"set {key.replace('__', '.')} to BN, GN or GW" in problem

    @pytest.mark.parametrize("norm", ["FrozenBN", "FrozenBW:channels=16"])
    def test_frozen_norms_at_the_whitened_positions(self, check, norm):
        problem = one(check(MODEL__RESNETS__WHITEN_NORM=norm))
        assert "9 layers are FrozenBN or FrozenBW" in problem and "stem.conv1.norm" in problem

    def test_frozen_layers_from_scratch(self, check):
        problem = one(check(MODEL__BACKBONE__FREEZE_AT=2))
        assert "MODEL.BACKBONE.FREEZE_AT (2)" in problem and "FREEZE_AT 0" in problem

    def test_both_are_fine_with_weights(self, check, tmp_path):
        torch.save({"model": {}}, tmp_path / "w.pth")
        changes = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
        assert check(MODEL__WEIGHTS=str(tmp_path / "w.pth"), **changes) == Findings([], [])
        found = check(MODEL__WEIGHTS=str(tmp_path / "w.pth"), MODEL__FPN__NORM="FrozenBN", **changes)
        assert not found.problems and "set MODEL.FPN.NORM to GN or GW" in found.warnings[0]

    def test_batch_norm_of_one_image(self, check, tmp_path):
        problem = one(check(SOLVER__IMS_PER_BATCH=1))
        assert "a batch of one image" in problem and "backbone.bottom_up.res2.0.conv1.norm" in problem
        assert "SOLVER.IMS_PER_BATCH 2 or more" in problem
        assert not check(SOLVER__IMS_PER_BATCH=1, MODEL__RESNETS__NORM="GW").problems
        torch.save({"model": {}}, tmp_path / "w.pth")
        evaluated = {"eval_only": True, "MODEL__WEIGHTS": str(tmp_path / "w.pth")}
        assert not check(SOLVER__IMS_PER_BATCH=1, **evaluated).problems

    def test_batch_norm_of_one_image_after_scaling(self, check):
        problem = one(check(SOLVER__IMS_PER_BATCH=2, SOLVER__REFERENCE_WORLD_SIZE=2))
        assert "SOLVER.IMS_PER_BATCH (1, scaled by SOLVER.REFERENCE_WORLD_SIZE): " in problem
        assert "Fix: set SOLVER.IMS_PER_BATCH to at least 2 times SOLVER.REFERENCE_WORLD_SIZE, " in problem
        assert not check(SOLVER__IMS_PER_BATCH=4, SOLVER__REFERENCE_WORLD_SIZE=2).problems

    def test_batch_norm_of_accumulated_batches(self, check):
        found = check(SOLVER__ACCUMULATE=8)
        assert not found.problems and len(found.warnings) == 1
        assert "SOLVER.ACCUMULATE (8): " in found.warnings[0] and "over 2 images" in found.warnings[0]
        assert "(first: backbone.bottom_up.res2.0.conv1.norm," in found.warnings[0]
        assert check(SOLVER__ACCUMULATE=8, MODEL__RESNETS__NORM="GW") == Findings([], [])
        one(check(SOLVER__ACCUMULATE=8, SOLVER__IMS_PER_BATCH=1))  # statistics of one image remain those of one

    def test_layers_with_too_few_values_to_whiten(self, check):
        found = check(INPUT__MIN_SIZE_TRAIN="(64,)")
        assert not found.problems and len(found.warnings) == 1
        # 2 x 2 pixels of 32 channels in 16 groups are 8 columns
        assert "backbone.fpn_lateral5.norm" in found.warnings[0] and "16 rows over 8 columns" in found.warnings[0]
        assert "fewer groups, or larger images" in found.warnings[0]
        assert check(INPUT__MIN_SIZE_TRAIN="(64,)", eval_only=True, MODEL__WEIGHTS="none").warnings == []

    def test_too_few_values_for_batch_whitening(self, check):
        # 2 images of 2 x 2 pixels are 8 columns
        changes = {"INPUT__MIN_SIZE_TRAIN": "(64,)", "MODEL__FPN__NORM": "BW:channels=16"}
        warning = next(text for text in check(**changes).warnings if "too few values" in text)
        assert "Fix: use a smaller channels= of BW, fewer groups, or larger images." in warning  # res5 has GW
        found = check(**changes, MODEL__RESNETS__WHITEN_NORM="BN").warnings
        warning = next(text for text in found if "too few values" in text)
        assert "Fix: use a smaller channels= of BW, or larger images." in warning

    def test_values_for_batch_whitening_are_those_of_one_process(self, check, monkeypatch):
        monkeypatch.setattr(comm, "get_world_size", lambda: 2)
        changes = {"INPUT__MIN_SIZE_TRAIN": "(64,)", "MODEL__FPN__NORM": "BW:channels=16"}
        warning = next(text for text in check(**changes, SOLVER__IMS_PER_BATCH=4).warnings if "too few values" in text)
        assert "backbone.fpn_lateral5.norm" in warning and "16 rows over 8 columns" in warning

    def test_no_size_of_images(self, check):
        assert "INPUT.MIN_SIZE_TRAIN (empty)" in one(check(INPUT__MIN_SIZE_TRAIN="()"))

    def test_batch_whitening_of_a_few_images(self, check):
        images = {"INPUT__MIN_SIZE_TRAIN": "(160,)"}
        found = check(MODEL__RESNETS__WHITEN_NORM="BW", SOLVER__IMS_PER_BATCH=4, **images)
        assert "a batch of 4 images" in str(found.warnings)
        found = check(MODEL__RESNETS__WHITEN_NORM="BW", **images)
        assert not found.problems and len(found.warnings) == 1
        words = ["a batch of 2 images", "res5", "(d + 3) / 2 = 33.5", "m = 50 for the smallest images", "2080 numbers"]
        assert all(word in found.warnings[0] for word in words), found.warnings[0]
        (few_images,) = check(MODEL__RESNETS__WHITEN_NORM="BW", SOLVER__IMS_PER_BATCH=16, **images).warnings
        assert "a batch repeats images" in few_images
        assert check(MODEL__RESNETS__WHITEN_NORM="BW:solver=standardize").warnings == []
        found = check(MODEL__RESNETS__WHITEN_NORM="BW", **{**images, "INPUT__MIN_SIZE_TRAIN": "(0,)"})
        assert "m columns, images times positions, has no solution" in found.warnings[0]  # m is unknown

    def test_a_model_whose_shapes_cannot_be_traced(self, check, monkeypatch):
        monkeypatch.setattr(ResNet, "forward", lambda self, x: x.mean().item())
        found = check()
        assert not found.problems and len(found.warnings) == 1
        assert "not checked" in found.warnings[0] and "RuntimeError" in found.warnings[0]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"MODEL__FPN__NORM": "GW:groups=7"}, ["MODEL.FPN.NORM", "32", "7"]),
            ({"MODEL__RESNETS__NORM": "XN"}, ["MODEL.RESNETS.NORM", "XN", "GW"]),
            ({"MODEL__RESNETS__WHITEN_POSITIONS": "S1-B3"}, ["S1-B3"]),
            ({"MODEL__BACKBONE__NAME": "build_no_such_backbone"}, ["build_no_such_backbone"]),
            ({"MODEL__RESNETS__DEPTH": 19}, ["19", "18"]),
        ],
    )
    def test_a_model_that_cannot_be_built(self, check, changes, words):
        problem = one(check(**changes))
        assert "cannot be built" in problem and all(word in problem for word in words)

    @pytest.mark.parametrize(
        ("key", "changes", "instead"),
        [
            (
                "MODEL.FPN.NORM",
                {"MODEL__RESNETS__NORM": "BN", "MODEL__BACKBONE__NAME": "build_resnet_fpn_backbone"},
                "set MODEL.BACKBONE.NAME build_gw_resnet_fpn_backbone",
            ),
            (
                "MODEL.RESNETS.NORM",
                {"MODEL__BACKBONE__NAME": "build_resnet_fpn_backbone"},
                "set MODEL.BACKBONE.NAME build_gw_resnet_fpn_backbone",
            ),
            (
                "MODEL.ROI_BOX_HEAD.NORM",
                {"MODEL__ROI_BOX_HEAD__NAME": "FastRCNNConvFCHead", "MODEL__ROI_BOX_HEAD__NUM_CONV": 1},
                "set MODEL.ROI_BOX_HEAD.NAME GWFastRCNNConvFCHead",
            ),
            (
                "MODEL.ROI_MASK_HEAD.NORM",
                {"MODEL__ROI_MASK_HEAD__NAME": "MaskRCNNConvUpsampleHead", "MODEL__ROI_MASK_HEAD__NUM_CONV": 1},
                "set MODEL.ROI_MASK_HEAD.NAME GWMaskRCNNConvUpsampleHead",
            ),
            (
                "MODEL.RETINANET.NORM",
                {
                    "MODEL__META_ARCHITECTURE": "RetinaNet",
                    "MODEL__BACKBONE__NAME": "build_gw_retinanet_resnet_fpn_backbone",
                    "MODEL__RESNETS__OUT_FEATURES": ["res3", "res4", "res5"],
                    "MODEL__FPN__IN_FEATURES": ["res3", "res4", "res5"],
                    "MODEL__RETINANET__NUM_CLASSES": 2,
                },
                "set MODEL.META_ARCHITECTURE GWRetinaNet",
            ),
            (
                "MODEL.SEM_SEG_HEAD.NORM",
                {"MODEL__META_ARCHITECTURE": "PanopticFPN"},
                "set MODEL.SEM_SEG_HEAD.NAME GWSemSegFPNHead",
            ),
        ],
    )
    def test_a_norm_name_at_a_component_of_detectron2(self, check, key, changes, instead):
        problem, *others = check(**{key.replace(".", "__"): "GW:groups=8"}, **changes).problems
        assert not others or "SEM_SEG" in key  # this dataset has no semantic masks
        assert f"{key} ('GW:groups=8')" in problem and "takes only Detectron2's norms (BN, SyncBN" in problem
        assert instead in problem


class TestMachine:
    def test_mixed_precision_on_the_cpu(self, check):
        assert "SOLVER.AMP.ENABLED False" in one(check(SOLVER__AMP__ENABLED=True))

    @pytest.mark.parametrize(("backend", "problems"), [("nccl", 1), ("gloo", 0)])
    def test_processes_on_the_cpu_need_gloo(self, tmp_path, monkeypatch, backend, problems):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        found = Findings()
        check_device(config(tmp_path), found, eval_only=False)
        assert str(found.problems).count("the processes communicate by nccl") == len(found.problems) == problems

    def test_an_unknown_device(self, check):
        assert "MODEL.DEVICE ('gpu'): unknown device" in one(check(MODEL__DEVICE="gpu"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="speaks about a machine without a GPU")
    def test_no_gpu(self, check):
        assert "set MODEL.DEVICE cpu, or give --num-gpus 0" in one(check(MODEL__DEVICE="cuda"))


class TestSolver:
    def test_an_empty_batch(self, check):
        assert "SOLVER.IMS_PER_BATCH (0): not in the interval [1, inf). Fix: " in one(check(SOLVER__IMS_PER_BATCH=0))

    @pytest.mark.parametrize("changes", [{"SOLVER__STEPS": (3,)}, {"SOLVER__STEPS": (2, 1)}])
    def test_an_impossible_schedule(self, check, changes):
        problem = one(check(**changes))
        assert "SOLVER.STEPS" in problem and "SOLVER.MAX_ITER (3)" in problem

    def test_an_unknown_schedule(self, check):
        assert "Cosmic" in one(check(SOLVER__LR_SCHEDULER_NAME="Cosmic"))


class TestWeights:
    def test_an_unknown_scheme(self, check):
        problem = one(check(MODEL__WEIGHTS="nowhere://imagenet/R-50"))
        assert "unknown scheme 'nowhere://'" in problem and "path of a file" in problem

    def test_a_missing_file(self, check):
        assert "MODEL.WEIGHTS: file not found: 'my/R-50.pkl'" in (problem := one(check(MODEL__WEIGHTS="my/R-50.pkl")))
        assert "give an existing path" in problem
        assert "none are published" in one(check(MODEL__WEIGHTS="weights/R-50-GW-S1.pkl"))

    def test_nothing_to_evaluate(self, check, tmp_path):
        assert "or --resume" in one(check(eval_only=True))
        assert f"there is no checkpoint in '{tmp_path / 'output'}'" in one(check(eval_only=True, resume=True))

    def test_a_file_that_torch_cannot_read(self, check, tmp_path):
        path = tmp_path / "w.pth"
        path.write_text("<html>Not found</html>")
        assert "cannot be read" in one(check(MODEL__WEIGHTS=str(path)))
        path.write_bytes(b"")
        assert "is empty" in one(check(MODEL__WEIGHTS=str(path)))
        torch.save([1, 2], path)
        assert "contains a list instead of a dict" in one(check(MODEL__WEIGHTS=str(path)))

    def test_a_damaged_and_a_truncated_file(self, check, tmp_path):
        path = tmp_path / "w.pth"
        torch.save({"model": {"a": torch.zeros(10_000)}}, path)
        whole = bytearray(path.read_bytes())
        assert zipfile.is_zipfile(path) and not check(MODEL__WEIGHTS=str(path)).problems
        path.write_bytes(whole[: len(whole) // 2])
        assert "is cut off" in one(check(MODEL__WEIGHTS=str(path)))
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
        assert "checksum" in one(check(MODEL__WEIGHTS=str(path)))

    def test_preprocessing_that_differs_from_that_of_the_weights(self, check, tmp_path):
        path = tmp_path / "r.pkl"
        path.write_bytes(pickle.dumps({"model": {}, "__author__": "torchvision", "matching_heuristics": True}))
        bgr = {
            "INPUT__FORMAT": "BGR",
            "MODEL__PIXEL_MEAN": [103.53, 116.28, 123.675],
            "MODEL__PIXEL_STD": [1.0, 1.0, 1.0],
        }
        problem = one(check(MODEL__WEIGHTS=str(path), **bgr))
        assert "INPUT.FORMAT RGB" in problem
        for key in ("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"):
            assert f'{key} "{RGB[key]}"' in problem
        assert not check(MODEL__WEIGHTS=str(path)).problems
        deep = {"MODEL__RESNETS__DEPTH": 50, "MODEL__RESNETS__RES2_OUT_CHANNELS": 256}
        assert not check(MODEL__WEIGHTS=str(path), **deep).problems
        problem = one(check(MODEL__WEIGHTS=str(path), MODEL__RESNETS__STRIDE_IN_1X1=True, **deep))
        assert "STRIDE_IN_1X1 False" in problem

    def test_gw_addresses_require_rgb_images(self, check, monkeypatch, tmp_path):
        monkeypatch.setenv("GW_DETECTRON_WEIGHTS", str(tmp_path))  # nothing is to be downloaded here
        text = " ".join(check(MODEL__WEIGHTS="gw://imagenet/R-50-GW", INPUT__FORMAT="BGR").problems)
        assert "set INPUT.FORMAT RGB." in text

    @pytest.mark.parametrize(
        ("name", "wanted"),
        [
            ("torchvision/R-50", ["RGB", "123.675, 116.28, 103.53", "58.395, 57.12, 57.375", "STRIDE_IN_1X1 False"]),
            ("MSRA/R-50", ["BGR", "103.53, 116.28, 123.675", "1.0, 1.0, 1.0"]),
            ("FAIR/R-50-GN", ["BGR", "103.53, 116.28, 123.675", "1.0, 1.0, 1.0", "STRIDE_IN_1X1 False"]),
            ("FAIR/X-101-32x8d", ["BGR", "103.53, 116.28, 123.675", "57.375, 57.12, 58.395", "STRIDE_IN_1X1 False"]),
        ],
    )
    def test_preprocessing_of_detectron2_s_zoo(self, check, monkeypatch, tmp_path, name, wanted):
        torch.save({"model": {}}, tmp_path / "fetched.pth")
        address, fetch = f"detectron2://ImageNetPretrained/{name}.pkl", PathManager.get_local_path
        monkeypatch.setattr(
            PathManager,
            "get_local_path",
            lambda path: str(tmp_path / "fetched.pth") if path == address else fetch(path),
        )
        changes = {
            "INPUT__FORMAT": "RGB" if "BGR" in wanted else "BGR",
            "MODEL__PIXEL_MEAN": [0.0, 0.0, 0.0],
            "MODEL__PIXEL_STD": [2.0, 2.0, 2.0],
            "MODEL__RESNETS__STRIDE_IN_1X1": True,
            "MODEL__RESNETS__DEPTH": 50,
            "MODEL__RESNETS__RES2_OUT_CHANNELS": 256,
        }
        problem = one(check(MODEL__WEIGHTS=address, **changes))
        assert all(word in problem for word in wanted)
        assert ("STRIDE_IN_1X1" in problem) == ("STRIDE_IN_1X1 False" in wanted)

    def test_evaluation_without_weights(self, check):
        assert "--eval-only: no weights" in one(check(eval_only=True))


def test_a_period_that_is_scaled_to_0(check, monkeypatch):
    monkeypatch.setattr(comm, "get_world_size", lambda: 8)
    found = check(SOLVER__REFERENCE_WORLD_SIZE=1, SOLVER__CHECKPOINT_PERIOD=4, TEST__EVAL_PERIOD=4).problems
    assert [text for text in found if "REFERENCE_WORLD_SIZE" in text] == [
        f"SOLVER.REFERENCE_WORLD_SIZE (1): scales {key} 4 to 0 for 8 processes. Fix: raise {key}."
        for key in ("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD")
    ]
    found = check(SOLVER__REFERENCE_WORLD_SIZE=1, SOLVER__CHECKPOINT_PERIOD=5, TEST__EVAL_PERIOD=0).problems
    assert not any("REFERENCE_WORLD_SIZE" in text for text in found)


class TestResume:
    def checkpoint(self, tmp_path, name: str, age: int) -> str:
        folder = tmp_path / "output"
        folder.mkdir(exist_ok=True)
        torch.save({"model": {"a": torch.zeros(1000)}}, folder / name)
        os.utime(folder / name, (10_000 - age, 10_000 - age))
        return str(folder / name)

    def test_a_truncated_checkpoint(self, check, tmp_path):
        for age, name in enumerate(["model_0000005.pth", "model_0000003.pth", "model_0000001.pth"]):
            path = self.checkpoint(tmp_path, name, age)
            if age < 2:
                os.truncate(path, 1000)
                os.utime(path, (10_000 - age, 10_000 - age))
        (tmp_path / "output" / "last_checkpoint").write_text("model_0000005.pth")
        problem = one(check(resume=True))
        assert "model_0000005.pth" in problem and "is cut off" in problem
        assert "Fix: write model_0000001.pth" in problem
        os.remove(tmp_path / "output" / "model_0000001.pth")
        tag = tmp_path / "output" / "last_checkpoint"
        for _ in range(2):
            assert "Fix: start anew with --overwrite instead of --resume" in one(check(resume=True))
            tag.unlink(missing_ok=True)
        tag.write_text("model_0000005.pth")
        assert not check(overwrite=True).problems

    def test_a_moved_run(self, check, tmp_path):
        moved = tmp_path / "moved run"
        moved.mkdir()
        (moved / "last_checkpoint").write_text("model_0000001.pth")
        for eval_only in (False, True):
            problem = check(resume=True, eval_only=eval_only, config_file=str(moved / "config.yaml")).problems[0]
            assert f"in the folder of the config. Fix: add OUTPUT_DIR '{moved}' to continue that run." in problem
        assert not check(config_file=str(moved / "config.yaml")).problems

    def test_a_last_checkpoint_that_does_not_exist(self, check, tmp_path):
        self.checkpoint(tmp_path, "model_0000001.pth", 0)
        assert "last_checkpoint" in one(check(resume=True)) and "model_0000001.pth" in one(check(resume=True))
        tag = tmp_path / "output" / "last_checkpoint"
        tag.write_text("")
        assert "empty file" in one(check(resume=True))
        tag.write_bytes(bytes(range(128, 256)))
        assert "file not found" in one(check(resume=True))
        tag.write_text("model_0000009.pth")
        assert "model_0000009.pth" in one(check(resume=True)) and "file not found" in one(check(resume=True))

    def test_a_whole_checkpoint_counts_as_weights(self, check, tmp_path):
        self.detector(tmp_path, MODEL__BACKBONE__FREEZE_AT=2)
        assert check(resume=True, MODEL__BACKBONE__FREEZE_AT=2) == Findings([], [])
        assert "continue it with --resume" in one(check()) and "--overwrite" in one(check())
        assert not check(overwrite=True).problems

    def detector(self, tmp_path, **changes) -> None:
        """Write the last checkpoint of a run of :func:`config`."""
        path = self.checkpoint(tmp_path, "model_0000001.pth", 0)
        torch.save({"model": build_model(config(tmp_path, **changes)).state_dict(), "iteration": 1}, path)
        (tmp_path / "output" / "last_checkpoint").write_text("model_0000001.pth")

    @pytest.mark.parametrize("eval_only", [False, True])
    @pytest.mark.parametrize(
        ("before", "now", "words"),
        [
            (
                "BW:channels=16",
                "BW:channels=8",
                ["fpn_lateral2.norm.running_matrix (32, 16) in the checkpoint, (32, 8)"],
            ),
            ("BW:channels=16", "GW:groups=8", ["16 tensors only in the checkpoint (backbone.fpn_lateral2.norm."]),
            (
                "BW:channels=16",
                "BW:channels=16,rotation=cayley",
                ["8 tensors only in the detector", "fpn_lateral2.norm.rotate"],
            ),
        ],
    )
    def test_another_norm_than_that_of_the_checkpoint(self, check, tmp_path, before, now, words, eval_only):
        self.detector(tmp_path, MODEL__FPN__NORM=before)
        problem = one(check(resume=True, eval_only=eval_only, MODEL__FPN__NORM=now))
        keys = ["MODEL.RESNETS.WHITEN_NORM", "MODEL.FPN.NORM", "MODEL.ROI_BOX_HEAD.NORM"]
        assert all(word in problem for word in [*words, *keys, "model_0000001.pth"]), problem

    def test_weights_to_start_from_may_be_of_another_detector(self, check, tmp_path):
        self.detector(tmp_path, MODEL__FPN__NORM="BW:channels=16")
        weights = str(tmp_path / "output" / "model_0000001.pth")
        assert not check(overwrite=True, MODEL__WEIGHTS=weights, MODEL__FPN__NORM="BW:channels=8").problems

    def test_nothing_to_resume_is_a_warning(self, check):
        found = check(resume=True)
        assert not found.problems and "starts from its beginning" in found.warnings[0]


class TestKeysOfThisPackage:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"MODEL__RESNETS__WHITEN_POSITIONS": "ALL"},
                ["WHITEN_POSITIONS ('ALL')", "build_gw_resnet_fpn_backbone"],
            ),
            ({"MODEL__RESNETS__WHITEN_NORM": "GN"}, ["WHITEN_NORM ('GN')", "build_gw_resnet_fpn_backbone"]),
        ],
    )
    def test_a_backbone_that_does_not_read_them(self, check, changes, words):
        stock = {"MODEL__BACKBONE__NAME": "build_resnet_fpn_backbone", "MODEL__FPN__NORM": ""}
        problem = one(check(**stock, **changes))
        assert all(word in problem for word in words), problem
        assert not check(**stock, MODEL__RESNETS__WHITEN_POSITIONS="").problems

    def test_a_head_that_does_not_read_them(self, check):
        head = {"MODEL__ROI_BOX_HEAD__NAME": "FastRCNNConvFCHead", "MODEL__ROI_BOX_HEAD__NORM": "GN"}
        problem = one(check(**head, MODEL__ROI_BOX_HEAD__SINGLE_RELU=True))
        assert "SINGLE_RELU (True)" in problem and "GWFastRCNNConvFCHead" in problem


class TestData:
    def test_number_of_classes(self, check):
        problem = one(check(MODEL__ROI_HEADS__NUM_CLASSES=80))
        assert "NUM_CLASSES (80)" in problem and "has 2 classes. Fix: set MODEL.ROI_HEADS.NUM_CLASSES 2" in problem

    def test_an_unknown_image_format(self, check):
        assert "INPUT.FORMAT ('XYZ'): unknown. Fix: set it to one of RGB" in one(check(INPUT__FORMAT="XYZ"))

    def test_an_unknown_data_set(self, check):
        problem = one(check(DATASETS__TRAIN=("coco_2017_trian",)))
        assert "DATASETS ('coco_2017_trian'): unknown dataset" in problem and "coco_2017_train" in problem
        assert all(words in problem for words in ("--train-json", "--datasets FILE", "docs/your_data.md"))
        assert "DATASETS.TRAIN (empty)" in one(check(DATASETS__TRAIN=()))

    def test_a_missing_folder(self, check, coco, tmp_path, monkeypatch):
        coco().unlink()
        monkeypatch.setenv("DETECTRON2_DATASETS", "/where/data/is")
        text = " ".join(check().problems)
        assert "tiny.json" in text and "DETECTRON2_DATASETS" in text and "/where/data/is" in text
        os.rename(tmp_path / "data", tmp_path / "moved")
        assert f"'{tmp_path / 'data'}' does not exist, so" in " ".join(check().problems)

    def test_missing_images(self, check, coco, tmp_path):
        coco()
        os.remove(tmp_path / "data" / "images" / "sub" / "b.jpg")
        problem = check().problems[0]
        assert "1 of 2 images are missing" in problem and "sub/b.jpg" in problem

    @pytest.mark.parametrize("place", ["below", "beside", "above"])
    def test_the_folder_that_has_the_images_is_named(self, check, coco, tmp_path, place):
        coco()
        root = tmp_path / "data" / "images"
        moved = {"below": root / "photos", "beside": tmp_path / "data" / "photos", "above": tmp_path / "data"}[place]
        for path in list(root.rglob("*.jpg")):
            target = moved / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        assert "2 of 2 images are missing" in (problem := check().problems[0])
        assert problem.endswith(f"Fix: '{moved}' has them: give it instead.")

    def test_another_unicode_form_of_a_name_is_explained(self, check, coco, content, tmp_path):
        folder = tmp_path / "data" / "images"
        content["images"][0]["file_name"] = unicodedata.normalize("NFC", "Größe.jpg")
        coco()
        (folder / unicodedata.normalize("NFC", "Größe.jpg")).unlink(missing_ok=True)
        (folder / unicodedata.normalize("NFD", "Größe.jpg")).write_bytes(b"")
        assert "1 exist with their umlauts or accents in another Unicode form" in check().problems[0]

    def test_another_case_of_a_name_is_explained(self, check, coco, content):
        content["images"][0]["file_name"] = content["images"][0]["file_name"].replace(".jpg", ".JPG")
        coco()
        assert "Fix: 1 exist with other capital letters, such as .JPG instead of .jpg" in check().problems[0]

    def test_names_as_windows_writes_them_are_explained(self, check, coco, content):
        content["images"][1]["file_name"] = content["images"][1]["file_name"].replace("/", "\\")
        coco()
        assert (
            check()
            .problems[0]
            .endswith("Fix: 1 exist with / instead of \\ in their file_name: write / in the JSON file.")
        )

    def test_a_folder_that_may_not_be_listed(self, check, coco, monkeypatch):
        coco()

        def refuse(folder):
            raise PermissionError(13, "Permission denied", folder)

        monkeypatch.setattr("gw_detectron.preflight.dataset_checks.os.listdir", refuse)
        assert "cannot be listed: Permission denied. Fix: allow reading it" in check().problems[0]

    @pytest.mark.parametrize(("turned", "wanted"), [(1, (40, 30)), (6, (30, 40)), (3, (40, 30))])
    def test_images_of_another_size(self, check, coco, content, tmp_path, turned, wanted):
        record = content["images"][0]
        record |= {"file_name": "turned.jpg", "width": 31, "height": 41}
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turned
        Image.new("RGB", (40, 30)).save(tmp_path / "data" / "images" / "turned.jpg", exif=exif)
        coco()
        message = f"1 of 2 checked images have another width x height: 'turned.jpg' {wanted[0]} x {wanted[1]} in place"
        assert any(f"{message} of 31 x 41. Fix: correct" in problem for problem in check().problems)

    def test_images_without_a_header(self, check, coco, content, tmp_path):
        (tmp_path / "data" / "images" / content["images"][0]["file_name"]).write_text("no image")
        coco()
        name = content["images"][0]["file_name"]
        expected = f"1 of 2 checked images cannot be read: '{name}' (not an image). Fix: repair"
        assert any(expected in each for each in check().problems)

    def test_images_of_16_bits(self, check, coco, content, tmp_path):
        """Pillow, and so Detectron2, would cut their values off at 255."""
        image = content["images"][0]
        pixels = np.full((image["height"], image["width"]), 700, np.uint16)
        Image.fromarray(pixels).save(tmp_path / "data" / "images" / image["file_name"], format="PNG")
        coco()
        assert any("more than 8 bits per channel (mode I;16): save it with 8" in each for each in check().problems)

    def test_the_first_missing_images_are_named(self, check, coco, content):
        content["images"] += [{**content["images"][0], "id": 9 + n, "file_name": f"c/{n}.jpg"} for n in range(4)]
        coco()
        problem = check().problems[0]
        assert "4 of 6 images are missing" in problem and "c/2.jpg' and 1 more" in problem and "c/3.jpg" not in problem

    def test_no_masks(self, check, coco, content):
        for annotation in content["annotations"]:
            annotation["segmentation"] = []
        coco()
        assert all("has a segmentation. Fix: set MODEL.MASK_ON False" in each for each in check().problems)
        assert check(MODEL__MASK_ON=False).problems == []

    def test_more_images_per_batch_than_images(self, check):
        (warning,) = check(SOLVER__IMS_PER_BATCH=4).warnings
        assert "SOLVER.IMS_PER_BATCH (4): a batch repeats images" in warning and "Fix: set it to 2" in warning
        assert check(SOLVER__IMS_PER_BATCH=2).warnings == []

    def test_images_of_training_in_the_evaluation(self, check, other_coco):
        (warning,) = check(DATASETS__TEST=("other_coco",)).warnings
        assert "DATASETS.TEST ('other_coco'): 1 of its images are also in tiny_coco: " in warning
        assert "images/a.jpg. AP" in warning

    @pytest.mark.parametrize("by_link", [False, True])
    def test_images_of_training_in_the_evaluation_by_another_path(self, check, other_coco, by_link):
        """Of a path with ./, or of a linked folder."""
        images = other_coco.with_name("images")
        if by_link:
            images = other_coco.with_name("linked")
            images.symlink_to("images")
        else:
            content = json.loads(other_coco.read_text())
            content["images"][0]["file_name"] = "./" + content["images"][0]["file_name"]
            other_coco.write_text(json.dumps(content))
        MetadataCatalog.pop("other_coco")
        MetadataCatalog.get("other_coco").set(json_file=str(other_coco), image_root=str(images), evaluator_type="coco")
        (warning,) = check(DATASETS__TEST=("other_coco",)).warnings
        assert "1 of its images are also in tiny_coco: " in warning and "images/a.jpg. AP" in warning

    def test_the_same_number_of_other_classes(self, check, other_coco):
        content = json.loads(other_coco.read_text())
        content["categories"] = [{"id": 5, "name": "dog"}, {"id": 9, "name": "cat"}]
        other_coco.write_text(json.dumps(content))
        for sets in ({"TRAIN": ("tiny_coco", "other_coco")}, {"TEST": ("other_coco",)}):
            problem = one(check(**{f"DATASETS__{key}": names for key, names in sets.items()}))
            assert "tiny_coco and other_coco have different classes: cat, dog; dog, cat. Fix: " in problem

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda c: c.pop("images"), "no list 'images'"),
            (lambda c: c.pop("categories"), "no list 'categories'"),
            (lambda c: c["images"][1].pop("height"), r"image 2 has no field 'height'"),
            (lambda c: c["images"][0].pop("id"), r"images\[0\] has no field 'id'"),
            (lambda c: c["categories"][0].pop("name"), r"category 9 has no field 'name'"),
            (lambda c: c["annotations"][1].pop("bbox"), r"annotation 2 has no field 'bbox'"),
            (lambda c: c["annotations"][1].pop("segmentation"), "has no field 'segmentation'"),
            (lambda c: c["annotations"][1].update(bbox=[1, 2, 3]), "annotation 2: bbox .*four numbers"),
            (lambda c: c["annotations"][1].update(bbox=[1, 2, 3, float("nan")]), "annotation 2: bbox"),
            (lambda c: c["annotations"][0].update(image_id=77), "annotation 1: image_id 77"),
            (lambda c: c["annotations"][0].update(category_id=1), "annotation 1: category_id 1"),
            (lambda c: c["annotations"].clear(), "list 'annotations' is empty"),
            (lambda c: c["images"].insert(0, 3), r"images\[0\] is a int"),
            (lambda c: c["images"][0].update(width="120"), "image 1: width '120' is not a positive integer"),
            (lambda c: c["annotations"][1].update(id=1), "annotations: duplicate id 1"),
            (lambda c: [a.update(segmentation=[[1, 2, 3]]) for a in c["annotations"]], "nothing to learn from"),
            (lambda c: [a.update(iscrowd=1) for a in c["annotations"]], "nothing to learn from"),
        ],
    )
    def test_a_json_that_lacks_something(self, check, coco, content, damage, words):
        damage(content)
        path = coco()
        with pytest.raises(PreflightError, match=f"'{path}': .*{words}"):
            raise PreflightError(check().problems)

    def test_evaluation_needs_more_fields_than_training(self, check, coco, content):
        content["annotations"][0].pop("area")
        coco()
        assert "annotation 1 has no field 'area'." in one(check())

    def test_records_that_lack_the_same_field_are_counted(self, check, coco, content):
        for annotation in content["annotations"]:
            annotation.pop("area", None)
        coco()
        assert f"has no field 'area', and 1 more of {len(content['annotations'])}" in one(check())

    def test_test_images_may_have_no_annotations(self, check, coco, content, tmp_path):
        del content["annotations"]
        coco()
        torch.save({"model": {}}, tmp_path / "w.pth")
        assert check(eval_only=True, MODEL__WEIGHTS=str(tmp_path / "w.pth")) == Findings([], [])

    def test_text_that_is_no_json(self, check, coco):
        coco('{"images": [')
        assert all("tiny.json': invalid JSON" in problem and "line 1" in problem for problem in check().problems)

    def test_a_data_set_without_json(self, check):
        DatasetCatalog.register("from_python", list)
        MetadataCatalog.get("from_python").set(thing_classes=["a", "b", "c"], evaluator_type="coco")
        try:
            problem = one(check(DATASETS__TRAIN=("from_python",)))
            assert "from_python has 3 classes" in problem
        finally:
            DatasetCatalog.remove("from_python")
            MetadataCatalog.remove("from_python")

    def test_a_data_set_that_is_not_evaluated_by_the_coco_rules(self, check, coco):
        coco()
        metadata = MetadataCatalog.pop("tiny_coco")
        MetadataCatalog.get("tiny_coco").set(**{**metadata.as_dict(), "evaluator_type": "lvis"})
        assert "evaluator_type 'lvis'" in one(check())


def test_a_missing_compiler_is_reported_before_the_run(check, monkeypatch):
    assert not check(MODEL__COMPILE=True).problems
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "MODEL.COMPILE (True)" in one(check(MODEL__COMPILE=True))
    assert not check().problems
