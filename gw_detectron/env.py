"""Environment module: ``DETECTRON2_ENV_MODULE=gw_detectron.env`` lets stock scripts read this package's yaml."""

from detectron2.config.defaults import _C

from .config import add_gw_config


def setup_environment() -> None:
    """Add this package's config keys to Detectron2's global defaults.

    Detectron2 calls it during its own import if the environment variable is set. Importing this module has already
    registered the components. Nothing else in the package changes the global defaults.
    """
    add_gw_config(_C)
