"""Errors of reading data name the image."""

import numpy as np
import pytest
import torch
from detectron2.data.detection_utils import check_image_size
from PIL import Image

from gw_detectron.data.dataset_mapper import ImageNamingMapper
from gw_detectron.errors import RecordError


def wrong_size(record):
    raise ValueError("height 3 instead of 4")


def test_an_error_in_a_worker_process_has_the_message_alone():
    def read(records):
        return [ImageNamingMapper(wrong_size)(record) for record in records]

    loader = torch.utils.data.DataLoader([{"file_name": "a.jpg"}], num_workers=1, collate_fn=read)
    with pytest.raises(RecordError) as raised:
        next(iter(loader))
    assert str(raised.value).startswith("'a.jpg': cannot be used: height 3 instead of 4")


def test_a_photo_of_another_size_than_its_record():
    def read(record):
        check_image_size(record, np.zeros((300, 200, 3), np.uint8))

    record = {"file_name": "photos/a.jpg", "width": 300, "height": 200}
    with pytest.raises(RecordError) as raised:
        ImageNamingMapper(read)(record)
    assert str(raised.value).startswith(
        "'photos/a.jpg': width and height are not those of its record: got (200, 300), expect (300, 200). Fix: correct"
    )
    assert "EXIF" in str(raised.value)


def test_a_damaged_photo_is_named_once(tmp_path):
    name = str(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_text("no photo")
    with pytest.raises(RecordError, match=r"cannot be used: cannot identify image file\. Fix: repair") as raised:
        ImageNamingMapper(lambda record: Image.open(record["file_name"]))({"file_name": name})
    assert str(raised.value).count(name) == 1


def test_errors_of_a_custom_mapper_name_the_file_and_keep_their_class():
    def bug(record):
        return record["annotations"]

    with pytest.raises(RecordError, match="^'a.jpg': cannot be used: height 3 instead of 4"):
        ImageNamingMapper(wrong_size)({"file_name": "a.jpg"})
    with pytest.raises(KeyError) as raised:
        ImageNamingMapper(bug)({"file_name": "a.jpg"})
    assert raised.value.__notes__ == ["while reading a.jpg"]


def test_files_that_pillow_refuses_are_named(tmp_path, monkeypatch):
    Image.new("RGB", (40, 40)).save(tmp_path / "huge.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "huge.png").read_bytes()[:33] + b"\0\0\0\1\1\1\1\1")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    mapper = ImageNamingMapper(lambda record: Image.open(record["file_name"]).load())
    for name in ("huge.png", "broken.png"):
        with pytest.raises(RecordError, match=f"{name}': cannot be used: .* Fix: repair"):
            mapper({"file_name": str(tmp_path / name)})
