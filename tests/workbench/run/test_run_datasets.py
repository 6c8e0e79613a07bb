"""A run on a user's own data: flags, yaml, the record in the run folder, and what a refused run says."""

import json
import shutil
from pathlib import Path

import pycocotools.mask as mask_util
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, PreflightError, UserError
from gw_detectron.weights import LazyCheckpoint
from gw_detectron.workbench.run import Trainer, main
from gw_detectron.workbench.run.config_checks import preflight
from gw_detectron.workbench.run.train import run_config

from ...photos import photo_names, write_photos
from ...tiny_run import arguments


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


@pytest.fixture
def train_flags(photos) -> list[str]:
    return ["--train-json", f"{photos}/annotations.json", "--train-images", f"{photos}/photos"]


@pytest.fixture
def val_flags(photos) -> list[str]:
    return ["--val-json", f"{photos}/val.json", "--val-images", f"{photos}/photos"]


@pytest.fixture
def split_flags(train_flags) -> list[str]:
    return [*train_flags, "--val-fraction", "0.3"]


def test_the_flags_set_datasets_and_class_count(tmp_path, train_flags, val_flags):
    cfg = run_config(arguments(tmp_path, *train_flags, *val_flags))
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("custom_train",), ("custom_val",))
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3 and cfg.MODEL.RETINANET.NUM_CLASSES == 80
    assert (
        len(DatasetCatalog.get("custom_train")) == 12
        and len(DatasetCatalog.get("custom_val")) == 4
    )
    cfg = run_config(
        arguments(
            tmp_path,
            *train_flags,
            *val_flags,
            "--dataset",
            "table",
            MODEL__META_ARCHITECTURE="RetinaNet",
        )
    )
    assert (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST) == (("table_train",), ("table_val",))
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 6 and cfg.MODEL.RETINANET.NUM_CLASSES == 3
    cfg = run_config(arguments(tmp_path, "--eval-only", *val_flags))
    assert cfg.DATASETS.TEST == ("custom_val",) and cfg.DATASETS.TRAIN == (
        "gw_synthetic_train",
    )
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3


def test_what_a_json_lacks_or_needs_is_done_in_the_run(tmp_path, photos, train_flags):
    """Two of three classes in the validation; run lengths for a config of polygons."""
    content = json.loads((photos / "annotations.json").read_text())
    rare = content["annotations"][0]["category_id"]
    part = {
        **content,
        "categories": [each for each in content["categories"] if each["id"] != rare],
    }
    part["annotations"] = [
        each for each in content["annotations"] if each["category_id"] != rare
    ]
    (tmp_path / "part.json").write_text(json.dumps(part))
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    for each in content["annotations"][5:]:
        each["segmentation"] = mask_util.merge(
            mask_util.frPyObjects(each["segmentation"], *sizes[each["image_id"]])
        )
        each["segmentation"]["counts"] = each["segmentation"]["counts"].decode()
    (tmp_path / "runs.json").write_text(json.dumps(content))
    flags = ["--val-json", str(tmp_path / "part.json"), "--val-images", f"{photos}/photos"]
    cfg = run_config(arguments(tmp_path, *train_flags, *flags))
    assert cfg.INPUT.MASK_FORMAT == "polygon"
    args = arguments(
        tmp_path, "--train-json", str(tmp_path / "runs.json"), *train_flags[2:], *flags
    )
    cfg = run_config(args)
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3 and cfg.INPUT.MASK_FORMAT == "bitmask"
    found = preflight(cfg, LazyCheckpoint())
    assert not found.errors and any(
        "custom_val" in each and "categories: no" in each for each in found.warnings
    )
    runs = ["--val-json", str(tmp_path / "runs.json"), "--val-images", f"{photos}/photos"]
    assert (
        run_config(arguments(tmp_path, *train_flags, *runs)).INPUT.MASK_FORMAT == "bitmask"
    )  # for its losses


@pytest.mark.parametrize(
    "wrong", [{"images": [{"id": 1, "file_name": "a.jpg"}]}, {"categories": []}]
)
def test_a_damaged_json_is_not_taken_for_a_wrong_class_count(
    tmp_path, photos, val_flags, wrong
):
    content = json.loads((photos / "annotations.json").read_text())
    (tmp_path / "wrong.json").write_text(json.dumps(content | wrong))
    flags = [
        "--train-json",
        str(tmp_path / "wrong.json"),
        "--train-images",
        f"{photos}/photos",
        *val_flags,
    ]
    cfg = run_config(arguments(tmp_path, *flags))
    assert cfg.MODEL.ROI_HEADS.NUM_CLASSES == 3
    assert not any("NUM_CLASSES" in error for error in preflight(cfg, LazyCheckpoint()).errors)


def test_a_training_needs_a_dataset_to_train_on(tmp_path, photos, val_flags):
    """The config's own would be trained on without a word."""
    (photos / "val_only.yaml").write_text(
        "val:\n  custom_val: {json: val.json, images: photos}\n"
    )
    for flags in (val_flags, ["--datasets", str(photos / "val_only.yaml")]):
        with pytest.raises(ConfigError, match=rf"^{flags[0]}: .*DATASETS.TRAIN"):
            run_config(arguments(tmp_path, *flags))
        run_config(arguments(tmp_path, *flags, DATASETS__TRAIN="('gw_synthetic_train',)"))


def test_keys_of_the_command_line_stay(tmp_path, split_flags):
    changes = {"DATASETS__TEST": "('custom_train',)", "MODEL__ROI_HEADS__NUM_CLASSES": 5}
    args = arguments(tmp_path / "run", *split_flags, **changes)
    assert run_config(args).DATASETS.TEST == ("custom_train",)
    args.opts.insert(0, "--")  # which argparse keeps
    assert run_config(args).DATASETS.TEST == ("custom_train",)
    with pytest.raises(PreflightError, match=r"MODEL.ROI_HEADS.NUM_CLASSES \(5\)"):
        Trainer(run_config(args))
    assert not (tmp_path / "run").exists()


def test_flags_and_yaml_are_the_same(tmp_path, photos, train_flags, val_flags):
    from_flags = run_config(arguments(tmp_path, *train_flags, *val_flags, "--dataset", "table"))
    (photos / "table.yaml").write_text(
        "train:\n  table_train: {json: annotations.json, images: photos}\n"
        "val:\n  table_val: {json: val.json, images: photos}\n"
    )
    assert (
        run_config(arguments(tmp_path, "--datasets", str(photos / "table.yaml"))) == from_flags
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--val-fraction 0.1", "--train-json"),
        ("--val-json {1}", "--val-images"),
        ("--train-json {1} --train-images {0}", "--val-json or --val-fraction"),
        ("--train-json {1} --train-images {0} --val-fraction 1", r"--val-fraction \(1.0\)"),
        (
            "--train-json {1} --train-images {0} --val-fraction 0.1 --dataset coco_2017",
            "'coco_2017_train'",
        ),
        ("--datasets d.yaml --val-fraction 0.1", "--val-fraction"),
    ],
)
def test_flags_that_do_not_fit(tmp_path, photos, flags, named):
    with pytest.raises(ConfigError, match=named):
        run_config(
            arguments(tmp_path, *flags.format(photos / "photos", photos / "val.json").split())
        )


def test_another_split_is_refused_before_anything_is_written(
    tmp_path, train_flags, split_flags, capsys
):
    Trainer(run_config(arguments(tmp_path, *split_flags, MODEL__MASK_ON=False)))
    part = tmp_path / "datasets" / "custom_train.json"
    before = part.read_text()
    larger = [*train_flags, "--val-fraction", "0.6"]
    config = ["--config-file", f"{tmp_path}/config.yaml"]
    for given in (["--resume", *larger], ["--eval-only", *config, *larger]):
        forget()
        with pytest.raises(ConfigError, match=r"--val-fraction \(0.6\)"):
            run_config(arguments(tmp_path, *given))
        assert part.read_text() == before

    copy = str(shutil.copy(part, tmp_path / "copy.json"))
    forget()
    with pytest.raises(ConfigError, match="was trained on . of the images"):
        run_config(arguments(tmp_path, "--resume", "--dataset", "other", *larger))
    for words, path, warnings in (
        (["--eval-only", *config], str(part), 0),
        (["--eval-only", *config], copy, 1),
        (
            ["--resume", *train_flags],
            copy,
            1,
        ),  # as the first start, whose checks may have warned
    ):
        forget()
        flags = ["--val-json", path, "--val-images", train_flags[3]]
        run_config(arguments(tmp_path, *words, "--dataset", "other", *flags))
        assert capsys.readouterr().out.count("was trained on") == warnings

    forget()  # added images are sorted by the same rule
    write_photos(tmp_path / "more", photo_names(20))
    flags = [
        *split_flags,
        "--train-json",
        f"{tmp_path}/more/annotations.json",
        "--train-images",
        f"{tmp_path}/more",
    ]
    run_config(arguments(tmp_path, "--resume", *flags))
    assert len(DatasetCatalog.get("custom_train")) > len(json.loads(before)["images"])


def test_a_run_folder_is_enough_to_evaluate(tmp_path, split_flags, one_thread):
    trained = main(arguments(tmp_path, *split_flags, "--dataset", "table"))
    predictions = tmp_path / "inference" / "coco_instances_results.json"
    first = predictions.read_text()
    predictions.unlink()
    parts = {
        name: json.loads((tmp_path / "datasets" / f"table_{name}.json").read_text())
        for name in ("train", "val")
    }
    assert sum(len(part["images"]) for part in parts.values()) == 12
    assert {box["image_id"] for box in json.loads(first)} <= {
        image["id"] for image in parts["val"]["images"]
    }

    forget()
    args = arguments(tmp_path, "--eval-only")
    args.config_file, args.opts = (
        f"{tmp_path}/config.yaml",
        ["MODEL.WEIGHTS", f"{tmp_path}/model_final.pth"],
    )
    assert main(args).keys() == trained.keys() == {"bbox", "segm"}
    assert json.loads(predictions.read_text()) == json.loads(first) != []
    assert not (tmp_path / "inference" / "datasets").exists()

    forget()  # the folder of the evaluation is one too
    args.config_file = f"{tmp_path}/inference/config.yaml"
    assert run_config(args).DATASETS.TEST == ("table_val",)
    assert len(DatasetCatalog.get("table_val")) == len(parts["val"]["images"])


def test_an_evaluation_needs_its_own_photos_and_records_its_checkpoint(
    tmp_path, train_flags, photos, one_thread
):
    """The training photos may be elsewhere by then."""
    moved = tmp_path / "moved"
    shutil.copytree(photos, moved)
    flags = [*train_flags, "--val-json", f"{moved}/val.json", "--val-images", f"{moved}/photos"]
    run = tmp_path / "run"
    main(arguments(run, *flags, MODEL__MASK_ON=False))
    record = run / "datasets.yaml"
    record.write_text(record.read_text().replace(f"{photos}/", f"{photos}/gone/"))
    predictions = run / "inference" / "coco_instances_results.json"

    forget()
    args = arguments(run, "--eval-only", "--resume")
    args.config_file, args.opts = f"{run}/config.yaml", []
    main(args)
    assert (
        f"{run}/model_final.pth" == read_config(run / "inference" / "config.yaml").MODEL.WEIGHTS
    )
    assert predictions.exists()

    forget()  # a failed evaluation leaves no predictions that a report would judge
    image = json.loads((moved / "val.json").read_text())["images"][0]["file_name"]
    content = (moved / "photos" / image).read_bytes()
    (moved / "photos" / image).write_bytes(
        content[: len(content) // 2]
    )  # its size can still be read
    with pytest.raises(UserError):
        main(args)
    assert not predictions.exists()

    forget()
    args.eval_only = False
    with pytest.raises(
        PreflightError, match=f"'{photos}/gone/annotations.json'.: file not found"
    ):
        main(args)
