"""A COCO dataset of drawn shapes: no download, the same images every time."""

from .dataset import ShapesConfig, draw_images, draw_scene, write_shapes

__all__ = ["ShapesConfig", "draw_images", "draw_scene", "write_shapes"]
