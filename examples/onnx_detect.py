"""Detect objects with an ONNX file of `gw-detectron export --one-image`; needs only numpy, Pillow and onnxruntime.

    python onnx_detect.py model.onnx photo.jpg --output detections.png --json detections.json

The picture shows boxes, class names and pasted masks. The json file is a list of COCO results: bbox is x, y, width,
height in pixels of the photo; category_id is that of the training data, or the class index from 0 if it is unknown.
"""

import argparse
import json
import os
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps

COLORS = (
    "#e6194b",
    "#3cb44b",
    "#4363d8",
    "#f58231",
    "#911eb4",
    "#008080",
    "#9a6324",
    "#800000",
)


def load(path: str) -> tuple[onnxruntime.InferenceSession, dict]:
    """Load a model and its description."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    description = json.loads(
        session.get_modelmeta().custom_metadata_map.get("gw_detectron.json", "{}")
    )
    if [each.name for each in session.get_inputs()] != [
        "image"
    ] or "detections" not in description:
        raise ValueError(
            "not a detector for one image. Fix: export with --format onnx --one-image."
        )
    return session, description


def read(path: str) -> Image.Image:
    """Read an image upright, as Detectron2 does."""
    with Image.open(path) as image:
        if image.mode[0] in "IF":  # Pillow would cut its values off at 255
            raise ValueError("has more than 8 bits per channel")
        return ImageOps.exif_transpose(image).convert("RGB")


def detect(
    session: onnxruntime.InferenceSession, description: dict, image: Image.Image
) -> dict[str, np.ndarray]:
    """Return the arrays of the detections found; outputs have rows for more."""
    pixels = np.asarray(image, np.float32)
    if description["input"]["channels"] == "BGR":
        pixels = pixels[:, :, ::-1]
    elif description["input"]["channels"] == "L":
        pixels = np.asarray(image.convert("L"), np.float32)[:, :, None]
    outputs = session.run(
        description["outputs"],
        {"image": np.ascontiguousarray(pixels.transpose(2, 0, 1))},
    )
    *named, (_, count) = zip(description["outputs"], outputs, strict=True)
    return {name: values[:count] for name, values in named}


def coco_results(found: dict[str, np.ndarray], description: dict) -> list[dict]:
    """Return the detections as COCO results, with the ids and names of classes that the file has."""
    names, ids = description["class_names"], description.get("category_ids")
    results = []
    for box, score, kind in zip(
        *(found[name].tolist() for name in ("boxes", "scores", "classes")), strict=True
    ):
        x0, y0, x1, y1 = box
        result = {
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "score": score,
            "category_id": ids[kind] if ids else kind,
        }
        results.append(result | ({"category_name": names[kind]} if names else {}))
    return results


def draw(
    image: Image.Image, results: list[dict], masks: np.ndarray | None
) -> Image.Image:
    """Draw masks, boxes and labels; the best detection is drawn last."""
    picture = image.copy()
    for index in reversed(range(len(results))):
        result, color = (
            results[index],
            COLORS[results[index]["category_id"] % len(COLORS)],
        )
        if masks is not None:
            picture.paste(
                Image.new("RGB", picture.size, color),
                mask=Image.fromarray(masks[index] * np.uint8(110)),
            )
        x, y, width, height = result["bbox"]
        pen = ImageDraw.Draw(picture)
        pen.rectangle((x, y, x + width, y + height), outline=color, width=2)
        label = f"{result.get('category_name', result['category_id'])} {result['score']:.2f}"
        place = (max(0, min(x + 2, picture.width - pen.textlength(label))), y)
        pen.rectangle(pen.textbbox(place, label), fill=color)
        pen.text(place, label, fill="white")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="ONNX file")
    parser.add_argument("image", help="photo")
    parser.add_argument(
        "--output",
        default="detections.png",
        help="picture to write, default: %(default)s",
    )
    parser.add_argument(
        "--json",
        default="detections.json",
        help="json file to write, default: %(default)s",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.5,
        help="lowest score, default: %(default)s",
    )
    args = parser.parse_args()
    if os.path.isdir(args.model):
        sys.exit(
            f"Error: {args.model}: a folder. Fix: give the file in it, {os.path.join(args.model, 'model.onnx')}."
        )
    try:
        session, description = load(args.model)
    # onnxruntime has an exception of its own for every kind of damage
    except Exception as error:
        sys.exit(f"Error: {args.model}: {' '.join(str(error).split())}")
    try:
        image = read(args.image)
    # Pillow raises each of them for damaged files
    except (
        OSError,
        SyntaxError,
        ValueError,
    ) as error:
        sys.exit(f"Error: {args.image}: cannot be read: {error}. Fix: give a photo.")
    found = detect(session, description, image)
    found = {
        name: values[found["scores"] >= args.threshold]
        for name, values in found.items()
    }
    results = coco_results(found, description)
    try:
        draw(
            image, results, found["masks"] if description["masks_pasted"] else None
        ).save(args.output)
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    except (OSError, ValueError) as error:
        sys.exit(f"Error: cannot be written: {error}. Fix: change --output or --json.")
    print(f"{len(results)} detections: {args.output}, {args.json}")


if __name__ == "__main__":
    main()
