"""What ends a training: non-finite losses, lack of memory, killed workers, broken images, a full disk."""

import multiprocessing
import os
import resource
import signal

import pytest
import torch

from gw_detectron.cli import errors_reported
from gw_detectron.engine import Trainer, setup
from gw_detectron.engine.hooks import LossGuard
from gw_detectron.errors import DataError, FileAccessError, NonFiniteError, UserError
from gw_detectron.layers import BatchWhitening2d

from ..tiny_run import arguments

CPU = "[enforce fail at alloc_cpu.cpp:135] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9."

pytestmark = pytest.mark.usefixtures("small_dataset", "one_thread")


def trainer_for(tmp_path, **overrides) -> Trainer:
    return Trainer(setup(arguments(tmp_path, **{"DATASETS__TEST": "()", **overrides})))


class TestNonFinite:
    @pytest.mark.parametrize("norm", ["GW", "GW:solver=zca"])  # the second stops before there is a loss
    def test_an_image_with_nan_is_named(self, tmp_path, norm):
        class WithNan(Trainer):
            @classmethod
            def build_train_loader(cls, cfg):
                for batch in super().build_train_loader(cfg):
                    batch[1]["image"] = batch[1]["image"].float()
                    batch[1]["image"][0, 3, 5] = float("nan")
                    batch[1]["file_name"] = "pictures/broken.tif"
                    yield batch

        trainer = WithNan(setup(arguments(tmp_path, MODEL__RESNETS__WHITEN_NORM=norm)))
        with pytest.raises(NonFiniteError, match=r"iteration 0.*\n.*broken.tif has values that are NaN"):
            trainer.train()

    def test_a_parameter_is_named_in_the_error_and_the_log(self, tmp_path):
        trainer = trainer_for(tmp_path)
        name = "backbone.bottom_up.res3.0.conv2.norm.weight"
        with torch.no_grad():
            trainer.model.get_parameter(name)[0] = float("inf")
        with pytest.raises(NonFiniteError, match=name):
            trainer.train()
        log = (tmp_path / "log.txt").read_text()
        assert name in log and "Traceback" not in log

    def test_the_first_module_that_overflows_is_named(self, tmp_path):
        trainer = trainer_for(tmp_path)
        with torch.no_grad():  # finite itself, but not after the convolution
            trainer.model.backbone.bottom_up.res4[0].conv1.weight.fill_(3e38)
        with pytest.raises(NonFiniteError, match=r"\n.*first module .*res4\.0\.conv1[. ]"):
            trainer.train()

    @pytest.mark.parametrize(
        "norm", [torch.nn.SyncBatchNorm(4), BatchWhitening2d(4, sync=True)], ids=lambda n: type(n).__name__
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


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["cpu", "python", "cuda", "cuda-driver", "cublas"],
)
def test_a_step_without_memory_names_images_keys_and_checkpoint(tmp_path, error):
    trainer = trainer_for(tmp_path)
    trainer.checkpointer.save("model_0000001")
    forward = trainer.model.roi_heads.forward

    def fail(*args):
        forward(*args)
        raise error

    trainer.model.roi_heads.forward = fail
    with pytest.raises(UserError, match=r"SOLVER.IMS_PER_BATCH \(2\): .* 64x.*INPUT.MIN_SIZE_TRAIN") as raised:
        trainer.train()
    assert f"--resume from '{tmp_path}/model_0000001.pth'" in str(raised.value)


@pytest.mark.parametrize("content", ["", "folder/model_0000001.pth\n", "/elsewhere/model.pth"])
def test_an_odd_last_checkpoint_hides_no_error(tmp_path, content):
    trainer = trainer_for(tmp_path)
    (tmp_path / "last_checkpoint").write_text(content)
    trainer.model.roi_heads.forward = lambda *args: bytearray(2**62)
    with pytest.raises(UserError, match="out of memory") as caught:
        trainer.train()
    assert (f"--resume from '{os.path.join(tmp_path, content.strip())}'" in str(caught.value)) == bool(content)


def test_an_evaluation_without_memory_names_its_keys(tmp_path, capsys):
    cfg = setup(arguments(tmp_path))
    model = Trainer.build_model(cfg)
    model.forward = lambda batch: torch.empty(2**55, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"INPUT.MIN_SIZE_TEST \(64\): out of memory"):
        Trainer.test(cfg, model)
    with pytest.raises(SystemExit), errors_reported():
        bytearray(2**62)
    assert "out of memory: MemoryError" in capsys.readouterr().err


def test_a_killed_worker_is_explained(tmp_path):
    trainer = trainer_for(tmp_path, DATALOADER__NUM_WORKERS=1)
    step = trainer._trainer.run_step

    def kill_worker_first():
        step()
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        for _ in range(20):  # batches that are loaded already
            step()

    trainer._trainer.run_step = kill_worker_first
    with pytest.raises(UserError, match=r"DATALOADER.NUM_WORKERS \(1\): a data-loading worker failed: .*/dev/shm"):
        trainer.train()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_users_mapper_keeps_its_cause(tmp_path, workers):
    """It is no failure of the worker that runs the mapper."""
    trainer = trainer_for(tmp_path, DATALOADER__NUM_WORKERS=workers)

    def mapper(record):
        raise FileNotFoundError(2, "No such file", "depth/7.png")

    trainer.data_loader._mapper = mapper
    with pytest.raises(FileNotFoundError, match="depth/7.png"):
        trainer.train()


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
    assert sorted(path.name for path in tmp_path.iterdir() if "model" in path.name) == ["model_0000001.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    trainer.checkpointer.load(str(tmp_path / "model_0000001.pth"))


def test_a_damaged_image_is_named(tmp_path, small_dataset):
    data = small_dataset / "gw_synthetic"
    victims = sorted((data / "train").iterdir())
    kept = [path.read_bytes() for path in victims]
    try:
        for path in victims:
            path.write_bytes(path.read_bytes()[:200])
        trainer = trainer_for(tmp_path)
        with pytest.raises(DataError, match=rf"^'{data}/train/0000..\.jpg'") as raised:
            trainer.train()
        assert "Traceback" not in str(raised.value)
    finally:
        for path, content in zip(victims, kept, strict=True):
            path.write_bytes(content)
