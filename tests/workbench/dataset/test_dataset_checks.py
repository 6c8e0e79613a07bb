"""Datasets: classes, images and annotations that cannot be trained on are refused and counted."""

import importlib.util
import json
import math
import os
import shutil

import numpy as np
import pytest
import torch
from detectron2.config import LazyConfig
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import ExifTags, Image

from gw_detectron.config import shipped_configs
from gw_detectron.errors import DataError, MissingPackageError
from gw_detectron.weights import RUN_RECORD_KEY, RunRecord
from gw_detectron.workbench.dataset.annotation_checks import DatasetNeeds
from gw_detectron.workbench.dataset.fingerprint import read_fingerprint

from ..sound_run import coco_content, coco_faults, only_error

TRAIN = DatasetNeeds(training=True, masks=True)
TEST = DatasetNeeds(training=False, masks=True)
NEEDS = pytest.mark.parametrize("needs", [TRAIN, TEST], ids=["training", "evaluation"])

# columns 2 to 11, in each of them the rows 2 to 11
RLE = {"size": [20, 30], "counts": [42, 10, *[10, 10] * 9, 368]}
# empty boxes, and boxes outside of an image of 30 x 20 pixels
BAD = ([2, 2, 0, 5], [2, 2, 5, -1], [-9, 2, 5, 5], [30, 2, 5, 5], [2, 20, 5, 5])


def write(path, content):
    path.write_text(json.dumps(content))


def with_classes(path, *names):
    content = json.loads(path.read_text())
    numbered = zip((5, 9, 12), names, strict=False)
    content["categories"] = [{"id": number, "name": name} for number, name in numbered]
    write(path, content)


@pytest.mark.parametrize("count", [2, 80])
@pytest.mark.parametrize(
    "sets", [{"TRAIN": ("tiny_coco", "other_coco")}, {"TEST": ("other_coco",)}]
)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cat"], "missing: dog"),
        (["cat", "dog", "eel"], "added: eel"),
        (["cow", "dog"], "missing: cat; added: cow"),
        (["dog", "cat"], "another order"),
        (["cat", "cat", "dog"], "added: cat"),
    ],
)
def test_classes_that_differ_are_told_once_whatever_their_number(
    check, other_coco, names, words, sets, count
):
    with_classes(other_coco, *names)
    keys = {f"DATASETS__{key}": value for key, value in sets.items()}

    errors = check(**keys, MODEL__ROI_HEADS__NUM_CLASSES=count).errors

    assert words in errors[0]
    assert "NUM_CLASSES" not in " ".join(errors)


@pytest.mark.parametrize(
    "names", [["cat"], ["dog", "cat"], ["cat", "cow"], ["cat", "dog", "eel"]]
)
def test_an_evaluation_on_other_classes_than_the_checkpoint_knows(
    check, coco, tmp_path, names
):
    with_classes(coco(), *names)
    path = tmp_path / "w.pth"
    keys = {"MODEL__WEIGHTS": str(path), "MODEL__ROI_HEADS__NUM_CLASSES": len(names)}

    def errors(trained):
        record = RunRecord("", 1, trained).state_dict()
        torch.save({"model": {}, RUN_RECORD_KEY: record}, path)
        return " ".join(check(eval_only=True, **keys).errors)

    assert "the checkpoint" in errors({1: "cat", 4: "dog"})
    assert "the checkpoint" not in errors(dict(enumerate(names)))  # ids may differ


NAMES = ["nose", "left_eye", "right_eye"]
EYES = ("left_eye", "right_eye")


@pytest.mark.parametrize(
    ("names", "flips"),
    [
        ([*NAMES, "tail"], []),
        (NAMES[:2], []),
        (["nose", "left_eye", "left_eye"], []),
        (NAMES, [("left_eye", "right_ear")]),
        (NAMES, [("Left_eye", "Right_eye")]),
        (NAMES, [EYES, ("nose", "left_eye")]),
        (NAMES, [EYES, ("right_eye", "nose"), ("nose", "left_eye")]),
        (NAMES, None),
        (NAMES, [EYES]),
    ],
)
def test_names_of_keypoints(check, coco, content, names, flips):
    for annotation in content["annotations"]:
        annotation |= {"keypoints": [3, 4, 2, 5, 6, 1, 0, 0, 0], "num_keypoints": 2}
    coco()
    metadata = MetadataCatalog.get("tiny_coco")
    metadata.set(keypoint_names=names)
    if flips is not None:
        metadata.set(keypoint_flip_map=flips)

    errors = check(
        MODEL__KEYPOINT_ON=True,
        MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS=3,
        TEST__KEYPOINT_OKS_SIGMAS=[0.1] * 3,
    ).errors

    assert bool(errors) is (flips != [EYES])
    assert all("keypoint_names of tiny_coco" in error for error in errors)


@pytest.mark.parametrize("flip", ["horizontal", "none"])
def test_keypoints_without_a_known_side_are_told_where_images_are_mirrored(
    check, coco, content, flip
):
    for annotation in content["annotations"]:
        annotation |= {"keypoints": [3, 4, 2, 5, 6, 1], "num_keypoints": 2}
    coco()
    metadata = MetadataCatalog.get("tiny_coco")
    metadata.set(keypoint_names=["port", "starboard"], keypoint_flip_map=[])

    report = check(
        MODEL__KEYPOINT_ON=True,
        MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS=2,
        TEST__KEYPOINT_OKS_SIGMAS=[0.1] * 2,
        INPUT__RANDOM_FLIP=flip,
    )

    assert not report.errors
    told = [text for text in report.warnings if "no two are known as left" in text]
    assert len(told) == (flip == "horizontal")


def test_names_that_differ_only_in_case_are_a_warning(check, content):
    content["categories"] = [{"id": 5, "name": "Queen"}, {"id": 9, "name": "queen "}]

    warnings = check(DATASETS__TEST=()).warnings

    (warning,) = [text for text in warnings if "only in case" in text]
    assert "'Queen' (1 objects) and 'queen ' (1 objects)" in warning


def test_names_that_look_the_same_are_told_by_their_characters(check, other_coco):
    with_classes(other_coco, "ca\u200bt", "\uff44og")

    (error,) = check(DATASETS__TEST=("other_coco",)).errors

    assert r"'cat' is 'ca\u200bt' there; 'dog' is '\uff44og' there" in error


def test_two_forms_of_a_name_are_a_warning(check, content):
    names = ("caf\xe9", "cafe\u0301")
    content["categories"] = [
        {"id": number, "name": name} for number, name in zip((5, 9), names, strict=True)
    ]

    warnings = check(DATASETS__TEST=()).warnings

    (warning,) = [text for text in warnings if "the form of letters" in text]
    assert r"'caf\xe9' (1 objects) and 'cafe\u0301' (1 objects)" in warning


def test_classes_without_an_object_to_train_on(check, content, other_coco):
    content["categories"].append({"id": 0, "name": "root"})
    write(other_coco, content)
    del content["annotations"][1]
    write(other_coco.with_name("tiny.json"), content)
    changes = {"DATASETS__TEST": ("other_coco",), "MODEL__ROI_HEADS__NUM_CLASSES": 3}

    warnings = check(**changes).warnings

    (warning,) = [text for text in warnings if text.startswith("DATASETS")]
    assert "2 of 3 classes have no object to train on (root, dog)" in warning
    assert check(**changes, eval_only=True).warnings == []


def test_a_dataset_that_is_not_evaluated_by_the_coco_rules(check, coco):
    coco()
    fields = MetadataCatalog.pop("tiny_coco").as_dict()
    fields["evaluator_type"] = "lvis"
    MetadataCatalog.get("tiny_coco").set(**fields)

    error = only_error(check())

    assert "DATASETS.TEST ('tiny_coco')" in error
    assert "'lvis'" in error


def test_rotated_boxes_are_not_evaluated_as_upright_ones(check, coco):
    """Detectron2's COCOEvaluator knows upright boxes only; a training would end in it."""
    coco()
    rotated = {
        "MODEL__MASK_ON": False,
        "MODEL__ANCHOR_GENERATOR__NAME": "RotatedAnchorGenerator",
        "MODEL__PROPOSAL_GENERATOR__NAME": "RRPN",
        "MODEL__RPN__BBOX_REG_WEIGHTS": (1.0,) * 5,
        "MODEL__ROI_HEADS__NAME": "RROIHeads",
        "MODEL__ROI_BOX_HEAD__BBOX_REG_WEIGHTS": (10.0, 10.0, 5.0, 5.0, 1.0),
        "MODEL__ROI_BOX_HEAD__POOLER_TYPE": "ROIAlignRotated",
    }

    error = only_error(check(**rotated))

    assert "'RRPN'" in error
    assert "RotatedCOCOEvaluator" in error


def test_a_missing_folder(check, coco, tmp_path, monkeypatch):
    coco()
    monkeypatch.setenv("DETECTRON2_DATASETS", "/where/data/is")
    (tmp_path / "data" / "images").rename(tmp_path / "moved")

    for error in check().errors:
        assert "data/images'" in error
        assert "/where/data/is" in error


def test_a_missing_file(check, coco, monkeypatch):
    coco().unlink()
    monkeypatch.setenv("DETECTRON2_DATASETS", "/where/data/is")

    for error in check().errors:
        assert "tiny.json" in error
        assert "/where/data/is" in error


def test_missing_images(check, coco, content):
    first = content["images"][0]
    for number in range(6):
        content["images"].append(
            {**first, "id": 9 + number, "file_name": f"c/{number}.jpg"}
        )
    coco()

    error = check().errors[0]

    assert "6 of 8 images are missing" in error
    assert "c/3.jpg and 2 more" in error
    assert "c/4.jpg" not in error


@pytest.mark.parametrize(
    ("turned", "size", "told"),
    [
        (1, (31, 30), "a.jpg' is 30 x 20"),
        (6, (30, 20), "a.jpg' is 20 x 30"),
        (3, (20, 30), "a.jpg' is 30 x 20"),
        (3, (30, 20), ""),
        (6, (20, 30), ""),
    ],
)
def test_sizes_of_images_by_their_orientation(
    check, coco, content, tmp_path, turned, size, told
):
    width, height = size
    content["images"][0] |= {"width": width, "height": height}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turned
    Image.new("RGB", (30, 20)).save(tmp_path / "data" / "images" / "a.jpg", exif=exif)
    coco()

    report = check()

    assert not report.warnings
    assert bool(report.errors) is bool(told)
    assert all(told in error for error in report.errors)


@pytest.mark.parametrize("copy", ["same name", "other name", "other dataset"])
def test_copies_of_images(check, content, other_coco, tmp_path, copy):
    changes = {}
    if copy == "same name":
        content["images"][1]["file_name"] = "a.jpg"
    elif copy == "other name":
        images = tmp_path / "data" / "images"
        shutil.copy(images / "a.jpg", images / "sub" / "b.jpg")
    else:
        changes["DATASETS__TEST"] = ("other_coco",)
    write(other_coco.with_name("tiny.json"), content)

    report = check(**changes)
    evaluated = check(eval_only=True, DATASETS__TEST=("other_coco",))

    assert not report.errors
    (warning,) = {warning for warning in report.warnings if "copies" in warning}
    assert "a.jpg of tiny_coco" in warning
    assert "copies" not in " ".join(evaluated.warnings)


def test_images_that_cannot_be_read(check, coco, tmp_path):
    images = tmp_path / "data" / "images"
    (images / "a.jpg").write_text("no image")
    deep = Image.fromarray(np.full((20, 30), 700, np.uint16))
    deep.save(images / "sub" / "b.jpg", format="PNG")  # Pillow would cut it off at 255
    coco()

    first, second = check(DATASETS__TEST=()).errors

    assert "1 of 2 checked images cannot be read: not an image file" in first
    assert "a.jpg" in first
    assert "more than 8 bits" in second
    assert "Fix: set INPUT.PERCENTILES" in second


def test_images_that_are_read_in_part(check, coco, tmp_path):
    pages = [Image.new("RGB", (30, 20), (shade, 0, 0)) for shade in (1, 2, 3)]
    path = tmp_path / "data" / "images" / "a.jpg"
    pages[0].save(path, "TIFF", save_all=True, append_images=pages[1:])
    coco()

    report = check(DATASETS__TEST=())

    assert not report.errors
    (warning,) = report.warnings
    assert "not read whole (a.jpg: pages 2 to 3)" in warning


@pytest.mark.parametrize(
    "name",
    ["A.JPG", "a.png", "photos/a.jpg", "C:\\photos\\a.jpg", "sub%20/a.jpg"],
)
def test_a_missing_image_is_named_with_the_one_it_may_mean(check, coco, content, name):
    content["images"][0]["file_name"] = name
    coco()

    assert "(there is 'a.jpg')" in check().errors[0]


@pytest.mark.parametrize("space", ["\u202f", "\u00a0"])
def test_spaces_of_macos_are_named(check, coco, content, space):
    content["images"][0]["file_name"] = "at 9.41 PM.jpg"
    photos = coco().with_name("images")
    (photos / "a.jpg").rename(photos / f"at 9.41{space}PM.jpg")

    assert "(there is 'at 9.41\\" in check().errors[0]


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

    assert "tiny.json'" in error
    assert "Fix: " in error


# list, index, changes: Detectron2 or pycocotools would fail, perhaps after hours
MALFORMED = [
    ("images", 0, {"id": [1]}),
    ("images", 0, {"id": 2}),
    ("images", 0, {"file_name": None}),
    ("images", 0, {"file_name": ["a.jpg"]}),
    ("categories", 0, {"name": 7}),
    ("categories", 1, {"name": None}),
    ("images", 0, {"height": math.nan}),
    ("categories", 0, {"name": "\ud800"}),
    ("categories", 0, {"name": "\x1b[31mcat"}),
    ("categories", 0, {"name": " "}),
    ("categories", 0, {"name": "cat" * 100}),
    ("annotations", 0, {"bbox": "0011"}),
    ("annotations", 0, {"segmentation": [[1, "2", 3, 4, 5, 6]]}),
]


@NEEDS
@pytest.mark.parametrize(("kind", "index", "changes"), MALFORMED)
def test_a_malformed_record_is_shown(kind, index, changes, needs):
    content = coco_content()
    content[kind][index] |= changes

    with pytest.raises(DataError) as raised:
        coco_faults(content, needs)

    assert len(str(raised.value)) < 300


@NEEDS
@pytest.mark.parametrize("kind", ["images", "categories"])
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (None, "2^53"),
        (math.nan, "2^53"),
        (-math.inf, "2^53"),
        (2**53 + 1, "2^53"),
        (10**400, "2^53"),
        ([7], "2^53"),
        ({}, "2^53"),
        ("7", "some texts"),
    ],
)
def test_ids_that_the_evaluation_cannot_store_are_refused(kind, number, words, needs):
    content = coco_content()
    content[kind][0]["id"] = number

    with pytest.raises(DataError) as raised:
        coco_faults(content, needs)

    assert words in str(raised.value)
    assert str(raised.value).endswith("Fix: number them from 1.")


@NEEDS
@pytest.mark.parametrize(
    ("kind", "record"), [("images", {}), ("categories", {}), ("annotations", 3)]
)
def test_a_record_of_another_kind_is_refused(kind, record, needs):
    content = coco_content()
    content[kind][0] = record

    with pytest.raises(DataError):
        coco_faults(content, needs)


FAULTS = [
    ({"image_id": 77}, "image_id"),
    ({"category_id": 77}, "category_id"),
    ({"bbox": [1, 2, 3]}, "four numbers"),
    ({"bbox": [1, 2, 3, math.nan]}, "four numbers"),
    ({"bbox": [0, 0, 10**400, 1]}, "four numbers"),
    ({"segmentation": {"size": [20, 30], "counts": [10**12]}}, "another size"),
    ({"segmentation": {"size": [10**6] * 2, "counts": "PP"}}, "another size"),
    ({"segmentation": {"size": None}}, "another size"),
    ({"segmentation": "text"}, "flat list"),
    ({"segmentation": []}, "MODEL.MASK_ON False"),
]


@NEEDS
@pytest.mark.parametrize(("changes", "words"), FAULTS)
def test_a_fault_is_counted_and_named(changes, words, needs):
    content = coco_content()
    annotation = content["annotations"][1]
    annotation |= changes

    (error,), warnings = coco_faults(content, needs)

    assert error.startswith("1 of 2 annotations")
    assert words in error
    assert f"ids {annotation['id']}" in error
    assert not warnings


@NEEDS
def test_two_categories_of_the_same_name_are_a_warning(needs):
    content = coco_content()
    content["categories"][1]["name"] = "dog"

    errors, (warning,) = coco_faults(content, needs)

    assert not errors
    assert "one name (dog)" in warning


@NEEDS
def test_images_may_have_names_as_ids(needs):
    content = coco_content()
    for image, annotation in zip(
        content["images"], content["annotations"], strict=True
    ):
        image["id"] = annotation["image_id"] = image["file_name"]

    assert coco_faults(content, needs) == ([], [])


def test_missing_fields(check, coco, content):
    first, second = content["annotations"]
    del first["area"], first["iscrowd"]  # which pycocotools reads
    coco()
    assert "1 of 2 annotations have no area, iscrowd (ids 1)" in only_error(check())

    del second["bbox"]
    (error,), _ = coco_faults(content, TRAIN)
    assert "have no bbox" in error


def test_run_lengths_need_the_mask_format_bitmask(check, coco, content):
    content["annotations"][0]["segmentation"] = RLE
    coco()

    assert "INPUT.MASK_FORMAT bitmask" in only_error(check())
    assert not check(INPUT__MASK_FORMAT="bitmask").errors

    evaluated = check(eval_only=True, TEST__EVAL_PERIOD=2)  # without losses
    assert "INPUT.MASK_FORMAT" not in only_error(evaluated)


@NEEDS
def test_run_lengths_of_crowds_need_no_bitmask(needs):
    content = coco_content()
    content["annotations"][0] |= {"segmentation": RLE, "iscrowd": 1}

    errors, _ = coco_faults(content, needs._replace(run_lengths=False))

    assert errors == []


def test_validation_losses_read_masks_as_the_training_does(check, other_coco):
    content = json.loads(other_coco.read_text())
    content["annotations"][0]["segmentation"] = RLE
    write(other_coco, content)
    keys = {"DATASETS__TEST": ("other_coco",), "TEST__EVAL_PERIOD": 2}

    assert "INPUT.MASK_FORMAT bitmask" in only_error(check(**keys))
    assert not check(**keys, TEST__LOSS=False).errors
    assert not check(**keys, INPUT__MASK_FORMAT="bitmask").errors


def test_a_config_that_crops_polygons_needs_shapely(monkeypatch):
    find_spec = importlib.util.find_spec

    def without_shapely(name):
        return None if name == "shapely" else find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_shapely)

    with pytest.raises(MissingPackageError, match="shapely"):
        LazyConfig.load(
            str(shipped_configs()["new_baselines/mask_rcnn_R_50_FPN_50ep_LSJ_GW.py"])
        )


def assert_not_learned(changes, needs):
    """Change one of two annotations, which is a warning, then both, which leaves no object."""
    content = coco_content()
    first, second = content["annotations"]
    second |= changes

    errors, (warning,) = coco_faults(content, needs)

    assert not errors
    assert "1 of 2 annotations" in warning

    assert len(read_fingerprint(content).boxes) == 1
    first |= changes
    assert len(read_fingerprint(content).boxes) == 0


def test_a_dataset_without_objects(check, coco, content):
    for annotation in content["annotations"]:
        annotation["iscrowd"] = 1
    coco()

    report = check()

    assert "nothing to learn from" in only_error(report)
    assert any("no object to evaluate" in warning for warning in report.warnings)


@NEEDS
@pytest.mark.parametrize("box", BAD)
def test_boxes_that_cannot_be_learned(box, needs):
    changes = {"bbox": box, "segmentation": [], "area": 25}
    assert_not_learned(changes, needs._replace(masks=False))


@NEEDS
@pytest.mark.parametrize("changes", [{"segmentation": [[1, 2, 3, 4]]}, {"iscrowd": 1}])
def test_masks_that_cannot_be_learned(changes, needs):
    assert_not_learned(changes, needs)


@NEEDS
@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([[0.5, 0.2, 0.25, 0.125], [0, 0, 1, 1], [1, 1, 5, 5]], "normalized"),
        # the last one fits either way
        ([[15, 2, 25, 12], [2, 12, 12, 19.5], [1, 1, 5, 5]], "x1 y1 x2 y2"),
    ],
)
def test_boxes_in_another_format(needs, boxes, words):
    content = coco_content()
    annotations = [
        {
            "id": number,
            "image_id": 1,
            "category_id": 5,
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": 0,
        }
        for number, box in enumerate(boxes, 1)
    ]
    needs = needs._replace(masks=False)

    content["annotations"] = annotations
    (error,), _ = coco_faults(content, needs)
    assert "2 of 3 annotations" in error
    assert words in error

    content["annotations"] = annotations[1:]  # half of them could be so
    errors, _ = coco_faults(content, needs)
    assert not errors


@pytest.mark.parametrize("number", [0, -1, "3f2a", 1.5])
def test_an_annotation_without_a_positive_id_counts_as_a_miss(content, number):
    content["annotations"][0]["id"] = number

    _, (warning,) = coco_faults(content, TEST)

    assert "not a positive integer" in warning
    assert coco_faults(content, TRAIN) == ([], [])


def test_fields_of_coco_are_not_asked_of_datasets_with_other_evaluators(check):
    records = [{"file_name": "a.jpg", "sem_seg_file_name": "a.png"}]
    DatasetCatalog.register("stuff", lambda: records)
    MetadataCatalog.get("stuff").set(
        evaluator_type="sem_seg", stuff_classes=["sky", "sea"]
    )
    DatasetCatalog.register("rare", list)
    MetadataCatalog.get("rare").set(
        evaluator_type="lvis", json_file="without_file_names.json"
    )

    report = check(
        MODEL__META_ARCHITECTURE="SemanticSegmentor",
        MODEL__SEM_SEG_HEAD__NUM_CLASSES=2,
        DATASETS__TRAIN=("stuff", "rare"),
        DATASETS__TEST=("stuff",),
    )

    assert not report.errors


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

    report = check(DATASETS__TRAIN=("function",), DATASETS__TEST=("function",))

    assert not report.errors
