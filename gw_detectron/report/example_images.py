"""Images of a dataset with ground truth and detections side by side."""

from collections.abc import Iterable
from typing import Any

from ..data.images import evenly_spread
from .detections import ImageMatches
from .run_folder import RunFolder, needed
from .sections import Picture, Section, Table


def predictions_section(run: RunFolder) -> Section:
    """Draw ground truth and detections of images with objects, which are spread over the dataset."""
    images = [image for image in run.matches if image.found or image.missed] or run.matches
    chosen = evenly_spread(images, run.options.images)
    pictures = [
        [
            _picture(run, f"image_{number}_truth", image, run.detections.objects(image.image_id), "ground truth"),
            _picture(run, f"image_{number}_found", image, image.found, "predictions"),
        ]
        for number, image in enumerate(chosen, 1)
    ]
    text = f"Ground truth, and detections of score {run.options.score:g} and more."
    return Section("Predictions", [image.image_id for image in chosen], text, pictures=pictures)


def errors_section(run: RunFolder) -> Section:
    """Draw the missed objects and the wrong boxes of the worst images."""
    images = sorted(run.matches, key=lambda image: -image.errors)
    chosen = [image for image in images[: run.options.images] if image.errors]
    pictures, numbers = [], []
    for number, image in enumerate(chosen, 1):
        objects, wrong = run.detections.objects(image.image_id), image.wrong
        missed = f"{len(image.missed)} of {len(objects)} objects missed"
        boxes = f"{len(wrong)} of {len(image.found)} boxes wrong"
        kinds = [kind for _, kind in wrong]
        pictures.append(
            [
                _picture(run, f"error_{number}_missed", image, image.missed, missed),
                _picture(run, f"error_{number}_wrong", image, [each for each, _ in wrong], boxes, kinds),
            ]
        )
        file = run.detections.file_name(image.image_id)
        numbers.append({"image": image.image_id, "file": file, "missed": len(image.missed), "wrong": len(wrong)})
    text = "Missed objects only, and wrong boxes only, of the images with the most of them."
    table = Table(["image", "missed", "wrong"], [list(row.values())[1:] for row in numbers])
    return Section("Errors", numbers, text, pictures=pictures, tables=[table])


def _picture(
    run: RunFolder,
    name: str,
    image: ImageMatches,
    objects: Iterable[dict[str, Any]],
    caption: str,
    notes: list[str] | None = None,
) -> Picture:
    with needed():
        pixels = run.detections.draw(image.image_id, objects, notes)
    return Picture.from_photo(name, pixels, f"{run.detections.file_name(image.image_id)}: {caption}")
