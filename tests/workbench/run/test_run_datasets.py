"""A run on a user's own data: flags, yaml, the record in the run folder, and refused runs."""

import copy
import json
import shutil
from pathlib import Path

import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from PIL import Image

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, PreflightError, UserError
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.commands.train import get_parser
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.dataset import source
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.checks import check_run
from gw_detectron.workbench.run.run_datasets import (
    record_sources,
    use_recorded_datasets,
)

from ...photos import photo_names, write_photos
from ...tiny_run import arguments, config_of


def forget():
    """Leave the datasets of imported modules, as in a new process."""
    for name in set(DatasetCatalog) - BUILT_IN:
        if not name.startswith("gw_synthetic"):
            DatasetCatalog.pop(name)
            MetadataCatalog.pop(name)


BUILT_IN = set(DatasetCatalog)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_photos(folder, photo_names(12))
    write_photos(folder, photo_names(4, first=30), "val.json")
    return folder


def data_flags(side, annotations, images) -> list[str]:
    return [f"--{side}-json", str(annotations), f"--{side}-images", str(images)]


@pytest.fixture
def train_flags(photos) -> list[str]:
    return data_flags("train", photos / "annotations.json", photos / "photos")


@pytest.fixture
def val_flags(photos) -> list[str]:
    return data_flags("val", photos / "val.json", photos / "photos")


@pytest.fixture
def split_flags(train_flags) -> list[str]:
    return [*train_flags, "--val-fraction", "0.3"]


@pytest.fixture
def cfg_of(tmp_path):
    """Return a function that reads the config of a run in ``tmp_path`` with some flags."""

    def read(*flags, **changes):
        args = arguments(tmp_path, *flags, **changes)
        return config_of(args)

    return read


def read_json(path):
    text = path.read_text()
    return json.loads(text)


@pytest.fixture
def content(photos) -> dict:
    return read_json(photos / "annotations.json")


def test_the_flags_set_datasets_and_class_count(cfg_of, train_flags, val_flags):
    cfg = cfg_of(*train_flags, *val_flags)

    assert cfg.DATASETS.TRAIN == ("custom_train",)
    assert cfg.DATASETS.TEST == ("custom_val",)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert cfg.MODEL.RETINANET.NUM_CLASSES == 80
    assert len(DatasetCatalog.get("custom_train")) == 12
    assert len(DatasetCatalog.get("custom_val")) == 4


def test_the_flags_set_the_class_count_of_the_architecture(
    cfg_of, train_flags, val_flags
):
    cfg = cfg_of(*train_flags, *val_flags, MODEL__META_ARCHITECTURE="RetinaNet")

    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 6
    assert cfg.MODEL.RETINANET.NUM_CLASSES == 3


def test_an_evaluation_needs_no_dataset_to_train_on(cfg_of, val_flags):
    cfg = cfg_of("--eval-only", *val_flags)

    assert cfg.DATASETS.TEST == ("custom_val",)
    assert cfg.DATASETS.TRAIN == ("gw_synthetic_train",)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


def without_a_class(content):
    """Return a file without the category of its first object."""
    rare = content["annotations"][0]["category_id"]
    categories = [
        category for category in content["categories"] if category["id"] != rare
    ]
    annotations = [a for a in content["annotations"] if a["category_id"] != rare]
    return {**content, "categories": categories, "annotations": annotations}


def with_run_lengths(content):
    """Return a file with RLE in place of polygons, but for five objects."""
    content = copy.deepcopy(content)
    sizes = {
        image["id"]: (image["height"], image["width"]) for image in content["images"]
    }
    for annotation in content["annotations"][5:]:
        size = sizes[annotation["image_id"]]
        mask = mask_util.merge(mask_util.frPyObjects(annotation["segmentation"], *size))
        mask["counts"] = mask["counts"].decode()
        annotation["segmentation"] = mask
    return content


@pytest.fixture
def flags_of(tmp_path, photos):
    """Return a function that writes a file of photos and returns its flags as ``side``."""

    def flags(side, content):
        path = tmp_path / f"own_{side}.json"
        path.write_text(json.dumps(content))
        return data_flags(side, path, photos / "photos")

    return flags


def test_a_validation_without_a_class_gets_it(cfg_of, content, train_flags, flags_of):
    cfg = cfg_of(*train_flags, *flags_of("val", without_a_class(content)))

    report = check_run(cfg, LazyCheckpoint())

    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert not report.errors
    assert any("custom_val" in w and "categories: no" in w for w in report.warnings)


def test_run_lengths_set_the_mask_format(
    cfg_of, content, train_flags, val_flags, flags_of
):
    runs = with_run_lengths(content)

    def mask_format(*flags):
        return cfg_of(*flags).INPUT.MASK_FORMAT

    assert mask_format(*train_flags, *val_flags) == "polygon"
    assert mask_format(*flags_of("train", runs), *val_flags) == "bitmask"
    # for its losses
    assert mask_format(*train_flags, *flags_of("val", runs)) == "bitmask"


def test_replaced_areas_are_told_once_for_each_file(cfg_of, content, flags_of):
    for annotation in content["annotations"]:
        annotation["area"] = 0
    flags = [*flags_of("train", content), *flags_of("val", content)]
    cfg = cfg_of(*flags)

    report = check_run(cfg, LazyCheckpoint())

    assert not report.errors
    train, val = [warning for warning in report.warnings if "wrong area" in warning]
    assert "own_train.json" in train
    assert "own_val.json" in val


def test_areas_in_a_dataset_of_detectron2_are_refused(
    cfg_of, photos, content, train_flags, val_flags, tmp_path
):
    """Its evaluation reads the file as it is."""
    for annotation in content["annotations"]:
        annotation["area"] = 0
    path = tmp_path / "own.json"
    path.write_text(json.dumps(content))
    register_coco_instances("own", {}, str(path), str(photos / "photos"))
    cfg = cfg_of(*train_flags, *val_flags, DATASETS__TEST="('own',)")

    (error,) = check_run(cfg, LazyCheckpoint()).errors

    assert "'own'" in error
    assert "have an area" in error


@pytest.mark.parametrize(
    "wrong", [{"images": [{"id": 1, "file_name": "a.jpg"}]}, {"categories": []}]
)
def test_a_damaged_json_is_not_taken_for_a_wrong_class_count(
    cfg_of, content, val_flags, flags_of, wrong
):
    flags = flags_of("train", content | wrong)

    cfg = cfg_of(*flags, *val_flags)

    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    errors = check_run(cfg, LazyCheckpoint()).errors
    assert errors
    assert "NUM_CLASSES" not in " ".join(errors)


def test_a_training_needs_a_dataset_to_train_on(cfg_of, photos, val_flags):
    """The config's own would be trained on without a word."""
    own = photos / "val_only.yaml"
    own.write_text("val:\n  custom_val: {json: val.json, images: photos}\n")

    for flags in (val_flags, ["--datasets", str(own)]):
        with pytest.raises(ConfigError, match=rf"^{flags[0]}: .*DATASETS.TRAIN"):
            cfg_of(*flags)
        cfg_of(*flags, DATASETS__TRAIN="('gw_synthetic_train',)")


def test_keys_of_the_command_line_stay(cfg_of, tmp_path, split_flags):
    changes = {
        "DATASETS__TEST": "('custom_train',)",
        "MODEL__ROI_HEADS__NUM_CLASSES": 5,
    }
    output = tmp_path / "run"

    cfg = cfg_of(*split_flags, **changes, OUTPUT_DIR=str(output))

    assert cfg.DATASETS.TEST == ("custom_train",)
    with pytest.raises(PreflightError, match=r"MODEL.ROI_HEADS.NUM_CLASSES \(5\)"):
        Trainer(cfg)
    assert not output.exists()


def test_flags_and_yaml_are_the_same(cfg_of, photos, train_flags, val_flags):
    own = photos / "table.yaml"
    own.write_text(
        "train:\n  table_train: {json: annotations.json, images: photos}\n"
        "val:\n  table_val: {json: val.json, images: photos}\n"
    )

    by_flags = cfg_of(*train_flags, *val_flags, "--dataset", "table")
    by_yaml = cfg_of("--datasets", str(own))

    assert by_yaml == by_flags


@pytest.mark.parametrize(("val", "files"), [("split", 1), ("file", 2)])
def test_a_start_parses_and_measures_each_file_once(
    cfg_of, split_flags, train_flags, val_flags, monkeypatch, val, files
):
    parsed = []
    measured = []
    loads = json.loads
    read = source.read_fingerprint

    def count_parsed(text, *args, **options):
        content = loads(text, *args, **options)
        if isinstance(content, dict) and "annotations" in content:
            parsed.append(content)
        return content

    def count_measured(*contents):
        measured.append(contents)
        return read(*contents)

    monkeypatch.setattr(json, "loads", count_parsed)  # which json.load calls, too
    monkeypatch.setattr(source, "read_fingerprint", count_measured)
    flags = split_flags if val == "split" else [*train_flags, *val_flags]

    trainer = Trainer(cfg_of("--auto", *flags, MODEL__MASK_ON=False))
    with trainer._lock:
        trainer.resume_or_load()
        next(iter(trainer.data_loader))

    assert len(parsed) == files
    assert len(measured) == 2  # training and validation


@pytest.fixture
def begun(cfg_of, tmp_path, split_flags):
    """The folder of a run on 70 % of the photos that has begun; its datasets are forgotten."""
    trainer = Trainer(cfg_of(*split_flags, MODEL__MASK_ON=False))
    with trainer._lock:
        trainer._run.begin()
    forget()
    return tmp_path


@pytest.mark.parametrize("continues", ["--resume", "--eval-only"])
def test_another_split_is_refused_before_anything_is_written(
    cfg_of, begun, train_flags, continues
):
    part = begun / "datasets" / "custom_train.json"
    before = part.read_text()
    flags = [continues, "--config-file", f"{begun}/config.yaml", *train_flags]

    with pytest.raises(ConfigError, match="--val-fraction: .* was trained on"):
        cfg_of(*flags, "--val-fraction", "0.6")

    assert part.read_text() == before


def test_another_split_under_another_name_is_refused(cfg_of, begun, train_flags):
    flags = ["--resume", "--dataset", "other", *train_flags, "--val-fraction", "0.6"]
    with pytest.raises(ConfigError, match=f"'{begun}/config.yaml' was trained on"):
        cfg_of(*flags)


def test_added_images_are_split_by_the_same_rule(cfg_of, begun):
    before = read_json(begun / "datasets" / "custom_train.json")
    more = begun / "more"
    write_photos(more, photo_names(20))
    flags = data_flags("train", more / "annotations.json", more)

    cfg_of("--resume", *flags, "--val-fraction", "0.3")

    records = DatasetCatalog.get("custom_train")
    assert len(records) > len(before["images"])


@pytest.mark.parametrize(
    "text",
    ["null", "3", '["a"]', '{"custom_val": [1]}', '{"custom_val": null}', 10**5 * "["],
    ids=lambda text: text[:20],
)
def test_a_record_of_sources_of_another_form_is_none(begun, text):
    (begun / "sources.json").write_text(text)
    cfg = read_config(begun / "config.yaml")

    use_recorded_datasets(cfg, begun / "config.yaml", str(begun / "inference"))
    record_sources(cfg, str(begun))

    assert source.own_sources(["custom_val"])["custom_val"].notes == []
    assert set(read_json(begun / "sources.json")) == {"custom_train", "custom_val"}


def test_a_run_folder_is_enough_to_evaluate(tmp_path, split_flags, one_thread):
    trained = main(arguments(tmp_path, *split_flags, "--dataset", "table"))
    predictions = tmp_path / "inference" / "coco_instances_results.json"
    first = read_json(predictions)
    predictions.unlink()
    forget()
    args = arguments(tmp_path, "--eval-only")
    args.config_file = f"{tmp_path}/config.yaml"
    args.opts = ["MODEL.WEIGHTS", f"{tmp_path}/model_final.pth"]

    results = main(args)

    assert results.keys() == trained.keys()
    assert first
    assert read_json(predictions) == first
    val = read_json(tmp_path / "datasets" / "table_val.json")
    images = {image["id"] for image in val["images"]}
    assert images.issuperset(box["image_id"] for box in first)
    assert not (tmp_path / "inference" / "datasets").exists()

    forget()  # the folder of the evaluation is one, too
    args.config_file = f"{tmp_path}/inference/config.yaml"
    assert config_of(args).DATASETS.TEST == ("table_val",)
    assert len(DatasetCatalog.get("table_val")) == len(images)


@pytest.mark.parametrize("kind", ["split", "file"])
def test_corrected_labels_are_told_when_a_run_is_evaluated(
    tmp_path, photos, split_flags, train_flags, one_thread, kind
):
    run, data = tmp_path / "run", tmp_path / "data"
    shutil.copytree(photos, data)
    flags = split_flags
    if kind == "file":
        flags = [*train_flags, *data_flags("val", data / "val.json", data / "photos")]
    flags = [word.replace(f"{photos}/", f"{data}/") for word in flags]
    main(arguments(run, *flags, MODEL__MASK_ON=False))
    corrected = data / ("annotations.json" if kind == "split" else "val.json")

    def evaluate():
        forget()
        main(get_parser(evaluation=True).parse_args([str(run), "--num-gpus", "0"]))
        return (run / "inference" / "log.txt").read_text()

    assert "changed since the run" not in evaluate()
    corrected.write_text(corrected.read_text() + " ")
    said = evaluate()

    assert f"'{corrected}' has changed since the run" in said
    assert ("its labels of then" in said) == (kind == "split")


@pytest.fixture
def moved_run(tmp_path, train_flags, photos, one_thread):
    """Flags to evaluate a run whose training photos are gone."""
    moved = tmp_path / "moved"
    shutil.copytree(photos, moved)
    val_flags = data_flags("val", moved / "val.json", moved / "photos")
    run = tmp_path / "run"
    main(arguments(run, *train_flags, *val_flags, MODEL__MASK_ON=False))
    forget()

    record = run / "datasets.yaml"
    record.write_text(record.read_text().replace(f"{photos}/", f"{photos}/gone/"))
    args = arguments(run, "--eval-only", "--resume")
    args.config_file = f"{run}/config.yaml"
    args.opts = []
    return args


def test_an_evaluation_needs_its_own_photos_and_records_its_checkpoint(
    moved_run, tmp_path
):
    inference = tmp_path / "run" / "inference"
    main(moved_run)
    recorded = read_config(inference / "config.yaml").MODEL.WEIGHTS
    assert recorded == f"{tmp_path}/run/model_final.pth"
    assert (inference / "coco_instances_results.json").exists()

    forget()  # a failed evaluation leaves no predictions that a report would judge
    moved = tmp_path / "moved"
    image = read_json(moved / "val.json")["images"][0]
    photo = moved / "photos" / image["file_name"]
    Image.open(photo).save(photo, "PNG")
    content = bytearray(photo.read_bytes())
    pixels = content.index(b"IDAT") + 4
    content[pixels : pixels + 64] = bytes(64)  # all parts of the file are still there
    photo.write_bytes(content)
    with pytest.raises(UserError):
        main(moved_run)
    assert not (inference / "coco_instances_results.json").exists()


def test_a_resumed_training_needs_its_photos(moved_run, photos):
    """Their paths are absolute: the folder of Detectron2's datasets does not matter."""
    moved_run.eval_only = False
    file = f"'{photos}/gone/annotations.json'"
    with pytest.raises(
        PreflightError, match=rf"{file}.*: file not found.* flags"
    ) as raised:
        main(moved_run)
    assert "DETECTRON2_DATASETS" not in str(raised.value)
