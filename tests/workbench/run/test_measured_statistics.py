"""Weights without BN's statistics, as Detectron2's zoo has them, get those of the training photos."""

import pickle
import shutil

import pytest
import torch
import yaml

from gw_detectron.errors import ConfigError, NormError
from gw_detectron.layers.mixed_norms import MixedNorm
from gw_detectron.weights import load_model, open_detector
from gw_detectron.workbench.commands.train import run_here as main
from gw_detectron.workbench.predict import open_predictor
from gw_detectron.workbench.run.bn_statistics import change_statistics

from ...loggers import reset_loggers
from ...tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")
FROZEN = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__RESNETS__WHITEN_POSITIONS": ""}
MEASURED = "20 layers of MixGW and MixBN got those of 12 training photos"
UNMIXED = "MixBN:alpha=0"


@pytest.fixture(scope="module")
def data(small_dataset):
    """Flags of the small dataset, which the run records."""
    annotations = small_dataset / "annotations"
    return [
        *("--train-json", f"{annotations}/instances_train.json"),
        *("--train-images", f"{small_dataset}/train"),
        *("--val-json", f"{annotations}/instances_val.json"),
        *("--val-images", f"{small_dataset}/val"),
    ]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run with FrozenBN without statistics."""
    folder = tmp_path_factory.mktemp("frozen")
    keys = {**FROZEN, "SOLVER__MAX_ITER": 1, "DATASETS__TEST": "()"}
    main(arguments(folder, "--ignore-preflight", *data, **keys))
    reset_loggers()
    return folder


@pytest.fixture
def zoo(run, tmp_path):
    """Its detector in the form of Detectron2's zoo: statistics are in the scale."""
    tensors = torch.load(run / "model_final.pth")["model"]
    variances = [name for name in tensors if name.endswith("running_var")]
    assert all(tensors[name].sub(1).abs().max() < 1e-4 for name in variances)

    path = tmp_path / "zoo.pkl"
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    content = {"model": arrays, "__author__": "Detectron2 Model Zoo"}
    path.write_bytes(pickle.dumps(content))
    return path


def features(model):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((2, 3, 64, 96), generator=generator)
    with torch.no_grad():
        return model.backbone(images)["p3"]


def from_zoo(weights):
    return {
        "MODEL__RESNETS__NORM": "MixBN",
        "MODEL__RESNETS__WHITEN_POSITIONS": "",
        "MODEL__WEIGHTS": weights,
        "DATASETS__TEST": "()",
    }


def mixed_norms(model):
    return [layer for layer in model.modules() if isinstance(layer, MixedNorm)]


def test_mix_measures_them_and_changes_no_output_but_by_mixing(run):
    plain = open_predictor(run, device="cpu").model
    unmixed = open_predictor(run, device="cpu", mix=UNMIXED).model
    mixed = open_predictor(run, device="cpu", mix="0.5").model

    assert len(mixed_norms(unmixed)) == 20
    assert not any(layer.is_untrained for layer in mixed_norms(unmixed))
    expected = features(plain)
    assert torch.allclose(features(unmixed), expected, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(features(mixed), expected, rtol=0.1, atol=0.1)


def test_evaluation_on_other_photos_measures_those_of_the_training(run, data):
    flags = ("--eval-only", "--resume", "--mix", UNMIXED)
    results = main(arguments(run, *flags, *data[4:], **FROZEN))

    log = (run / "inference" / "log.txt").read_text()
    assert "FrozenBN has the statistics of 12 training photos" in log
    plain, unmixed = results["bbox"], results["bbox_mixed"]
    assert unmixed == pytest.approx(plain, abs=0.1, nan_ok=True)


def test_without_its_training_photos_the_error_says_where_to_name_them(
    run, tmp_path, small_dataset
):
    """As in a run of Detectron2's own trainer, whose script registers its datasets."""
    shutil.copytree(run, tmp_path / "run")
    record = tmp_path / "run" / "datasets.yaml"
    record.unlink()
    cfg, _, checkpoint = open_detector(tmp_path / "run")
    cfg.DATASETS.TRAIN = ("no_such_photos",)
    model = load_model(cfg, checkpoint=checkpoint)

    with pytest.raises(ConfigError, match="'no_such_photos' is not regist") as error:
        change_statistics(model, cfg, mix="0.5", weights=cfg.MODEL.WEIGHTS)
    assert f"name their files in '{record}'" in str(error.value)

    json = small_dataset / "annotations" / "instances_train.json"
    files = {"json": str(json), "images": str(small_dataset / "train")}
    record.write_text(yaml.safe_dump({"train": {"any_name": files}}))
    change_statistics(model, cfg, mix=UNMIXED, weights=cfg.MODEL.WEIGHTS)
    assert len(mixed_norms(model)) == 20


def test_a_wrong_mixture_is_refused_before_any_photo_is_read(run, tmp_path):
    shutil.copy(run / "model_final.pth", tmp_path)
    shutil.copy(run / "config.yaml", tmp_path)
    cfg, _, checkpoint = open_detector(tmp_path)
    model = load_model(cfg, checkpoint=checkpoint)
    cfg.DATASETS.TRAIN = ("no_such_photos",)

    with pytest.raises(NormError, match="1.5"):
        change_statistics(model, cfg, mix="1.5", weights=cfg.MODEL.WEIGHTS)


def test_a_training_from_the_zoo_measures_them(data, zoo, tmp_path):
    folder = tmp_path / "run"
    main(arguments(folder, *data, **from_zoo(zoo), SOLVER__MAX_ITER=1))

    assert MEASURED in (folder / "log.txt").read_text()
    trained = open_predictor(folder, device="cpu").model
    layers = mixed_norms(trained)
    assert len(layers) == 20
    assert not any(layer.is_untrained for layer in layers)
    assert all(layer.alpha == layer.mean == 0.5 for layer in layers)


def test_a_resumed_training_keeps_them(data, zoo, tmp_path):
    folder = tmp_path / "run"
    keys = from_zoo(zoo)
    main(arguments(folder, *data, **keys, SOLVER__MAX_ITER=1))
    first = torch.load(folder / "model_final.pth")["model"]

    main(arguments(folder, "--resume", *data, **keys, SOLVER__MAX_ITER=2))

    assert (folder / "log.txt").read_text().count(MEASURED) == 1
    second = torch.load(folder / "model_final.pth")["model"]
    name = "backbone.bottom_up.stem.conv1.norm.running_var"
    assert torch.equal(first[name], second[name])
