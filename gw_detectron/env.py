"""Environment module: ``DETECTRON2_ENV_MODULE=gw_detectron.env`` lets stock scripts read this package's yaml."""

import sys
from collections.abc import Callable
from types import TracebackType

from detectron2.config.defaults import _C

from .config import add_gw_config
from .errors import NormError
from .norms import resolve_norm


def setup_environment() -> None:
    """Add this package's config keys to Detectron2's global defaults.

    Detectron2 calls it during its own import if the environment variable is set. Importing this module has already
    registered the components. Nothing else in the package changes the global defaults.

    The variable does not make stock scripts safe: their own ``cfg.merge_from_file(file)`` runs the code of
    ``!!python/...`` tags, and their checkpointer unpickles ``.pkl`` files. Only this package's tools and
    :func:`gw_detectron.config.read_config` refuse both. In such a script, pass ``allow_unsafe=False``.
    """
    add_gw_config(_C)
    sys.excepthook = _explaining(sys.excepthook)


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def _explaining(hook: _Hook) -> _Hook:
    """Add a sentence to the ``KeyError: 'GW'`` of a stock component that cannot use the norm."""

    def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        last = traceback
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if kind is KeyError and last is not None and last.tb_frame.f_code.co_name == "get_norm":
            try:
                resolve_norm(error.args[0])
            except NormError as unknown:
                error.add_note(str(unknown))
            else:
                error.add_note(
                    f"norm ({error.args[0]!r}): a component of Detectron2 takes only Detectron2's norms. Fix: use the "
                    "component of gw_detectron.modeling, e.g. GWFastRCNNConvFCHead, or pass "
                    f"gw_detectron.resolve_norm({error.args[0]!r})."
                )
        hook(kind, error, traceback)

    return explain
