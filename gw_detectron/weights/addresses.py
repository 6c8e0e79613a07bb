"""Resolve addresses to files on this machine, without leaving the download cache."""

import os
import re
from typing import Any
from urllib.parse import unquote, urlsplit

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import HTTPURLHandler, get_cache_dir

from ..errors import FileAccessError, MissingFileError, RefusedFileError, UserError

_DETECTRON2_HOST = "dl.fbaipublicfiles.com"  # of detectron2:// and catalog://, whose files the cache may hold already


def local_path(address: str, key: str) -> str:
    """Resolve an address to a file on this machine; fetch the file if needed.

    Arguments and errors: see :func:`gw_detectron.weights.open_checkpoint`.
    """
    check_address(address)
    try:
        path = PathManager.get_local_path(address)
    except UserError:
        raise
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
    ) as error:  # RuntimeError: Detectron2's catalog lacks it
        raise FileAccessError(
            f"{key}: cannot fetch '{address}': {error}. Fix: give the path of a file or a known address."
        ) from error
    if not os.path.exists(path):  # also of an unknown scheme
        fix = "give an existing path or gw://imagenet/R-50."
        if address.startswith("weights/"):  # in the configs
            fix = "put your own weights there (none are published under weights/), see MODEL_ZOO.md."
        raise MissingFileError(
            f"{key}: file not found: '{address}' (cwd: {os.getcwd()}). Fix: {fix}"
        )
    return path


def check_address(address: str) -> None:
    """Raise RefusedFileError if a remote address has ``..`` between slashes, in any spelling.

    Path handlers join the path of an address to a cache folder. With ``..`` they would write outside of it, for example
    a ``.pth`` file beside Python's packages, which Python runs.
    """
    if "://" not in address:
        return
    plain = address
    while (decoded := unquote(plain)) != plain:
        plain = decoded
    if ".." in re.split(r"[/\\?#&;=]", plain):
        raise RefusedFileError(
            f"address ('{address}'): '..' could leave the download cache. Fix: leave out '..'."
        )


class CachedURLHandler(HTTPURLHandler):
    """Download into the cache of iopath only, with a folder for each host.

    iopath's own handler follows ``..`` and links out of the cache, and takes a file from one host for the file of the
    same path on another host.
    """

    def _get_local_path(
        self, path: str, force: bool = False, cache_dir: str | None = None, **kwargs: Any
    ) -> str:
        check_address(path)
        url = urlsplit(path)
        folder = get_cache_dir(cache_dir)
        if url.hostname != _DETECTRON2_HOST:
            folder = os.path.join(folder, "urls", re.sub(r"[^\w.-]", "_", url.netloc))

        cache = os.path.realpath(get_cache_dir(cache_dir))
        target = os.path.join(
            folder, os.path.dirname(url.path.lstrip("/")), path.split("/")[-1]
        )
        if os.path.commonpath([cache, os.path.realpath(target)]) != cache:
            raise RefusedFileError(
                f"address ('{path}'): a link in the download cache '{cache}' leads out of it. Fix: set FVCORE_CACHE to "
                "a folder without links."
            )
        return super()._get_local_path(path, force, folder, **kwargs)
