"""Files are written whole or not at all."""

import os
import signal

import pytest
import torch
from detectron2.utils.file_io import PathManager

from gw_detectron.engine.hooks import CheckpointWriteError, DataError, LossGuard, NamingMapper, WholeFileWriter
from gw_detectron.layers import BatchWhitening2d


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.pth"
    path.write_bytes(b"old")
    child = os.fork()
    if child == 0:
        with WholeFileWriter(PathManager).open(str(path), "wb") as file:
            file.write(b"new" * 100_000)
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert path.read_bytes() == b"old"
    with WholeFileWriter(PathManager).open(str(path), "wb") as file:
        file.write(b"newer")
    assert path.read_bytes() == b"newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_gone_is_named(tmp_path):
    with (
        pytest.raises(CheckpointWriteError, match="gone/model.pth' was not written"),
        WholeFileWriter(PathManager).open(str(tmp_path / "gone" / "model.pth"), "wb"),
    ):
        pass


def test_an_error_of_the_caller_passes_and_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), WholeFileWriter(PathManager).open(str(tmp_path / "a"), "w") as file:
        file.write("half")
        raise KeyError("caller")
    assert not list(tmp_path.iterdir())


def test_everything_else_is_left_to_the_path_manager(tmp_path):
    (tmp_path / "a").write_text("text")
    writer = WholeFileWriter(PathManager)
    with writer.open(str(tmp_path / "a"), "r") as file:
        assert file.read() == "text"
    assert writer.exists(str(tmp_path / "a")) and writer.ls(str(tmp_path)) == ["a"]


def wrong_size(record):
    raise ValueError("height 3 instead of 4")


def test_a_worker_process_says_no_more_than_the_message():
    def read(records):
        return [NamingMapper(wrong_size)(record) for record in records]

    loader = torch.utils.data.DataLoader([{"file_name": "a.jpg"}], num_workers=1, collate_fn=read)
    with pytest.raises(DataError) as raised:
        next(iter(loader))
    assert str(raised.value).startswith("a.jpg cannot be used: height 3 instead of 4")


@pytest.mark.parametrize(
    "norm", [torch.nn.SyncBatchNorm(4), BatchWhitening2d(4, sync=True)], ids=lambda n: type(n).__name__
)
def test_looking_for_a_cause_waits_for_no_other_process(norm):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, batch):
            return {"loss": self.norm.weight.sum()}

    model = Model()
    guard = LossGuard(model)
    model([{"image": torch.zeros(3, 8, 8), "file_name": "a.jpg"}])
    assert norm.training
    assert "a.jpg" in guard.explain()
    assert not norm.training, "in training its statistics would be those of all processes"


def test_errors_of_the_user_s_own_mapper_are_named_and_keep_their_class():
    def bug(record):
        return record["annotations"]

    with pytest.raises(DataError, match="^a.jpg cannot be used: height 3 instead of 4"):
        NamingMapper(wrong_size)({"file_name": "a.jpg"})
    with pytest.raises(KeyError) as raised:
        NamingMapper(bug)({"file_name": "a.jpg"})
    assert raised.value.__notes__ == ["while reading a.jpg"]
