"""Images: reading, folders, errors."""

import pytest
from PIL import Image

from gw_detectron.data.images import load_images


def test_load_images(tmp_path):
    for index in range(5):
        Image.new("RGB", (300 + index, 400)).save(tmp_path / f"{index}.jpg")
    images = load_images(tmp_path, 3)
    assert [image.size for image in images] == [(224, 224)] * 3
    (tmp_path / "0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.jpg.*cannot be read"):
        load_images(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match="folder not found"):
        load_images(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="none found"):
        load_images(tmp_path / "empty")
