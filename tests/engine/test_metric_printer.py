"""The line of metrics: images per second from the measured time, memory on a CPU."""

import logging
import re

import pytest
import torch
from detectron2.utils.events import EventStorage

from gw_detectron.engine.metric_printer import MetricPrinter


def printed(caplog, seconds):
    with EventStorage(20) as storage, caplog.at_level(logging.INFO, "detectron2.utils.events"):
        for _ in range(3):
            if seconds is not None:
                storage.put_scalars(time=seconds, total_loss=1.5)
            storage.step()
        MetricPrinter(100, images=16).write()
    (record,) = caplog.records
    return record.getMessage()


def test_images_per_second_follow_from_the_time_of_an_iteration(caplog):
    line = printed(caplog, 0.5)
    assert "iter: 23" in line and "total_loss: 1.5" in line and "images/s: 32" in line and "eta: " in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="Detectron2 prints the memory of the GPU")
def test_memory_is_that_of_the_process(caplog):
    (megabytes,) = re.findall(r"max_mem: (\d+)M", printed(caplog, 0.5))
    assert 100 < int(megabytes) < 100_000


def test_without_a_time_nothing_is_claimed(caplog):
    assert "images/s" not in printed(caplog, None)
