"""What is said of whitening layers, against NumPy; the hook of a training; a model on images."""

import logging

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from PIL import Image

from gw_detectron.analysis import WhiteningWatch, analyze_layers
from gw_detectron.analysis.spectra import REDUCTIONS, reduce_spectra, spectra, whitening_layers
from gw_detectron.checkpoint import PartialLoadError
from gw_detectron.config import read_config
from gw_detectron.layers import BatchWhitening2d, GroupWhitening2d

from ..tiny_run import CONFIG, OPTS


def correlated(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    mix = torch.randn(shape[1], shape[1], generator=generator)
    return torch.einsum("oc,nc...->no...", mix, x) + 2


def numpy_numbers(rows: np.ndarray, whitened: np.ndarray, eps: float) -> dict[str, float]:
    """From the matrix that a layer gets and the one it makes of it; the latter is W times the centred former."""
    centred = rows - rows.mean(1, keepdims=True)
    s = centred @ centred.T / rows.shape[1] + eps * np.eye(len(rows))
    w = np.linalg.lstsq(centred.T, whitened.T, rcond=None)[0].T
    values, vectors = np.linalg.eigh(s)
    exact = vectors / np.sqrt(values) @ vectors.T
    after = w @ s @ w.T
    return {
        "lambda_min": values[0],
        "lambda_max": values[-1],
        "trace": np.trace(s),
        "condition_before": np.linalg.cond(s),
        "condition_after": np.linalg.cond(after),
        "residual": np.linalg.norm(after - np.eye(len(s))) / np.sqrt(len(s)),
        "distance": np.linalg.norm(w - exact) / np.linalg.norm(exact),
    }


def check(layer, x, matrices, eps=1e-5):
    found = spectra(layer, x)
    assert all(len(found[name]) == len(matrices) for name in REDUCTIONS)
    for place, (before, after) in enumerate(matrices):
        for name, value in numpy_numbers(before, after, eps).items():
            assert float(found[name][place]) == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("solver", ["newton", "zca"])
def test_group_whitening(solver):
    layer = GroupWhitening2d(12, num_groups=4, solver=solver, eps=1e-2)
    x = correlated(3, 12, 5, 4).double()
    y = layer(x).detach()
    pairs = [(a.reshape(4, -1).numpy(), b.reshape(4, -1).numpy()) for a, b in zip(x, y, strict=True)]
    check(layer, x, pairs, eps=1e-2)
    assert len(spectra(layer, x, samples=2)["trace"]) == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("running", ["matrix", "covariance"])
def test_batch_whitening(training, running):
    layer = BatchWhitening2d(5, channels_per_group=3, running=running, momentum=0.5)
    for seed in (1, 2):
        layer(correlated(4, 5, 6, seed=seed))
    layer.double().train(training)
    x = correlated(4, 5, 6).double()
    rows = x.transpose(0, 1).flatten(1)
    with torch.no_grad():
        y = layer(x).transpose(0, 1).flatten(1)
    y = y - y.mean(1, keepdim=True)  # in evaluation it is the running mean that is taken away
    pairs = [(rows[:3].numpy(), y[:3].numpy()), (rows[3:].numpy(), y[3:].numpy())]
    check(layer, x, pairs)


def test_singular_and_empty_input():
    layer = GroupWhitening2d(8, num_groups=8)
    numbers = reduce_spectra([spectra(layer, torch.zeros(2, 8, 3)), spectra(layer, torch.empty(0, 8, 3))])
    assert all(np.isfinite(value) for value in numbers.values())
    assert reduce_spectra([spectra(layer, torch.empty(0, 8, 3))]) == dict.fromkeys(REDUCTIONS)
    assert reduce_spectra([spectra(GroupWhitening2d(8, 8, solver="cholesky"), correlated(2, 8, 9))])["distance"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_changes_nothing(dtype):
    layer = GroupWhitening2d(8, num_groups=4)
    x = correlated(2, 8, 6, 6) * 200  # whose squares float16 cannot hold
    expected = spectra(layer, x)
    with torch.autocast("cpu", dtype):
        found = spectra(layer, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "layer", [GroupWhitening2d(8, 4, solver="standardize"), BatchWhitening2d(8, channels_per_group=8).eval()]
)
def test_an_input_whose_covariance_overflows(layer):
    x = correlated(2, 8, 6, 6).div(100).clamp(-1, 1) * 1e20
    assert torch.isfinite(layer(x)).all()
    with pytest.raises(FloatingPointError, match=r"values reach .*e\+\d\d, overflows torch.float32"):
        spectra(layer, x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = GroupWhitening2d(8, num_groups=4)
        self.second = torch.nn.Sequential(BatchWhitening2d(8, channels_per_group=4))

    def forward(self, x):
        return self.second(self.first(x).relu())


class TestWatch:
    @pytest.fixture
    def step(self):
        """A function that makes one step of a training and returns the scalars it has left."""
        model = Model()
        watch = WhiteningWatch(period=2)
        watch.trainer = type("Trainer", (), {"model": model, "iter": 0})()

        def run(iteration: int, x: torch.Tensor) -> dict[str, float]:
            watch.trainer.iter = iteration
            with EventStorage(iteration) as storage:
                watch.before_step()
                model(x)
                watch.after_step()
                return {name: value for name, (value, _) in storage.latest().items()}

        run.model, run.watch = model, watch
        return run

    def test_numbers_are_written_every_period(self, step):
        x = correlated(2, 8, 5)
        scalars = step(0, x)
        assert {name.split("/")[1] for name in scalars} == {"first", "second.0"}
        expected = reduce_spectra([spectra(step.model.first, x)])
        assert {name: scalars[f"whitening/first/{name}"] for name in REDUCTIONS} == pytest.approx(expected)
        assert step(1, x) == {} and step(2, x)
        assert not step.model.first._forward_hooks and not step.model._forward_hooks

    def test_only_the_models_own_step_is_looked_at(self, step):
        model, watch, own = step.model, step.watch, correlated(2, 8, 5)
        expected = reduce_spectra([spectra(model.first, own)])
        with EventStorage() as storage:
            watch.before_step()
            model.eval()(correlated(2, 8, 5, seed=1))  # an evaluation in another hook's before_step
            assert storage.latest() == {}
            model.train()(own)
            for training in (False, True):  # EvalHook and PreciseBN, in their after_step
                model.train(training)(correlated(2, 8, 5, seed=2))
            watch.after_step()
            found = {name: storage.latest()[f"whitening/first/{name}"][0] for name in REDUCTIONS}
        assert found == pytest.approx(expected)
        assert not model.first._forward_hooks and not model._forward_hooks

    def test_the_layer_whose_covariance_overflows_is_named(self, step):
        step.model.first.solver = "standardize"
        with pytest.raises(FloatingPointError, match="the whitening layer first: the covariance of its input"):
            step(0, correlated(2, 8, 5) * 1e20)
        assert not step.model.first._forward_hooks and not step.model._forward_hooks

    def test_a_model_without_whitening_layers(self, caplog):
        watch = WhiteningWatch(period=2)
        for model, warnings in ((Model(), 0), (torch.nn.Conv2d(3, 3, 1), 1)):
            watch.trainer = type("Trainer", (), {"model": model})()
            with caplog.at_level(logging.WARNING):
                watch.before_train()
            assert caplog.text.count("no whitening layers") == warnings

    def test_the_layer_that_is_not_finite_is_named(self, step):
        with torch.no_grad():
            step.model.first.weight[3] = float("nan")
        with pytest.raises(FloatingPointError, match="weight of the whitening layer first is not finite"):
            step(0, correlated(2, 8, 5))
        assert not step.model.second[0]._forward_hooks  # the search for the cause is not disturbed
        with pytest.raises(FloatingPointError, match="input of the whitening layer first"):
            step(0, torch.full((2, 8, 5), float("inf")))

    def test_a_period_that_is_not_positive(self):
        with pytest.raises(ValueError, match="-1 iterations"):
            WhiteningWatch(-1)


@pytest.fixture
def cfg():
    words = [str(word) for pair in OPTS.items() for word in pair]
    return read_config(str(CONFIG), words)


class TestAnalyzeLayers:
    def test_every_layer_has_its_row(self, cfg, tmp_path):
        Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "noise.png")
        outcome = analyze_layers(cfg, tmp_path, count=3, progress=False)
        assert outcome.settings["images"] == ["noise.png"]
        assert outcome.rows[0]["layer"] == "backbone.bottom_up.stem.conv1.norm" and outcome.rows[0]["finite"]
        assert outcome.rows[0]["norm"].startswith("GW:groups=64")
        assert {"roi_heads.box_head.conv1.norm", "backbone.fpn_output2.norm"} <= {row["layer"] for row in outcome.rows}
        for row in outcome.rows:
            if row["trace"] is not None:
                assert 0 < row["lambda_min"] < row["lambda_max"] <= row["condition_before"] * row["lambda_max"]
                assert row["residual"] <= row["residual_max"]
        assert outcome.findings["input, covariance and output of all layers are finite"]

    def test_the_first_layer_that_is_not_finite_is_named(self, cfg, monkeypatch):
        forward = GroupWhitening2d.forward

        def broken(self, x, relu=False):
            return forward(self, x, relu) * (float("nan") if self.num_channels == 128 else 1)

        monkeypatch.setattr(GroupWhitening2d, "forward", broken)
        outcome = analyze_layers(cfg, count=1, progress=False)
        (sentence,) = (text for text, holds in outcome.findings.items() if not holds)
        assert sentence.endswith("the first that is not: backbone.bottom_up.res3.0.conv2.norm")
        assert [row["finite"] for row in outcome.rows[:4]] == [True, True, True, False]

    @pytest.mark.parametrize("solver", ["standardize", "zca"])  # the second refuses the covariance itself
    def test_the_layer_whose_covariance_overflows_is_named(self, cfg, tmp_path, solver):
        cfg.MODEL.RESNETS.WHITEN_NORM = f"GW:solver={solver}"
        cfg.MODEL.RESNETS.WHITEN_POSITIONS = "S1"
        weights = build_model(cfg).state_dict()
        weights["backbone.bottom_up.stem.conv1.weight"].fill_(1e20)
        torch.save({"model": weights}, tmp_path / "large.pth")
        cfg.MODEL.WEIGHTS = str(tmp_path / "large.pth")
        outcome = analyze_layers(cfg, count=1, progress=False)
        (sentence,) = (text for text, holds in outcome.findings.items() if "finite" in text and not holds)
        assert sentence.endswith("the first that is not: backbone.bottom_up.stem.conv1.norm")

    def test_weights_have_to_be_of_the_model(self, cfg, tmp_path):
        weights = build_model(cfg).state_dict()
        cfg.MODEL.WEIGHTS = str(tmp_path / "some.pth")
        torch.save({"model": {"nothing.that.fits": torch.zeros(1)}}, cfg.MODEL.WEIGHTS)
        with pytest.raises(PartialLoadError, match="backbone: 0/"):
            analyze_layers(cfg, count=1, progress=False)
        backbone = {name: value for name, value in weights.items() if name.startswith("backbone.bottom_up.")}
        torch.save({"model": backbone}, cfg.MODEL.WEIGHTS)
        with pytest.raises(PartialLoadError, match=r"the weights lack .* whitening layers: backbone.fpn_lateral2.norm"):
            analyze_layers(cfg, count=1, progress=False)
        partial = analyze_layers(cfg, count=1, allow_partial=True, progress=False)
        assert partial.settings["loaded"].endswith("FPN and heads start new, as expected")
        torch.save({"model": weights}, cfg.MODEL.WEIGHTS)
        assert "new are" not in analyze_layers(cfg, count=1, progress=False).settings["loaded"]

    def test_nothing_is_found_in_layers_that_are_not_reached(self, cfg, monkeypatch):
        monkeypatch.setattr("detectron2.modeling.GeneralizedRCNN.forward", lambda self, batch: [])
        outcome = analyze_layers(cfg, count=1, progress=False)
        assert outcome.findings == {} and {row["finite"] for row in outcome.rows} == {None}

    def test_images_are_read_one_at_a_time(self, cfg, tmp_path, monkeypatch):
        Image.effect_noise((90, 70), 80).convert("RGB").save(tmp_path / "a.png")
        whole = (tmp_path / "a.png").read_bytes()
        (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "c.png").write_text("no image")
        calls = []
        monkeypatch.setattr("detectron2.modeling.GeneralizedRCNN.forward", lambda self, batch: calls.append(batch))
        with pytest.raises(ValueError, match=r"image .*b\.png.*cannot be read"):
            analyze_layers(cfg, tmp_path, count=3, progress=False)
        assert len(calls) == 1
        (tmp_path / "b.png").unlink()
        with pytest.raises(ValueError, match=r"image .*c\.png.*cannot be read"):
            analyze_layers(cfg, tmp_path, count=3, progress=False)

    @pytest.mark.parametrize("wrong", [{"samples": 0}, {"samples": -1}, {"count": 0}])
    def test_numbers_that_make_no_sense(self, cfg, wrong):
        with pytest.raises(ValueError, match="{}={}".format(*next(iter(wrong.items())))):
            analyze_layers(cfg, progress=False, **wrong)

    def test_a_model_without_whitening(self, cfg):
        cfg.MODEL.RESNETS.WHITEN_POSITIONS = ""
        cfg.MODEL.FPN.NORM = cfg.MODEL.ROI_BOX_HEAD.NORM = cfg.MODEL.ROI_MASK_HEAD.NORM = "GN"
        with pytest.raises(ValueError, match="no whitening layers"):
            analyze_layers(cfg, progress=False)

    def test_a_folder_without_images(self, cfg, tmp_path):
        with pytest.raises(ValueError, match="no images"):
            analyze_layers(cfg, tmp_path, progress=False)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            analyze_layers(cfg, tmp_path / "nowhere", progress=False)


def test_whitening_layers_are_found_by_name():
    assert list(whitening_layers(Model())) == ["first", "second.0"]
