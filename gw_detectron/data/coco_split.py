"""Split one COCO file into training and validation parts."""

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import IO, Any, NamedTuple

from detectron2.utils.file_io import PathManager
from iopath.common.file_io import PathHandler

from ..atomic import atomic_write
from ..errors import DataError

log = logging.getLogger(__name__)


class CocoParts(NamedTuple):
    """The contents of two COCO files without a common image."""

    train: Any
    val: Any


def split_coco(content: Any, val_fraction: float) -> CocoParts:
    """Split the images of a COCO file by their file names.

    An image belongs to the validation if the hash of its ``file_name``, as a number from 0 to 1, is below
    ``val_fraction``. So it stays on its side when other images are added. Both parts have at least one image.

    Args:
        content: of the COCO file. A malformed one is returned as both parts: the checks before a run name its fault.
        val_fraction: expected share of the images for validation.

    Raises:
        DataError: there are fewer than two images.
    """
    try:
        places = {image["id"]: _place(image["file_name"]) for image in content["images"]}
        ranked = sorted(set(places.values()))
        if len(ranked) < 2:
            raise DataError(
                f"{len(ranked)} images cannot be split. Fix: give more images, or a second file with --val-json."
            )
        border = min(max(val_fraction, ranked[1]), ranked[-1])
        in_val = {number: place < border for number, place in places.items()}
        return CocoParts(
            *(
                {
                    **content,
                    "images": [image for image in content["images"] if in_val[image["id"]] is side],
                    # an annotation of an unknown image stays in the training part, whose check names it
                    "annotations": [a for a in content["annotations"] if in_val.get(a["image_id"], False) is side],
                }
                for side in (False, True)
            )
        )
    except (AttributeError, LookupError, TypeError):
        return CocoParts(content, content)


def _place(file_name: str) -> float:
    return int.from_bytes(hashlib.sha256(file_name.encode(errors="surrogatepass")).digest()[:6]) / 2**48


class SplitPathHandler(PathHandler):
    """Path handler that writes a part of a COCO file on demand.

    It writes when the path is first used as a local file. Opening the path before, as the checks before a run do,
    writes nothing: a refused run leaves its output folder unchanged.

    Args:
        path: the file of the part.
        source: the COCO file to split.
        val_fraction: as for :func:`split_coco`.
        part: "train" or "val".
    """

    def __init__(self, path: str, source: str, val_fraction: float, part: str) -> None:
        super().__init__()
        self._path, self._source, self._val_fraction, self._part = path, source, val_fraction, part
        self._written = False

    def _get_supported_prefixes(self) -> list[str]:
        return [self._path]

    def _get_local_path(self, path: str, force: bool = False, **kwargs: Any) -> str:
        if not self._written:
            try:
                content = read_json(self._source)
                part = self._split(content)
            except DataError as error:
                raise DataError(f"'{self._source}': {error}") from error
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(Path(path)) as temporary:
                temporary.write_text(json.dumps(part))
            self._written = True
            if part is not content:
                images = f"{len(part['images'])} of {len(content['images'])} images"
                log.info("'%s': %s of '%s', %d objects", path, images, self._source, len(part["annotations"]))
        return path

    def _open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> IO[Any]:
        if self._written:
            return open(path, mode, buffering, **kwargs)
        return io.BytesIO(self._text().encode()) if "b" in mode else io.StringIO(self._text())

    def _text(self) -> str:
        return json.dumps(self._split(read_json(self._source)))

    def _split(self, content: Any) -> Any:
        return getattr(split_coco(content, self._val_fraction), self._part)


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
        raise DataError(f"invalid JSON: {error}. Fix: give a JSON file in UTF-8, not compressed.") from error
