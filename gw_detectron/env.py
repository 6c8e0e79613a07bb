"""With ``DETECTRON2_ENV_MODULE=gw_detectron.env`` stock Detectron2 scripts accept this package's yaml, unedited."""

from detectron2.config.defaults import _C

from .config import add_gw_config


def setup_environment() -> None:
    """Adds the config keys to Detectron2's defaults; importing the package has registered the components.

    Called by Detectron2 itself while it is being imported. This is the one place that touches Detectron2's global
    defaults, and only users who set the variable reach it.
    """
    add_gw_config(_C)
