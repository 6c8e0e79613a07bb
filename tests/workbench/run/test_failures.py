"""What ends a training: non-finite losses, broken images, a full disk."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from gw_detectron.errors import DataError, FileAccessError, NonFiniteError
from gw_detectron.layers import BatchWhitening2d
from gw_detectron.workbench.console import errors_reported
from gw_detectron.workbench.run import Trainer
from gw_detectron.workbench.run.hooks import LossGuard
from gw_detectron.workbench.run.train import run_config
from gw_detectron.workbench.run.training_data import build_training_data

from ...tiny_run import arguments

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def trainer_for(tmp_path, **overrides) -> Trainer:
    return Trainer(run_config(arguments(tmp_path, **{"DATASETS__TEST": "()", **overrides})))


class TestNonFinite:
    @pytest.mark.parametrize(
        "norm", ["GW", "GW:solver=zca"]
    )  # the second stops before there is a loss
    def test_an_image_with_nan_is_named(self, tmp_path, norm):
        class WithNan(Trainer):
            @classmethod
            def build_train_loader(cls, cfg):
                for batch in super().build_train_loader(cfg):
                    batch[1]["image"] = batch[1]["image"].float()
                    batch[1]["image"][0, 3, 5] = float("nan")
                    batch[1]["file_name"] = "pictures/broken.tif"
                    yield batch

        trainer = WithNan(run_config(arguments(tmp_path, MODEL__RESNETS__WHITEN_NORM=norm)))
        with pytest.raises(
            NonFiniteError, match=r"iteration 0.*\n.*broken.tif or its annotations have .* NaN"
        ):
            trainer.train()

    @pytest.mark.parametrize(
        ("name", "value"), [("res3.0.conv2.norm", float("inf")), ("res4.0.conv1", 3e38)]
    )
    def test_the_first_bad_module_is_named_in_the_error_and_the_log(
        self, tmp_path, name, value
    ):
        trainer = trainer_for(tmp_path)
        with torch.no_grad():  # the second is finite itself, but not after the convolution
            trainer.model.get_submodule(f"backbone.bottom_up.{name}").weight.fill_(value)
        with pytest.raises(NonFiniteError, match=rf"\n.*first module .*{name}[. ]"):
            trainer.train()
        log = (tmp_path / "log.txt").read_text()
        assert name in log and "Traceback" not in log

    @pytest.mark.parametrize(
        "norm",
        [torch.nn.SyncBatchNorm(4), BatchWhitening2d(4, sync=True)],
        ids=lambda n: type(n).__name__,
    )
    def test_the_diagnosis_waits_for_no_other_process(self, norm):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = norm

            def forward(self, batch):
                return {"loss": self.norm.weight.sum()}

        model = Model()
        guard = LossGuard(model)
        model([{"image": torch.zeros(3, 8, 8), "file_name": "a.jpg"}])
        assert "a.jpg" in guard.explain()
        assert not norm.training, "in training its statistics would be those of all processes"


def test_an_unexpected_error_keeps_its_traceback_in_the_log(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.model.roi_heads.forward = lambda *args: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        trainer.train()
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_disk_full_during_a_checkpoint_leaves_the_earlier_one(tmp_path):
    trainer = trainer_for(tmp_path)
    trainer.checkpointer.save("model_0000001")
    good = (tmp_path / "model_0000001.pth").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        for name in ("model_0000001", "model_0000003"):
            with pytest.raises(FileAccessError, match=f"{name}.pth"):
                trainer.checkpointer.save(name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "model_0000001.pth").read_bytes() == good
    assert sorted(path.name for path in tmp_path.iterdir() if "model" in path.name) == [
        "model_0000001.pth"
    ]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    trainer.checkpointer.load(str(tmp_path / "model_0000001.pth"))


def refuse_connection():
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused by tracker")


def refuse_permission():
    raise PermissionError(errno.EACCES, "denied", "mask.png")


#: what a mapper in a worker does -> error of the run, words that it or the screen has, words that it has not
CAUSES = {
    "missing file": (
        lambda: Path("depth/0001.png").read_bytes(),
        SystemExit,
        "directory: 'depth/0001.png'",
    ),
    "no permission": (
        refuse_permission,
        SystemExit,
        "PermissionError: [Errno 13] denied: 'mask.png'",
    ),
    "no connection": (
        refuse_connection,
        ConnectionRefusedError,
        "Connection refused by tracker",
    ),
    "wrong key": (lambda: {}["polygons"], KeyError, "polygons"),
    "killed": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        SystemExit,
        "DATALOADER.NUM_WORKERS",
    ),
}


@pytest.mark.parametrize(("fail", "error", "words"), CAUSES.values(), ids=CAUSES)
def test_the_error_of_a_worker_keeps_its_cause(tmp_path, capsys, fail, error, words):
    class Failing(Trainer):
        @classmethod
        def build_train_loader(cls, cfg):
            return build_training_data(cfg, lambda record: fail())

    args = arguments(tmp_path, DATASETS__TEST="()", DATALOADER__NUM_WORKERS=1)
    with pytest.raises(error) as raised, errors_reported():
        Failing(run_config(args)).train()
    said = capsys.readouterr().err + str(raised.value)
    assert words in said and ("NUM_WORKERS" in said) == (fail is CAUSES["killed"][0])
    assert error is not SystemExit or "Traceback" not in said


def test_the_error_of_a_hook_is_not_taken_for_one_of_a_worker(tmp_path):
    trainer = trainer_for(tmp_path, DATALOADER__NUM_WORKERS=1)
    trainer.after_step = refuse_connection
    with pytest.raises(ConnectionRefusedError, match="by tracker"):
        trainer.train()
    assert "by tracker" in (tmp_path / "log.txt").read_text()


def test_a_damaged_image_is_named(tmp_path, small_dataset):
    data = small_dataset
    victims = sorted((data / "train").iterdir())
    trainer = trainer_for(tmp_path)  # the checks would find the damage
    kept = [path.read_bytes() for path in victims]
    try:
        for path in victims:
            path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(DataError, match=rf"^'{data}/train/0000..\.jpg'") as raised:
            trainer.train()
        assert "Traceback" not in str(raised.value)
    finally:
        for path, content in zip(victims, kept, strict=True):
            path.write_bytes(content)
