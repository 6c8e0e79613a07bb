"""Environment module: with ``DETECTRON2_ENV_MODULE=gw_detectron.env`` stock scripts read this package's yaml."""

from detectron2.config.defaults import _C

from .config import add_gw_config


def setup_environment() -> None:
    """Add this package's config keys to Detectron2's global defaults; Detectron2 calls it at its import.

    The variable does not make stock scripts safe: their own ``cfg.merge_from_file(file)`` runs the code of
    ``!!python/...`` tags, and their checkpointer unpickles ``.pkl`` files. Only this package's tools and
    :func:`gw_detectron.config.read_config` refuse both. In such a script, pass ``allow_unsafe=False``.
    """
    add_gw_config(_C)
