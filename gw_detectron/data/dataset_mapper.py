"""Dataset mapper whose errors name the image file."""

from collections.abc import Callable
from typing import Any

from detectron2.data.detection_utils import SizeMismatchError

from ..errors import RecordError
from .images import READ_ERRORS


class ImageNamingMapper:
    """Dataset mapper that adds the image's file name to errors.

    Args:
        mapper: Detectron2's ``DatasetMapper`` or another callable from record to training example.

    Raises:
        RecordError: the image or its record cannot be used; other errors get the file name as a note.
    """

    def __init__(self, mapper: Callable[[dict], Any]) -> None:
        self.mapper = mapper

    def __call__(self, record: dict) -> Any:
        name = record.get("file_name", "a record without file_name")
        try:
            return self.mapper(record)
        except SizeMismatchError as error:
            sizes = str(error).partition(", ")[2].partition(". ")[0]  # got (w, h), expect (w, h)
            raise RecordError(
                f"'{name}': width and height are not those of its record: {sizes}. Fix: correct the JSON file; the "
                "size of a photo with an EXIF orientation is that of the upright photo."
            ) from error
        except READ_ERRORS as error:
            reason = str(error).replace(f" '{name}'", "")  # Pillow names the file, too
            raise RecordError(
                f"'{name}': cannot be used: {reason}. Fix: repair the image or its record, or remove both."
            ) from error
        except Exception as error:
            error.add_note(f"while reading {name}")
            raise
