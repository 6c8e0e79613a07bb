"""ImageNet weights in a run, also through ``gw://``: loaded tensors are reported, missing ones are an error."""

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from gw_detectron.engine import main
from gw_detectron.errors import PartialLoadError, PreflightError
from gw_detectron.weights import convert_file

from ..tiny_run import arguments

BASELINE = {"MODEL__RESNETS__WHITEN_POSITIONS": "", "SOLVER__MAX_ITER": 1, "DATASETS__TEST": "()"}

pytestmark = pytest.mark.usefixtures("small_dataset")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def resnet18(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), path)
    return path


def log_of(output) -> str:
    return (output / "log.txt").read_text()


def test_an_unconverted_file_is_converted_and_loaded_whole(tmp_path, resnet18):
    main(arguments(tmp_path / "out", MODEL__WEIGHTS=f"gw://file/{resnet18}", **BASELINE))
    assert "backbone: 100/100 tensors; FPN and heads start new, as expected" in log_of(tmp_path / "out")


def test_weights_with_other_norm_positions_stop_the_run(tmp_path, resnet18):
    options = {**BASELINE, "MODEL__RESNETS__WHITEN_POSITIONS": "S1-B2"}
    weights = f"gw://file/{resnet18}"
    with pytest.raises(PreflightError, match=r"trained with other norms: 9 layers differ"):
        main(arguments(tmp_path / "out", MODEL__WEIGHTS=weights, **options))
    main(arguments(tmp_path / "partial", "--allow-partial", MODEL__WEIGHTS=weights, **options))
    assert "unexpected tensors in the checkpoint" in log_of(tmp_path / "partial")


def test_converted_weights_require_their_preprocessing(tmp_path, resnet18):
    convert_file(resnet18, tmp_path / "r18.pkl")
    with pytest.raises(PreflightError, match=r"INPUT.FORMAT RGB"):
        main(arguments(tmp_path / "out", MODEL__WEIGHTS=tmp_path / "r18.pkl", INPUT__FORMAT="BGR", **BASELINE))


def test_evaluation_with_backbone_weights_alone_is_refused(tmp_path, resnet18):
    options = {**BASELINE, "DATASETS__TEST": "('gw_synthetic_val',)", "MODEL__WEIGHTS": f"gw://file/{resnet18}"}
    with pytest.raises(PartialLoadError, match="not a whole detector"):
        main(arguments(tmp_path / "out", "--eval-only", **options))


def test_evaluation_with_another_number_of_classes_names_the_shapes(tmp_path):
    main(arguments(tmp_path, DATASETS__TEST="()"))
    options = {"MODEL__WEIGHTS": f"{tmp_path}/model_final.pth", "MODEL__ROI_HEADS__NUM_CLASSES": 3}
    message = r"\d tensors have other shapes .*\(7, \d+\), not \(4, \d+\).*Fix: set NUM_CLASSES"
    with pytest.raises(PartialLoadError, match=message):
        main(arguments(tmp_path, "--eval-only", "--ignore-preflight", **options))


def test_safetensors_go_through_gw_file(tmp_path, resnet18):
    path = tmp_path / "r18.safetensors"
    save_file(torch.load(resnet18, weights_only=True), path)
    with pytest.raises(PreflightError, match=rf"gw://file/{path}"):
        main(arguments(tmp_path / "out", MODEL__WEIGHTS=path, **BASELINE))
    main(arguments(tmp_path / "out", MODEL__WEIGHTS=f"gw://file/{path}", **BASELINE))
    assert "backbone: 100/100 tensors" in log_of(tmp_path / "out")
