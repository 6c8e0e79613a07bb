"""JSON files that are derived from other JSON files when they are used."""

import codecs
import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from ..atomic import atomic_write
from ..errors import DataError

log = logging.getLogger(__name__)


class DerivedJsonHandler(PathHandler):
    """Path handler that writes a COCO file, derived from another, on demand.

    It writes when the path is first used as a local file. Opening the path before, as the checks before a run do,
    writes nothing: a refused run leaves its output folder unchanged.

    Args:
        path: the derived file.
        source: the COCO file that it is derived from.
        derive: from the content of the source to that of the file.
    """

    def __init__(self, path: str, source: str, derive: Callable[[Any], Any]) -> None:
        super().__init__()
        self._path, self._source, self._derive = path, source, derive
        self._written = False

    def _get_supported_prefixes(self) -> list[str]:
        return [self._path]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        if not self._written:
            try:
                content = read_json(self._source)
                derived = self._derive(content)
            except DataError as error:
                raise DataError(f"'{self._source}': {error}") from error
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(Path(path)) as temporary:
                temporary.write_text(json.dumps(derived))
            self._written = True
            if derived is not content:
                images = f"{len(derived['images'])} of {len(content['images'])} images"
                log.info("'%s': %s of '%s', %d objects", path, images, self._source, len(derived["annotations"]))
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        if self._written:
            return open(path, mode, buffering, **kwargs)
        text = json.dumps(self._derive(read_json(self._source)))
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)


def read_json(path: str) -> Any:
    """Read a JSON file in UTF-8, local or remote.

    Raises:
        OSError: the file does not exist or cannot be read.
        DataError: it is not JSON; the message leaves the file's name to the caller.
    """
    with PathManager.open(path, "rb") as file:
        text = file.read()
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        mark = " without a byte order mark" if text.startswith(codecs.BOM_UTF8) else ""
        raise DataError(f"invalid JSON: {error}. Fix: give a JSON file in UTF-8{mark}, not compressed.") from error
