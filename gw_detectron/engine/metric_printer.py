"""Print the metrics of a training, with images per second."""

import logging
import resource
from collections.abc import MutableMapping
from typing import Any

import torch
from detectron2.utils.events import CommonMetricPrinter, get_event_storage

log = logging.getLogger("detectron2.utils.events")  # Detectron2's, which runs show on the terminal


class MetricPrinter(CommonMetricPrinter):
    """Detectron2's line of metrics, which ends with images per second and, on a CPU, the memory of this process.

    Args:
        max_iter: iterations of the run.
        images: images of an iteration, over all processes.
    """

    def __init__(self, max_iter: int, images: int) -> None:
        super().__init__(max_iter)
        self.logger = _WithThroughput(log, images)


class _WithThroughput(logging.LoggerAdapter):
    def __init__(self, logger: logging.Logger, images: int) -> None:
        super().__init__(logger)
        self.images = images

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        words = [str(msg).rstrip()]
        try:
            seconds = get_event_storage().history("time").global_avg()
            words.append(f"images/s: {self.images / seconds:.3g}")
        except (KeyError, ZeroDivisionError):
            pass  # nothing is known in the first iterations
        if not torch.cuda.is_available():  # else Detectron2 prints the GPU's
            words.append(f"max_mem: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}M")
        return "  ".join(words), kwargs
