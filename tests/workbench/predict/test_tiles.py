"""Large images in tiles: one detection for each object, the statistics of the image, bounded memory."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from detectron2.data import Metadata
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from PIL import Image

from gw_detectron.config import read_config
from gw_detectron.errors import ConfigError, DataError
from gw_detectron.workbench.commands.predict import get_parser, main
from gw_detectron.workbench.images import open_image, read_image
from gw_detectron.workbench.predict import Predictor, TiledPredictor, open_predictor
from gw_detectron.workbench.predict.pictures import shrunk

from .conftest import Handmade

# x0, y0, x1, y1, one color each
OBJECTS = [
    (5, 9, 30, 41),
    (40, 30, 95, 120),
    (180, 170, 199, 199),
    (90, 5, 111, 25),
]


@pytest.fixture
def scene():
    """Rectangles on black, 150 rows of 211 pixels cut out of 200 x 200."""
    image = np.zeros((200, 200, 3), np.uint8)
    for color, (x0, y0, x1, y1) in enumerate(OBJECTS, start=1):
        image[y0:y1, x0:x1] = color
    return image


class Colors(Handmade):
    """Find what a tile shows of the object of each color, by its pixels, in masks of the tile."""

    def __call__(self, image):
        colors = [color for color in np.unique(image).tolist() if color]
        masks = torch.zeros(len(colors), *image.shape[:2], dtype=torch.bool)
        boxes = torch.zeros(len(colors), 4)
        for index, color in enumerate(colors):
            masks[index] = torch.tensor(image[..., 0] == color)
            rows, columns = masks[index].nonzero(as_tuple=True)
            corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            boxes[index] = torch.tensor(corners)

        found = Instances(image.shape[:2], pred_masks=masks, pred_boxes=Boxes(boxes))
        # the largest piece is the most certain
        found.scores = 0.5 + masks.sum((1, 2)) / 1e5
        found.pred_classes = torch.zeros(len(masks), dtype=torch.long)
        return found


@pytest.mark.parametrize(
    ("tile", "overlap"), [(50, 10), (64, 20), (199, 1), (70, 55), (150, 40)]
)
def test_an_object_in_many_tiles_is_one_detection(scene, tile, overlap):
    predict = TiledPredictor(Colors(), tile, overlap, "tile")

    found = predict(scene)  # the second object is in up to nine tiles

    boxes = [tuple(box) for box in found.pred_boxes.tensor.int().tolist()]
    assert sorted(boxes) == sorted(OBJECTS)
    scores = found.scores.tolist()
    assert scores == sorted(scores, reverse=True)
    for (x0, y0, x1, y1), rle in zip(boxes, found.pred_masks_rle, strict=True):
        expected = np.zeros((200, 200), np.uint8)
        expected[y0:y1, x0:x1] = 1
        np.testing.assert_array_equal(mask_util.decode(rle), expected)


@pytest.mark.parametrize("size", [(100, 100), (1, 200), (200, 1), (3, 3), (90, 51)])
def test_images_of_any_size_are_covered(scene, size):
    image = scene[: size[0], : size[1]]
    tiled = TiledPredictor(Colors(), 50, 37, "tile")
    seen = np.zeros(size, int)
    height, width = np.minimum(50, size)
    for window in tiled.windows(image):
        assert seen[window].shape == (height, width)
        seen[window] += 1

    assert seen.min() >= 1
    assert len(tiled(image)) == len(Colors()(image))


def test_touching_objects_stay_apart():
    image = np.zeros((60, 100, 3), np.uint8)
    # of one class, both cut by the edge of the first tile
    image[10:30, 30:70] = 1
    image[30:50, 30:70] = 2

    found = TiledPredictor(Colors(), 60, 20, "tile")(image)

    boxes = sorted(found.pred_boxes.tensor.tolist())
    assert boxes == [[30, 10, 70, 30], [30, 30, 70, 50]]


def test_masks_at_the_border_of_the_image_and_without_pixels():
    image = np.zeros((40, 60, 3), np.uint8)
    image[:, 10:50] = 1  # full columns: the runs of neighboring columns touch
    predict = TiledPredictor(Colors(), 40, 10, "tile")

    (rle,) = predict(image).pred_masks_rle
    empty = predict(np.zeros((100, 100, 3), np.uint8))

    np.testing.assert_array_equal(mask_util.decode(rle), image[..., 0])
    assert mask_util.area(rle) == 40 * 40
    assert len(empty) == 0
    assert empty.image_size == (100, 100)


def test_a_large_image_is_shrunk_with_boxes_and_a_small_one_keeps_its_masks():
    found = Instances(
        (60, 100),
        scores=torch.ones(1),
        pred_classes=torch.zeros(1),
        pred_boxes=Boxes([[10, 20, 30, 50]]),
    )
    found.pred_masks_rle = mask_util.frPyObjects([[10, 20, 30, 20, 30, 50]], 60, 100)
    image = np.arange(6000).reshape(60, 100)
    same, kept = shrunk(image, found, 100)
    assert same.shape == image.shape and kept.pred_masks == found.pred_masks_rle

    small, result = shrunk(image, found, 30)
    np.testing.assert_array_equal(small, image[::4, ::4])
    assert result.pred_boxes.tensor.tolist() == [[2.5, 5, 7.5, 12.5]]
    assert not result.has("pred_masks")


@pytest.fixture(scope="module")
def predictor(run_folder):
    return open_predictor(run_folder, score_threshold=0.1, device="cpu")


@pytest.fixture(scope="module")
def large():
    pixels = np.random.default_rng(3).integers(0, 256, (12, 17, 3), np.uint8)
    image = np.array(Image.fromarray(pixels).resize((170, 120)))
    image[:, :90] //= 6  # dark on the left
    return image


def fields(found):
    return {
        name: getattr(value, "tensor", value)
        for name, value in found.get_fields().items()
    }


def test_one_tile_is_the_image_bit_for_bit(predictor, large):
    expected = fields(predictor(large))
    assert len(expected["scores"]) > 3
    for statistics in ("image", "tile"):
        found = fields(TiledPredictor(predictor, 170, 30, statistics)(large))
        for name, values in expected.items():
            assert torch.equal(found[name], values)


@pytest.mark.parametrize("size", [(1, 900), (900, 1)])
def test_an_image_whose_side_would_be_resized_to_nothing(predictor, size):
    assert (
        TiledPredictor(predictor, 400, 30)(np.zeros((*size, 3), np.uint8)).image_size
        == size
    )


def test_the_statistics_of_the_image_bring_tiles_closer_to_it(
    predictor, large, monkeypatch
):
    image, model = large[:64, :128], predictor.model
    # the scale of a tile is that of the image
    monkeypatch.setitem(predictor.cfg.INPUT, "MIN_SIZE_TEST", 0)

    @torch.no_grad()
    def left_half(pixels):
        inputs = model.preprocess_image([predictor.input(pixels)])
        return model.backbone(inputs.tensor)["p2"][..., :16]

    expected = left_half(image)
    alone = left_half(image[:, :64])
    # of the whole image; of one window after the other
    for side, exact in ((128, True), (64, False)):
        monkeypatch.setattr(
            "gw_detectron.workbench.predict.tiled_predictor._WINDOW", side
        )
        statistics = TiledPredictor(predictor, 64, 0).measure(image)
        with statistics.apply():
            whole = left_half(image)
        with statistics.apply():
            shared = left_half(image[:, :64])
        assert torch.allclose(whole, expected, rtol=1e-4, atol=1e-4) == exact
        assert (shared - expected).norm() < 0.65 * (alone - expected).norm()


def test_without_such_norms_the_statistics_change_nothing(run_folder, large):
    opts = [
        "MODEL.RESNETS.NORM",
        "FrozenBN",
        "MODEL.RESNETS.WHITEN_NORM",
        "FrozenBN",
        "MODEL.FPN.NORM",
        "",
    ]
    cfg = read_config(str(run_folder / "config.yaml"), opts)
    torch.manual_seed(0)
    frozen = Predictor(build_model(cfg).eval(), cfg, Metadata(), 0.1)
    assert not TiledPredictor(frozen, 100, 30).measure(large).layers
    image = fields(TiledPredictor(frozen, 100, 30, "image")(large))
    tile = fields(TiledPredictor(frozen, 100, 30, "tile")(large))

    assert len(image["scores"]) > 3
    assert image.pop("pred_masks_rle") == tile.pop("pred_masks_rle")
    for name, values in image.items():
        assert torch.equal(tile[name], values)


def test_the_command(run_folder, tmp_path, large):
    Image.fromarray(large).save(tmp_path / "large.png")
    words = [
        run_folder,
        tmp_path / "large.png",
        "--output",
        tmp_path / "out",
        "--score-threshold",
        "0.1",
    ]

    def run(*flags):
        return main(get_parser().parse_args([*map(str, words), *flags]))

    def results():
        return json.loads((tmp_path / "out" / "predictions.json").read_text())

    tiles = ("--tiles", "100", "--overlap", "30")
    assert run(*tiles, "--device", "cpu")
    of_image = results()
    assert len(of_image) > 3
    assert {tuple(row["segmentation"]["size"]) for row in of_image} == {(120, 170)}
    assert (tmp_path / "out" / "pictures" / "large.png").is_file()

    run(*tiles, "--statistics", "tile")
    assert results() != of_image
    for flags, name in (
        (["--tiles", "100", "--overlap", "100"], r"overlap \(100\)"),
        (["--tiles", "0"], r"tiles \(0\)"),
        (["--overlap", "5"], "--overlap"),
    ):
        with pytest.raises(ConfigError, match=name):
            run(*flags)


@pytest.fixture
def tiff(tmp_path, large):
    """Write a TIFF file in blocks of 64 pixels."""
    rasterio = pytest.importorskip("rasterio")

    def write(pixels=large, **options):
        height, width, bands = pixels.shape
        options = {
            "tiled": True,
            "blockxsize": 64,
            "blockysize": 64,
            "compress": "deflate",
        } | options
        with (
            warnings.catch_warnings(action="ignore"),
            rasterio.open(
                tmp_path / "large.tif",
                "w",
                "GTiff",
                width,
                height,
                bands,
                dtype=pixels.dtype,
                **options,
            ) as file,
        ):
            file.write(pixels.transpose(2, 0, 1))
        return tmp_path / "large.tif"

    return write


@pytest.mark.parametrize("bands", [1, 3, 4])
def test_windows_of_a_tiff_are_those_of_the_whole_image(tiff, large, bands):
    pixels = np.concatenate([large, large], 2)[..., :bands]
    path = tiff(pixels, photometric="RGB" if bands > 2 else "MINISBLACK")
    image = open_image(path)
    assert not isinstance(image, np.ndarray) and image.shape == large.shape
    whole = read_image(path, "RGB")
    np.testing.assert_array_equal(image[20:90, 100:], whole[20:90, 100:])
    assert image[::3, ::3].shape == whole[::3, ::3].shape


@pytest.mark.parametrize(
    ("bands", "dtype", "options"),
    [
        (1, np.uint8, {"photometric": "MINISWHITE"}),
        (1, np.uint8, {"nbits": 4}),
        (4, np.uint8, {"photometric": "RGB", "alpha": "PREMULTIPLIED"}),
        (3, np.uint16, {"photometric": "RGB"}),
    ],
)
def test_tiffs_whose_values_are_not_those_of_the_pixels_are_read_whole(
    tiff, large, bands, dtype, options
):
    pixels = np.concatenate([large // 16, large // 16], 2)[..., :bands]
    path = tiff(pixels.astype(dtype), **options)
    np.testing.assert_array_equal(open_image(path)[:, :], read_image(path, "RGB"))


def test_damaged_and_deep_files_are_refused(tiff, large):
    with pytest.raises(DataError, match=r"large\.tif.*more than 8 bits"):
        open_image(tiff(large[..., :1].astype(np.uint16) * 256))
    path = tiff()
    image = open_image(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"large\.tif"):
        open_image(path)[:, :]
    del image


MEMORY = """
import re
from pathlib import Path
from gw_detectron.workbench.commands import main
try:
    main()
finally:
    print("peak", *re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text()))
"""


@pytest.mark.slow
def test_ten_thousand_pixels_need_less_than_three_gibibytes(run_folder, tmp_path, tiff):
    pixels = np.kron(
        np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8),
        np.ones((500, 500, 1), np.uint8),
    )
    words = [
        "predict",
        run_folder,
        tiff(pixels),
        "--output",
        tmp_path / "out",
        "--tiles",
        1024,
        "--no-pictures",
    ]
    command = [sys.executable, "-c", MEMORY, *map(str, words), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert " 0 objects" not in done.stdout and "1 images" in done.stdout, done.stderr
    assert int(done.stdout.split("peak ")[1]) < 3 * 1024**2  # in KiB
