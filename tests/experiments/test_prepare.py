"""The photos and labels of the experiments on real images are shrunk alike."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from experiments.real_images.prepare import prepare


def read(folder, name):
    content = json.loads((folder / name).read_text())
    for image in content["images"]:
        with Image.open(folder / "images" / image["file_name"]) as photo:
            assert photo.size == (image["width"], image["height"])
    return content


def test_lists_of_pascal_voc_become_files(tmp_path):
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(tmp_path / "JPEGImages/a.jpg")
    box = "<xmin>1</xmin><ymin>11</ymin><xmax>640</xmax><ymax>30</ymax>"
    (tmp_path / "Annotations/a.xml").write_text(
        f"<annotation><object><name>cell</name><bndbox>{box}</bndbox></object></annotation>"
    )
    (tmp_path / "ImageSets/Main/test.txt").write_text("a\n")

    prepare(tmp_path, tmp_path / "out")

    content = read(tmp_path / "out", "test.json")
    assert content["images"][0]["width"] == 320
    assert content["annotations"][0]["bbox"] == [0, 5, 320, 10]


def test_a_fifth_of_the_nuclei_is_for_validation(tmp_path):
    mask = np.zeros((200, 640), np.uint8)
    mask[40:100, 60:90] = 255
    # shrunk to nothing
    speck = np.zeros((200, 640), np.uint8)
    speck[0, 0] = 255
    for number in range(5):
        folder = tmp_path / "all" / f"n{number}"
        (folder / "images").mkdir(parents=True)
        (folder / "masks").mkdir()
        image = Image.new("RGBA", (640, 200), (number, 0, 0))
        image.save(folder / "images/photo.png")
        Image.fromarray(mask).save(folder / "masks/m.png")
        Image.fromarray(speck).save(folder / "masks/s.png")

    prepare(tmp_path / "all", tmp_path / "out")

    train = read(tmp_path / "out", "train.json")
    val = read(tmp_path / "out", "val.json")
    assert (len(train["images"]), len(val["images"])) == (4, 1)
    for image in train["images"] + val["images"]:
        with Image.open(tmp_path / "out/images" / image["file_name"]) as photo:
            red, *_ = photo.getpixel((0, 0))
        assert Path(image["file_name"]).stem == f"n{red}"
    (annotation,) = val["annotations"]
    assert annotation["bbox"] == [30, 20, 15, 30]
    assert coco_mask.decode(annotation["segmentation"]).sum() == annotation["area"]
