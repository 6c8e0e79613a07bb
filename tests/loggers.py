"""Undo Detectron2's set-up of loggers, which lasts for the whole process."""

import logging
import sys


def reset_loggers() -> None:
    """Undo it: ``caplog`` relies on messages that reach the root logger.

    Each open ``log.txt`` is forgotten.
    """
    if set_up := sys.modules.get("detectron2.utils.logger"):
        set_up.setup_logger.cache_clear()
        set_up._cached_log_stream.cache_clear()
    for logger in map(logging.getLogger, ("detectron2", "fvcore", "gw_detectron")):
        logger.propagate = True
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()
