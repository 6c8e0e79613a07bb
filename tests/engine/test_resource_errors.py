"""Out of memory and killed data-loading workers are one sentence with the keys to lower."""

import multiprocessing
import os
import signal

import pytest
import torch

from gw_detectron.cli import errors_reported
from gw_detectron.engine import Trainer, setup
from gw_detectron.engine.resource_errors import resource_errors_explained
from gw_detectron.errors import DataWorkerError, RunMemoryError

from ..tiny_run import arguments

CPU = "[enforce fail at alloc_cpu.cpp:135] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9."

pytestmark = pytest.mark.usefixtures("small_dataset")


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
def test_a_step_without_memory_names_images_keys_and_checkpoint(tmp_path, capsys, error):
    trainer = Trainer(setup(arguments(tmp_path, DATASETS__TEST="()")))
    trainer.checkpointer.save("model_0000001")
    backward = trainer.model.roi_heads.forward

    def fail(*args):
        backward(*args)
        raise error

    trainer.model.roi_heads.forward = fail
    with pytest.raises(SystemExit) as ended, errors_reported():
        trainer.train()
    assert ended.value.code == 1
    reported = capsys.readouterr().err
    assert "SOLVER.IMS_PER_BATCH (2): out of memory in a step with images of 64x" in reported
    assert "Fix: lower SOLVER.IMS_PER_BATCH, INPUT.MIN_SIZE_TRAIN ((64,)), INPUT.MAX_SIZE_TRAIN" in reported
    assert "; raise SOLVER.ACCUMULATE (1) as much as the batch shrinks; continue with --resume" in reported
    assert f"continue with --resume from '{tmp_path}/model_0000001.pth'." in reported
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("content", ["", "folder/model_0000001.pth\n", "/elsewhere/model.pth"])
def test_an_odd_last_checkpoint_hides_no_error(tmp_path, content):
    cfg = setup(arguments(tmp_path, DATASETS__TEST="()"))
    (tmp_path / "last_checkpoint").write_text(content)
    with pytest.raises(RuntimeError, match="shape mismatch"), resource_errors_explained(cfg):
        raise RuntimeError("shape mismatch")
    with pytest.raises(RunMemoryError) as caught, resource_errors_explained(cfg):
        raise MemoryError
    expected = os.path.join(tmp_path, content.strip())
    assert (f"--resume from '{expected}'." in str(caught.value)) == bool(content)


def test_memory_that_the_machine_does_not_have(tmp_path, capsys):
    """The allocators of torch and Python themselves, inside an evaluation and outside of any run."""
    cfg = setup(arguments(tmp_path))
    model = Trainer.build_model(cfg)
    model.forward = lambda batch: torch.empty(2**55, dtype=torch.uint8)
    with pytest.raises(
        RunMemoryError, match=r"INPUT.MIN_SIZE_TEST \(64\): out of memory in an evaluation: .*lower INP"
    ):
        Trainer.test(cfg, model)
    with pytest.raises(SystemExit), errors_reported():
        bytearray(2**62)
    assert "out of memory: MemoryError. Fix: free memory" in capsys.readouterr().err


def test_a_killed_worker_is_explained(tmp_path):
    trainer = Trainer(setup(arguments(tmp_path, DATASETS__TEST="()", DATALOADER__NUM_WORKERS=1)))
    step = trainer._trainer.run_step

    def kill_worker_first():
        step()
        for worker in multiprocessing.active_children():
            os.kill(worker.pid, signal.SIGKILL)
        for _ in range(20):  # batches that are loaded already
            step()

    trainer._trainer.run_step = kill_worker_first
    with pytest.raises(DataWorkerError, match=r"DATALOADER.NUM_WORKERS \(1\): a data-loading worker failed: ") as e:
        trainer.train()
    assert (
        "lower DATALOADER.NUM_WORKERS (0 needs no shared memory) or enlarge /dev/shm (docker run --shm-size 8g)"
        in str(e.value)
    )


def test_other_errors_pass(tmp_path):
    trainer = Trainer(setup(arguments(tmp_path, DATASETS__TEST="()")))
    trainer.model.roi_heads.forward = lambda *args: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        trainer.train()
