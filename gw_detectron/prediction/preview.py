"""Draw the annotations of a dataset, to look at them before a training."""

import os
import tempfile
from pathlib import Path

from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from ..atomic import atomic_folder, check_replaceable
from ..data import CocoDataset, CocoDatasets, existing_path, read_json, register_datasets
from ..data.images import evenly_spread, read_image
from ..errors import DataError
from ..installation import require_packages
from ..progress import progress_bar
from .drawing import draw_record
from .results_folder import COUNTS, PICTURES, write_counts

_NAME = "preview"
_PERCENTILES = (0.5, 99.5)  # black and white of images with more than 8 bits


def write_preview(annotations: str, images: str, output: str | os.PathLike[str], limit: int = 50) -> int:
    """Write ``pictures`` with annotations, and ``counts.csv`` of all images; return the number of pictures.

    Args:
        annotations: the file in COCO format.
        images: the folder that its ``file_name`` is relative to.
        output: the folder to create. It may hold an earlier preview, which is replaced.
        limit: pictures to draw, of images that are evenly spread over the file.

    Raises:
        MissingFileError: a file or folder does not exist.
        DataError: the file or an image cannot be used.
        FileAccessError: ``output`` holds other files.
    """
    require_packages("pictures", "cv2")
    check_replaceable(Path(output), (PICTURES, COUNTS))
    json_file = existing_path(annotations, "--preview", os.path.isfile)
    dataset = CocoDataset(json_file, existing_path(images, "MODEL", os.path.isdir))
    with tempfile.TemporaryDirectory() as work, atomic_folder(output, (PICTURES, COUNTS)) as folder:
        try:
            content = read_json(dataset.json)
            register_datasets(CocoDatasets(val={_NAME: dataset}), work)
            records = evenly_spread(DatasetCatalog.get(_NAME), limit)
            objects = [each for each in content["annotations"] if not each.get("iscrowd")]
            write_counts(folder / COUNTS, content["images"], content["categories"], objects)
        except (AssertionError, LookupError, TypeError, AttributeError) as error:  # of pycocotools
            raise DataError(f"--preview ('{annotations}'): not a file in COCO format: {error!r}.") from error
        (folder / PICTURES).mkdir()
        for record in progress_bar(records, desc="drawing", unit="image"):
            pixels = read_image(record["file_name"], "RGB", _PERCENTILES)
            drawn = Image.fromarray(draw_record(pixels, MetadataCatalog.get(_NAME), record))
            drawn.save(folder / PICTURES / f"{record['image_id']}_{Path(record['file_name']).stem}.jpg", quality=95)
    return len(records)
