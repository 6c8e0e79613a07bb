"""``--mix`` and ``--adapt``: evaluation and prediction of a BN detector with other statistics than its own."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from examples.shapes import ShapesConfig, write_shapes
from gw_detectron.errors import ConfigError, NormError, PreflightError, UserError
from gw_detectron.layers import MixedBatchNorm2d, MixedWhitening2d
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.images import find_images, read_image
from gw_detectron.workbench.predict import open_predictor
from gw_detectron.workbench.run import Trainer

from ...loggers import reset_loggers
from ...tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")
BN = {"MODEL__RESNETS__NORM": "BN", "MODEL__RESNETS__WHITEN_POSITIONS": ""}
#: 200 iterations of a detector that is large enough to find shapes
LEARNS = {
    "MODEL__MASK_ON": False,
    "MODEL__FPN__OUT_CHANNELS": 64,
    "MODEL__ROI_BOX_HEAD__CONV_DIM": 64,
    "MODEL__ROI_BOX_HEAD__FC_DIM": 128,
    "MODEL__ROI_HEADS__BATCH_SIZE_PER_IMAGE": 64,
    "MODEL__RPN__PRE_NMS_TOPK_TRAIN": 200,
    "MODEL__RPN__POST_NMS_TOPK_TRAIN": 100,
    "MODEL__RPN__PRE_NMS_TOPK_TEST": 100,
    "MODEL__RPN__POST_NMS_TOPK_TEST": 50,
    "INPUT__MIN_SIZE_TRAIN": "(96,)",
    "INPUT__MIN_SIZE_TEST": 96,
    "SOLVER__IMS_PER_BATCH": 4,
    "SOLVER__BASE_LR": 0.02,
    "SOLVER__MAX_ITER": 200,
    "SOLVER__STEPS": "()",
    "SOLVER__WARMUP_ITERS": 20,
    "SOLVER__CHECKPOINT_PERIOD": 5000,
}


@pytest.fixture(scope="module")
def run(small_dataset, tmp_path_factory):
    """The output folder of a finished run with BN; not to be changed but by evaluations."""
    folder = tmp_path_factory.mktemp("bn")
    main(arguments(folder, **BN, DATASETS__TEST="()"))
    reset_loggers()
    return folder


@pytest.fixture
def photos(shapes):
    return str(shapes / "train")


@pytest.mark.parametrize("change", ["mixed", "adapted"])
def test_an_evaluation_has_both_scores(run, photos, change):
    flag = ("--mix", "0.5") if change == "mixed" else ("--adapt", photos)
    results = main(arguments(run, "--eval-only", "--resume", *flag, **BN))

    assert set(results) == {"bbox", "segm", f"bbox_{change}", f"segm_{change}"}
    assert (run / "inference" / "coco_instances_results.json").is_file()
    assert (run / f"inference_{change}" / "coco_instances_results.json").is_file()
    before, after = (results[name]["AP"] for name in ("bbox", f"bbox_{change}"))
    effect = f"{' '.join(flag)}: bbox AP {before:.1f} -> {after:.1f}, segm AP "
    assert effect in (run / "inference" / "log.txt").read_text()

    plain = main(arguments(run, "--eval-only", "--resume", **BN))
    assert plain["bbox"] == pytest.approx(results["bbox"], nan_ok=True)


@pytest.mark.parametrize("flag", ["--mix", "--adapt"])
def test_a_training_does_not_take_it(tmp_path, flag):
    with pytest.raises(ConfigError, match=f"{flag} .*eval"):
        main(arguments(tmp_path, flag, "0.5"))


def test_photos_are_given_where_they_are_needed(run, tmp_path, photos):
    few = tmp_path / "few"
    shutil.copytree(photos, few)
    for path in find_images(few)[:5]:
        path.write_bytes(path.read_bytes()[:100])
    wrong = {
        "can be read: 7": {"adapt": str(few)},
        "no_such": {"adapt": "no_such"},
        "together": {"adapt": photos, "mix": "0.5"},
    }
    for words, given in wrong.items():
        with pytest.raises(UserError, match=words):
            open_predictor(run, device="cpu", **given)


@pytest.mark.parametrize("given", [{"mix": "0.5"}, {"adapt": "photos"}])
def test_a_detector_that_mixes_already_is_refused(run, photos, tmp_path, given):
    """FrozenBN with MixBN, as fine-tuning by three keys makes it."""
    keys = {
        "MODEL__WEIGHTS": str(run / "model_final.pth"),
        "MODEL__RESNETS__NORM": "FrozenBN",
        "MODEL__RESNETS__WHITEN_NORM": "MixBN",
        "MODEL__RESNETS__WHITEN_POSITIONS": "S1-B1",
    }
    main(arguments(tmp_path, **keys, DATASETS__TEST="()"))

    if "adapt" in given:
        given = {"adapt": photos}
    with pytest.raises(ConfigError, match="trained with statistics of each image"):
        open_predictor(tmp_path, device="cpu", **given)


def test_an_unreadable_photo_is_left_out(run, photos, tmp_path, caplog):
    shutil.copytree(photos, tmp_path / "photos")
    path = find_images(tmp_path / "photos")[0]
    path.write_bytes(path.read_bytes()[:100])

    open_predictor(run, device="cpu", adapt=str(tmp_path / "photos"))

    assert f"a photo is left out: image ('{path}')" in caplog.text


def test_a_predictor_adapts_bn_to_the_photos_of_a_folder(run, photos):
    predictor = open_predictor(run, device="cpu")
    stem = predictor.model.backbone.bottom_up.stem.conv1.norm
    means = []
    stem.register_forward_pre_hook(lambda _, x: means.append(x[0].mean((0, 2, 3))))
    for path in find_images(photos):
        predictor(read_image(path, "RGB"))

    adapted = open_predictor(run, device="cpu", adapt=photos).model
    norm = adapted.backbone.bottom_up.stem.conv1.norm

    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))
    assert torch.equal(norm.weight, stem.weight)


def test_a_detector_without_bn_is_refused(tmp_path, photos):
    gn = {"MODEL__RESNETS__NORM": "GN", "MODEL__RESNETS__WHITEN_POSITIONS": ""}
    main(arguments(tmp_path, **gn, DATASETS__TEST="()"))

    with pytest.raises(NormError, match=r"--mix \('0.5'\): the backbone has no BN"):
        main(arguments(tmp_path, "--eval-only", "--resume", "--mix", "0.5", **gn))
    with pytest.raises(ConfigError, match="--adapt: the model has no BN"):
        main(arguments(tmp_path, "--eval-only", "--resume", "--adapt", photos, **gn))


def test_a_wrong_value_is_refused_before_the_evaluation(run, monkeypatch):
    monkeypatch.setattr(Trainer, "test", lambda *args: pytest.fail("evaluates"))
    for value in ("abc", "2", "GW", "MixGW:beta=1"):
        with pytest.raises(NormError, match="--mix"):
            main(arguments(run, "--eval-only", "--resume", "--mix", value, **BN))


def test_a_bn_run_does_not_resume_as_a_mixed_one(run):
    mixed = {**BN, "MODEL__RESNETS__NORM": "MixGW", "SOLVER__MAX_ITER": 5}

    with pytest.raises(PreflightError, match="another detector"):
        main(arguments(run, "--resume", **mixed))


@pytest.mark.parametrize(
    ("mix", "layer"),
    [("0.5", MixedBatchNorm2d), ("MixGW:alpha=0,mean=0.3", MixedWhitening2d)],
)
def test_a_predictor_mixes_in_the_backbone_only(run, mix, layer):
    photo = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    plain = open_predictor(run, device="cpu")
    mixed = open_predictor(run, device="cpu", mix=mix)

    layers = {
        name
        for name, module in mixed.model.named_modules()
        if isinstance(module, layer)
    }
    assert len(layers) == 20
    assert all(name.startswith("backbone.bottom_up.") for name in layers)
    with torch.no_grad():
        pixels = plain.model.preprocess_image([plain.input(photo)]).tensor
        before = plain.model.backbone(pixels)["p3"]
        after = mixed.model.backbone(pixels)["p3"]
    assert not torch.allclose(before, after, atol=1e-3)


@pytest.mark.slow
def test_ap_is_regained_on_photos_of_another_color(tmp_path):
    """AP 17.2 on photos like those of the training, 18.9 mixed; with less red and green light 3.4, 10.6 mixed.

    With statistics of these photos 18.0.
    """
    shapes = tmp_path / "shapes"
    sizes = {"min_side": 96, "max_side": 128}
    write_shapes(shapes, ShapesConfig(num_train=64, num_val=16, **sizes))
    (shapes / "cast").mkdir()
    for path in (shapes / "val").iterdir():
        pixels = np.asarray(Image.open(path).convert("RGB"))
        light = pixels * np.array([0.35, 0.6, 1.0])
        Image.fromarray(light.astype(np.uint8)).save(shapes / "cast" / path.name)

    def run(*flags, photos="val"):
        annotations = shapes / "annotations"
        data = [
            *("--train-json", f"{annotations}/instances_train.json"),
            *("--train-images", f"{shapes}/train"),
            *("--val-json", f"{annotations}/instances_val.json"),
            *("--val-images", f"{shapes}/{photos}"),
        ]
        results = main(arguments(tmp_path / "run", *flags, *data, **BN, **LEARNS))
        return {name: scores["AP"] for name, scores in results.items()}

    run()
    mixed = ("--eval-only", "--resume", "--mix", "0.5")
    alike = run(*mixed)
    different = run(*mixed, photos="cast")
    adapt = ("--eval-only", "--resume", "--adapt", str(shapes / "cast"))
    different |= run(*adapt, photos="cast")

    assert alike["bbox"] > 10
    assert alike["bbox_mixed"] > alike["bbox"] - 2
    assert different["bbox"] < alike["bbox"] / 2
    assert different["bbox_mixed"] > different["bbox"] + 5
    assert different["bbox_adapted"] > different["bbox"] + 5
