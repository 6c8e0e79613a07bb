"""Datasets: classes, images and annotations that cannot be trained on are refused and counted."""

import importlib.util
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import ExifTags, Image

from gw_detectron.errors import DataError, MissingPackageError
from gw_detectron.model_zoo import get_config
from gw_detectron.weights import RUN_RECORD_KEY, RunRecord
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds, check_coco

from .sound_run import coco_content, one

TRAIN, TEST = DatasetNeeds(training=True, masks=True), DatasetNeeds(training=False, masks=True)
NEEDS = pytest.mark.parametrize("needs", [TRAIN, TEST], ids=["training", "evaluation"])


# columns 2 to 11, in each of them the rows 2 to 11
RLE = {"size": [20, 30], "counts": [42, 10, *[10, 10] * 9, 368]}
# empty boxes, and boxes outside of an image of 30 x 20 pixels
BAD = ([2, 2, 0, 5], [2, 2, 5, -1], [-9, 2, 5, 5], [30, 2, 5, 5], [2, 20, 5, 5])


def with_classes(path, *names):
    content = json.loads(path.read_text())
    content["categories"] = [
        {"id": number, "name": name} for number, name in zip((5, 9, 12), names, strict=False)
    ]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cat"], "no dog"),
        (["cat", "dog", "eel"], "also eel"),
        (["cow", "dog"], "no cat and also cow"),
        (["dog", "cat"], "another order"),
    ],
)
def test_one_message_on_classes_that_differ_whatever_their_number(
    check, other_coco, names, words, count
):
    with_classes(other_coco, *names)
    for sets in ({"TRAIN": ("tiny_coco", "other_coco")}, {"TEST": ("other_coco",)}):
        keys = {f"DATASETS__{key}": value for key, value in sets.items()}
        (error, *others) = check(**keys, MODEL__ROI_HEADS__NUM_CLASSES=count).errors
        assert words in error and not any("NUM_CLASSES" in each for each in (error, *others))


@pytest.mark.parametrize(
    "names", [["cat"], ["dog", "cat"], ["cat", "cow"], ["cat", "dog", "eel"]]
)
def test_an_evaluation_on_other_classes_than_the_checkpoint_knows(check, coco, tmp_path, names):
    with_classes(coco(), *names)
    path, count = tmp_path / "w.pth", len(names)
    for trained, wrong in (
        ({1: "cat", 4: "dog"}, True),
        (dict(enumerate(names)), False),
    ):  # ids may differ
        torch.save({"model": {}, RUN_RECORD_KEY: RunRecord("", 1, trained).state_dict()}, path)
        found = check(
            eval_only=True, MODEL__WEIGHTS=str(path), MODEL__ROI_HEADS__NUM_CLASSES=count
        ).errors
        assert any("the checkpoint" in error for error in found) is wrong


NAMES = ["nose", "left_eye", "right_eye"]


@pytest.mark.parametrize(
    ("names", "flips"),
    [
        (NAMES, [("left_eye", "right_eye")]),
        ([*NAMES, "tail"], []),
        (NAMES[:2], []),
        (["nose", "left_eye", "left_eye"], []),
        (NAMES, [("left_eye", "right_ear")]),
        (NAMES, [("Left_eye", "Right_eye")]),
        (NAMES, [("left_eye", "right_eye"), ("nose", "left_eye")]),
        (NAMES, [("left_eye", "right_eye"), ("right_eye", "nose"), ("nose", "left_eye")]),
        (NAMES, None),
    ],
)
def test_names_of_keypoints(check, coco, content, names, flips):
    for annotation in content["annotations"]:
        annotation |= {"keypoints": [3, 4, 2, 5, 6, 1, 0, 0, 0], "num_keypoints": 2}
    coco()
    metadata = MetadataCatalog.get("tiny_coco")
    metadata.set(
        keypoint_names=names, **({} if flips is None else {"keypoint_flip_map": flips})
    )
    keys = {"MODEL__KEYPOINT_ON": True, "MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS": 3}
    errors = check(**keys, TEST__KEYPOINT_OKS_SIGMAS=[0.1] * 3).errors
    assert bool(errors) is (flips != [("left_eye", "right_eye")])
    assert all("keypoint_names of tiny_coco" in error for error in errors)


def test_classes_without_an_object_to_train_on(check, coco, other_coco, content):
    content["categories"] += [{"id": 0, "name": "root"}]
    content["annotations"] = content["annotations"][:1]
    other = {**coco_content(), "categories": content["categories"]}
    other_coco.with_name("tiny.json").write_text(json.dumps(content))
    changes = {"DATASETS__TEST": ("other_coco",), "MODEL__ROI_HEADS__NUM_CLASSES": 3}
    for scored, warnings in (([9], 2), ([], 1)):
        other["annotations"] = [
            each
            for each in coco_content()["annotations"]
            if each["category_id"] in [5, *scored]
        ]
        other_coco.write_text(json.dumps(other))
        found = [each for each in check(**changes).warnings if each.startswith("DATASETS")]
        assert len(found) == warnings and (
            "only in the evaluation" in found[0] and "(dog)" in found[0]
        ) is bool(scored)
        assert "no object" in found[-1] and "root" in found[-1]
        assert check(**changes, eval_only=True).warnings == []


def test_a_dataset_that_is_not_evaluated_by_the_coco_rules(check, coco):
    coco()
    metadata = MetadataCatalog.pop("tiny_coco")
    MetadataCatalog.get("tiny_coco").set(**{**metadata.as_dict(), "evaluator_type": "lvis"})
    assert "DATASETS.TEST ('tiny_coco')" in (error := one(check())) and "'lvis'" in error


def test_a_missing_file_and_folder(check, coco, tmp_path, monkeypatch):
    path = coco()
    monkeypatch.setenv("DETECTRON2_DATASETS", "/where/data/is")
    (tmp_path / "data" / "images").rename(tmp_path / "moved")
    assert all(
        "images' does not exist" in error and "/where/data/is" in error
        for error in check().errors
    )
    path.unlink()
    assert all("tiny.json" in error and "/where/data/is" in error for error in check().errors)


def test_missing_images(check, coco, content):
    content["images"] += [
        {**content["images"][0], "id": 9 + n, "file_name": f"c/{n}.jpg"} for n in range(6)
    ]
    coco()
    error = check().errors[0]
    assert (
        "6 of 8 images are missing" in error
        and "c/3.jpg and 2 more" in error
        and "c/4.jpg" not in error
    )


@pytest.mark.parametrize(
    ("turned", "size", "told"),
    [
        *(
            (1, (31, 30), "a.jpg' is 30 x 20"),
            (6, (30, 20), "a.jpg' is 20 x 30"),
            (3, (20, 30), "a.jpg' is 30 x 20"),
        ),
        *(
            (3, (30, 20), "turned or mirrored"),
            (2, (30, 20), "turned or mirrored"),
            (6, (20, 30), ""),
        ),
    ],
)
def test_sizes_of_images_by_their_orientation(
    check, coco, content, tmp_path, turned, size, told
):
    content["images"][0] |= dict(zip(("width", "height"), size, strict=True))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    Image.new("RGB", (30, 20)).save(tmp_path / "data" / "images" / "a.jpg", exif=exif)
    coco()
    found = check()
    texts = found.errors if "is" in told.split() else found.warnings
    assert bool(texts) is bool(told) and all(told in text and "a.jpg" in text for text in texts)
    assert not (found.errors if texts is found.warnings else found.warnings)


@pytest.mark.parametrize("copy", ["same name", "other name", "other dataset"])
def test_copies_of_images(check, coco, content, other_coco, tmp_path, copy):
    changes = {"DATASETS__TEST": ("other_coco",)} if copy == "other dataset" else {}
    if copy == "same name":
        content["images"][1]["file_name"] = "a.jpg"
    elif copy == "other name":
        shutil.copy(
            tmp_path / "data" / "images" / "a.jpg",
            tmp_path / "data" / "images" / "sub" / "b.jpg",
        )
    other_coco.with_name("tiny.json").write_text(json.dumps(content))
    found = check(**changes)
    assert not found.errors
    assert any(
        "copies" in warning and "a.jpg of tiny_coco" in warning for warning in found.warnings
    )
    assert not any(
        "copies" in warning
        for warning in check(eval_only=True, DATASETS__TEST=("other_coco",)).warnings
    )


def test_images_that_cannot_be_read(check, coco, content, tmp_path):
    first, second = (
        tmp_path / "data" / "images" / image["file_name"] for image in content["images"]
    )
    first.write_text("no image")
    Image.fromarray(np.full((20, 30), 700, np.uint16)).save(
        second, format="PNG"
    )  # Pillow would cut it off at 255
    coco()
    error = check().errors[0]
    assert "2 of 2 checked images" in error and first.name in error and "8 bits" in error


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "\ufeff{}",
        '{"a": ' + "9" * 5000 + "}",
        "\x1f\x8b",
        "",
        "null",
        "[]",
        '"x"',
        "NaN",
        "{}",
    ],
)
def test_text_that_is_no_annotation_file(check, coco, text):
    coco(text)
    error = check(DATASETS__TEST=()).errors[0]
    assert "tiny.json'" in error and "Fix: " in error


# list, index, changes; no message is compared: Detectron2 or pycocotools would fail, perhaps after hours
MALFORMED = [
    ("images", 0, {"id": [1]}),
    ("images", 0, {"id": 2}),
    ("images", 0, None),
    ("images", 0, {"file_name": None}),
    ("images", 0, {"file_name": ["a.jpg"]}),
    ("categories", 0, None),
    ("categories", 0, {"name": 7}),
    ("categories", 1, {"name": None}),
    ("annotations", 0, 3),
    ("annotations", 0, {"bbox": "0011"}),
    ("annotations", 0, {"bbox": [0, 0, 10**400, 1]}),
]


@NEEDS
@pytest.mark.parametrize(("kind", "index", "changes"), MALFORMED)
def test_a_malformed_record_is_shown(kind, index, changes, needs):
    content = coco_content()
    if isinstance(changes, dict):
        content[kind][index].update(changes)
    else:
        content[kind][index] = {} if changes is None else changes
    with pytest.raises(DataError) as raised:
        check_coco(content, needs)
    assert len(str(raised.value)) < 300


FAULTS = [
    ({"id": 1}, "repeat an id"),
    ({"image_id": 77}, "image_id"),
    ({"category_id": 77}, "category_id"),
    ({"bbox": [1, 2, 3]}, "four numbers"),
    ({"bbox": [1, 2, 3, math.nan]}, "four numbers"),
    ({"segmentation": []}, "MODEL.MASK_ON False"),
]


@NEEDS
@pytest.mark.parametrize(("changes", "words"), FAULTS)
def test_a_fault_is_counted_and_named(changes, words, needs):
    content = coco_content()
    content["annotations"][1].update(changes)
    (error,), warnings = check_coco(content, needs)
    number = changes.get("id", 2)
    assert (
        error.startswith("1 of 2 annotations")
        and f"ids {number}" in error
        and words in error
        and not warnings
    )


@NEEDS
def test_two_categories_of_the_same_name_are_a_warning(needs):
    content = coco_content()
    content["categories"][1]["name"] = content["categories"][0]["name"]
    errors, (warning,) = check_coco(content, needs)
    assert not errors and "one name (dog)" in warning


@NEEDS
def test_sound_annotations_pass(needs):
    content = coco_content()
    assert check_coco(content, needs) == ([], [])
    for image, name in zip(content["images"], "ab", strict=True):  # names instead of numbers
        image["id"] = name
    for annotation, name in zip(content["annotations"], "ab", strict=True):
        annotation["image_id"] = name
    assert check_coco(content, needs) == ([], [])


def test_missing_fields(check, coco, content):
    for field in ("area", "iscrowd"):  # of an evaluation, by pycocotools
        content["annotations"][0].pop(field)
    coco()
    assert "1 of 2 annotations have no area, iscrowd (ids 1)" in one(check())
    content["annotations"][1].pop("bbox")
    assert "have no bbox" in " ".join(check_coco(content, TRAIN)[0])


def test_run_lengths_need_the_mask_format_bitmask(check, coco, content):
    content["annotations"][0]["segmentation"] = RLE
    coco()
    assert "INPUT.MASK_FORMAT bitmask" in one(check())
    assert not check(INPUT__MASK_FORMAT="bitmask").errors
    evaluated = check(eval_only=True, TEST__EVAL_PERIOD=2)  # without losses
    assert not any("INPUT.MASK_FORMAT" in error for error in evaluated.errors)
    content["annotations"][0]["iscrowd"] = 1  # crowds are not trained on
    for needs in (TRAIN, TEST):
        assert check_coco(content, needs._replace(run_lengths=False))[0] == []


def test_validation_losses_read_masks_as_the_training_does(check, other_coco):
    content = json.loads(other_coco.read_text())
    content["annotations"][0]["segmentation"] = RLE
    other_coco.write_text(json.dumps(content))
    keys = {"DATASETS__TEST": ("other_coco",), "TEST__EVAL_PERIOD": 2}
    assert "INPUT.MASK_FORMAT bitmask" in one(check(**keys))
    assert (
        not check(**keys, TEST__LOSS=False).errors
        and not check(**keys, INPUT__MASK_FORMAT="bitmask").errors
    )


def test_a_config_that_crops_polygons_needs_shapely(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "shapely" else found(name)
    )
    with pytest.raises(MissingPackageError, match="shapely"):
        get_config("new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ_GW.py")


@pytest.mark.parametrize(
    "changes",
    [*({"bbox": box} for box in BAD), {"segmentation": [[1, 2, 3, 4]]}, {"iscrowd": 1}],
)
def test_objects_that_cannot_be_learned(content, changes):
    masks = "bbox" not in changes
    for annotation in content["annotations"]:
        annotation |= {} if masks else {"segmentation": []}
    content["annotations"][1] |= {"area": 25} | changes if "bbox" in changes else changes
    for needs in (TRAIN._replace(masks=masks), TEST._replace(masks=masks)):
        errors, found = check_coco(content, needs)
        assert not errors and len(found) == 1 and "1 of 2 annotations" in found[0]
    content["annotations"][0].update(changes)
    with pytest.raises(DataError, match="nothing to learn"):
        check_coco(content, TRAIN._replace(masks=masks))


@NEEDS
@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[0.5, 0.2, 0.25, 0.125], [0, 0, 1, 1], [1, 1, 5, 5]], "normalized"),
        (
            [[15, 2, 25, 12], [2, 12, 12, 19.5], [1, 1, 5, 5]],
            "x1 y1 x2 y2",
        ),  # the last one fits either way
    ],
)
def test_boxes_in_another_format(needs, boxes, words):
    content = coco_content()
    first = content["annotations"][0]
    content["annotations"] = [
        {**first, "id": number, "bbox": box} for number, box in enumerate(boxes, 1)
    ]
    for each in content["annotations"]:
        each |= {"segmentation": [], "area": each["bbox"][2] * each["bbox"][3]}
    needs = needs._replace(masks=False)
    (error,), _ = check_coco(content, needs)
    assert "2 of 3 annotations" in error and words in error
    content["annotations"] = content["annotations"][1:]  # half of them could be so
    assert not check_coco(content, needs)[0]


@pytest.mark.parametrize("number", [0, -1, "3f2a", 1.5])
def test_an_annotation_without_a_positive_id_counts_as_a_miss(content, number):
    content["annotations"][0]["id"] = number
    assert (
        check_coco(content, TRAIN) == ([], [])
        and "not a positive integer" in check_coco(content, TEST)[1][0]
    )


def test_what_other_evaluators_read_is_not_asked_of_their_datasets(check):
    DatasetCatalog.register(
        "stuff", lambda: [{"file_name": "a.jpg", "sem_seg_file_name": "a.png"}]
    )
    MetadataCatalog.get("stuff").set(evaluator_type="sem_seg", stuff_classes=["sky", "sea"])
    DatasetCatalog.register("rare", list)
    MetadataCatalog.get("rare").set(evaluator_type="lvis", json_file="without_file_names.json")
    changes = {
        "MODEL__META_ARCHITECTURE": "SemanticSegmentor",
        "MODEL__SEM_SEG_HEAD__NUM_CLASSES": 2,
    }
    assert not check(
        **changes, DATASETS__TRAIN=("stuff", "rare"), DATASETS__TEST=("stuff",)
    ).errors


def test_the_records_of_a_function_have_whole_paths(check, coco, monkeypatch):
    folder = coco().parent
    monkeypatch.chdir(folder.parent)
    records = DatasetCatalog.get("tiny_coco")
    for record in records:
        record["file_name"] = os.path.relpath(record["file_name"])
    DatasetCatalog.register("function", lambda: records)
    MetadataCatalog.get("function").set(
        thing_classes=["cat", "dog"], image_root="data", evaluator_type="coco"
    )
    assert not check(DATASETS__TRAIN=("function",), DATASETS__TEST=("function",)).errors
