"""Evaluators: chosen by what a model predicts; panoptic quality where its package is installed."""

import importlib.util
import sys
import types

import detectron2
import pytest
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, COCOPanopticEvaluator, DatasetEvaluators, SemSegEvaluator

from gw_detectron.engine import Trainer, setup
from gw_detectron.installation import has_compiled_operators

from ..tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset")
PANOPTIC = "gw_synthetic_val_panoptic_separated"


def evaluators(folder, dataset, **changes):
    built = Trainer.build_evaluator(setup(arguments(folder, **changes)), dataset)
    return [type(part) for part in (built._evaluators if isinstance(built, DatasetEvaluators) else [built])]


def test_a_data_set_that_is_not_coco_is_refused(tmp_path):
    cfg = setup(arguments(tmp_path))
    MetadataCatalog.get("not_coco").set(evaluator_type="pascal_voc")
    with pytest.raises(ValueError, match="'not_coco'.*evaluator_type 'pascal_voc'.*'coco'"):
        Trainer.build_evaluator(cfg, "not_coco")


@pytest.mark.parametrize("architecture", ["PanopticFPN", "SemanticSegmentor"])
def test_semantic_predictions_need_semantic_masks(tmp_path, architecture):
    cfg = setup(arguments(tmp_path, MODEL__META_ARCHITECTURE=architecture))
    with pytest.raises(
        ValueError, match=r"'gw_synthetic_val'\): evaluator_type 'coco' .* Fix: give a panoptic dataset"
    ):
        Trainer.build_evaluator(cfg, "gw_synthetic_val")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("GeneralizedRCNN", [COCOEvaluator]),
        ("GWRetinaNet", [COCOEvaluator]),
        ("SemanticSegmentor", [SemSegEvaluator]),
        ("PanopticFPN", [COCOEvaluator, SemSegEvaluator, COCOPanopticEvaluator]),
    ],
)
def test_the_architecture_chooses_the_evaluators(tmp_path, monkeypatch, architecture, expected):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "panopticapi" or found(name))
    assert evaluators(tmp_path, PANOPTIC, MODEL__META_ARCHITECTURE=architecture) == expected


def test_without_the_panoptic_package_the_parts_are_evaluated(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "panopticapi" else found(name))
    assert evaluators(tmp_path, PANOPTIC, MODEL__META_ARCHITECTURE="PanopticFPN") == [COCOEvaluator, SemSegEvaluator]


@pytest.mark.parametrize("built", [True, False])
def test_fast_evaluation_is_used_only_where_it_is_compiled(monkeypatch, built):
    def refuse(name):
        raise ImportError(name)

    extension = types.ModuleType("detectron2._C")
    if built:
        extension.COCOevalEvaluateImages = print
    else:
        extension.__getattr__ = refuse
    monkeypatch.setitem(sys.modules, "detectron2._C", extension)
    monkeypatch.setattr(detectron2, "_C", extension, raising=False)
    assert has_compiled_operators() is built
