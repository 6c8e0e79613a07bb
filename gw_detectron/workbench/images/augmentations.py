"""Transforms of torchvision.transforms.v2 in Detectron2's data pipeline."""

import ast
import copy
import inspect
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import (
    convert_PIL_to_numpy,
    filter_empty_instances,
)
from detectron2.data.transforms import Augmentation, AugmentationList
from fvcore.transforms.transform import Transform
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import v2

from ...errors import ConfigError, similar_names

# classes with a forward() of their own, such as RandAugment, do not tell which parameters they draw
_USABLE = {
    name: kind
    for name, kind in vars(v2).items()
    if isinstance(kind, type)
    and issubclass(kind, v2.Transform)
    and "forward" not in vars(kind)
}
# which do not exchange left and right keypoints
_FLIPS = (v2.RandomHorizontalFlip, v2.RandomVerticalFlip)


def training_mapper(cfg: CfgNode) -> DatasetMapper:
    """Build Detectron2's mapper of training examples, with ``INPUT.AUGMENTATIONS`` before its own.

    Those of colors come last, on the resized image, which usually has fewer pixels.
    """
    _check_input(cfg)
    ours = build_augmentations(cfg)
    moves_boxes = any(augmentation.moves for augmentation in ours)
    crops_masks = cfg.INPUT.CROP.ENABLED and cfg.MODEL.MASK_ON
    mapper = (_TightBoxes if moves_boxes or crops_masks else DatasetMapper)(cfg, True)
    # Detectron2's own way to fit boxes to cropped masks fails for an image without objects
    mapper.recompute_boxes = False

    theirs = mapper.augmentations.augs
    colors = [augmentation for augmentation in ours if augmentation.recolors]
    others = [augmentation for augmentation in ours if not augmentation.recolors]
    mapper.augmentations = AugmentationList([*others, *theirs, *colors])
    return mapper


def _check_input(cfg: CfgNode) -> None:
    """Refuse values of ``INPUT`` that Detectron2 meets without a word of the key, some only with the first image."""
    keys = cfg.INPUT
    choices = {
        "RANDOM_FLIP": ("horizontal", "vertical", "none"),
        "MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
        "MASK_FORMAT": ("polygon", "bitmask"),
    }
    for name, known in choices.items():
        if keys[name] not in known:
            raise ConfigError(
                f"INPUT.{name} ({keys[name]!r}): unknown. Fix: give one of {', '.join(known)}."
            )

    sizes = keys.MIN_SIZE_TRAIN
    is_range = keys.MIN_SIZE_TRAIN_SAMPLING == "range" and not isinstance(sizes, int)
    if is_range and len(sizes) != 2:
        raise ConfigError(
            f"INPUT.MIN_SIZE_TRAIN ({tuple(sizes)}): INPUT.MIN_SIZE_TRAIN_SAMPLING range needs two sizes. Fix: give "
            "the lowest and the highest, or set the sampling to choice."
        )
    try:
        convert_PIL_to_numpy(Image.new("RGB", (1, 1)), keys.FORMAT)
    except (KeyError, ValueError):
        raise ConfigError(
            f"INPUT.FORMAT ({keys.FORMAT!r}): unknown. Fix: give RGB, BGR or L."
        ) from None

    is_share = keys.CROP.TYPE.startswith("relative")
    if keys.CROP.ENABLED and is_share and max(keys.CROP.SIZE) > 1:
        raise ConfigError(
            f"INPUT.CROP.SIZE ({list(keys.CROP.SIZE)}): INPUT.CROP.TYPE {keys.CROP.TYPE} takes shares of height and "
            "width, up to 1.0. Fix: for pixels, set the type to absolute."
        )


class _TightBoxes(DatasetMapper):
    """Give objects with a mask the box of the mask: boxes around turned or cropped boxes are too large."""

    def __call__(self, dataset_dict: dict) -> dict:
        example = super().__call__(dataset_dict)
        objects = example.get("instances")
        if objects is not None and objects.has("gt_masks"):
            objects.gt_boxes = objects.gt_masks.get_bounding_boxes()
            objects.gt_boxes.clip(objects.image_size)  # polygons may leave the image
            example["instances"] = filter_empty_instances(objects)
        return example


def build_augmentations(cfg: CfgNode) -> "list[_TorchvisionAugmentation]":
    """Build ``INPUT.AUGMENTATIONS`` from calls such as ``RandomCrop(size=512)``.

    No code in them is run. Other calls than of transforms, with plain values, that move boxes and
    masks along are a ConfigError.
    """
    return [
        _TorchvisionAugmentation(str(call), cfg) for call in cfg.INPUT.AUGMENTATIONS
    ]


#: in torchvision's message of a crop
_TOO_LARGE = "is larger than input image"


class _TorchvisionAugmentation(Augmentation):
    def __init__(self, call: str, cfg: CfgNode) -> None:
        super().__init__()
        self._bgr = cfg.INPUT.FORMAT == "BGR"
        self._call = call
        try:
            self._transform = _parse_call(call)
            kind = type(self._transform)
            self.moves = kind.__module__.endswith("_geometry")
            self.recolors = kind.__module__.endswith("_color")
            if kind in _FLIPS and cfg.MODEL.KEYPOINT_ON:
                raise ValueError(
                    "does not exchange left and right keypoints, as INPUT.RANDOM_FLIP does"
                )
            self._try()
        except Exception as error:  # torchvision's classes raise several
            reason = str(error).rstrip(".") or type(error).__name__
            raise ConfigError(
                f"INPUT.AUGMENTATIONS ({call!r}): {reason}. Fix: give calls with plain values of "
                "transforms that move boxes and masks along, such as 'RandomCrop(size=512)'."
            ) from error

    def _try(self) -> None:
        """Augment an example, to find transforms that cannot be used."""
        try:
            moved = self.get_transform(np.zeros((600, 600, 3), np.uint8))
        except ConfigError:  # a crop, which may fit the images
            return

        moved.apply_coords(np.zeros((1, 2)))  # torchvision before 0.24 cannot
        pixels = moved.apply_image(None)
        if pixels.dtype != np.uint8:
            raise TypeError("does not return an image of 8 bits")
        if pixels.shape[2:] != (3,) or not pixels.size:
            raise ValueError(f"returns pixels of shape {pixels.shape}, not (H, W, 3)")

    def get_transform(self, image: np.ndarray) -> Transform:
        try:
            return _Move(self._transform, image, self._bgr)
        except ValueError as error:
            if _TOO_LARGE not in str(error):
                raise
            height, width = image.shape[:2]
            raise ConfigError(
                f"INPUT.AUGMENTATIONS ({self._call!r}): a photo of {width} x {height} pixels is smaller than the crop. "
                "Fix: add pad_if_needed=True to RandomCrop, or give a smaller size."
            ) from error


def _parse_call(call: str) -> v2.Transform:
    """Build the transform of a call with plain values; ``fill`` is for pixels, masks get 0."""
    node: Any = ast.parse(call if "(" in call else f"{call}()", mode="eval").body
    name = ast.unparse(node.func)
    if name not in _USABLE:
        raise ValueError(f"not a supported transform.{similar_names(name, _USABLE)}")

    arguments = map(ast.literal_eval, node.args)
    keywords = {
        keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords
    }
    call_arguments = inspect.signature(_USABLE[name]).bind(*arguments, **keywords)
    values = call_arguments.arguments
    if values.get("padding_mode", "constant") != "constant":
        raise ValueError("padding_mode would copy parts of objects")
    if isinstance(values.get("fill"), dict):
        raise ValueError("fill is a dict, which may fill masks")
    if "fill" in values:
        values["fill"] = {tv_tensors.Image: values["fill"], "others": 0}
    return _USABLE[name](**values)


class _Move(Transform):
    """A transform with the parameters that it has drawn for an image."""

    def __init__(self, transform: v2.Transform, image: np.ndarray, bgr: bool) -> None:
        super().__init__()
        self._transform = transform
        self._size = image.shape[:2]
        # stays empty where a transform with a probability leaves the image as it is
        self._drawn: list[Any] = []

        # hue and gray values are computed from RGB
        rgb = image[:, :, ::-1] if bgr else image
        pixels = torch.from_numpy(rgb.transpose(2, 0, 1).copy())
        recording = copy.copy(transform)
        recording.transform = self._record
        drawn = np.asarray(recording(tv_tensors.Image(pixels)))
        rgb = drawn.transpose(1, 2, 0)
        self._pixels = np.ascontiguousarray(rgb[:, :, ::-1] if bgr else rgb)

    def _record(self, value: Any, params: Any) -> Any:
        """Transform a value and keep the parameters that were drawn."""
        self._drawn.append(params)
        return self._transform.transform(value, params)

    def apply_image(self, img: Any) -> np.ndarray:
        return self._pixels

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        # as boxes without a size: torchvision's keypoints are pixels
        points = torch.from_numpy(np.hstack([coords, coords]).astype(float))
        boxes = tv_tensors.BoundingBoxes(
            points, format="XYXY", canvas_size=self._size, clamping_mode=None
        )
        return self._moved(boxes)[:, :2]

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        # Detectron2's flip gives a view, which torch does not take
        mask = torch.from_numpy(np.ascontiguousarray(segmentation))
        return self._moved(tv_tensors.Mask(mask[None]))[0]

    def _moved(self, value: Any) -> np.ndarray:
        for params in self._drawn:
            value = self._transform.transform(value, params)
        return np.asarray(value)
