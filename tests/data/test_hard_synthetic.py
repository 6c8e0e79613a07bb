"""Hard synthetic dataset: what tells the class, splits without leaks, registration."""

import colorsys
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from scipy import ndimage

from gw_detectron.data import HardSyntheticConfig, SyntheticConfig, make_synthetic, register_synthetic
from gw_detectron.data.synthetic import draw_scene
from gw_detectron.data.synthetic.hard_scene import HardScene
from gw_detectron.errors import ConfigError

from ..tiny_run import environment

TINY = HardSyntheticConfig(num_train=30, num_val=12, num_tune=12)
FOLDER = "gw_synthetic_hard"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    make_synthetic(root, TINY)
    register_synthetic(root, TINY)
    yield root
    register_synthetic()


def read(root, split):
    return json.loads((root / FOLDER / "annotations" / f"instances_{split}.json").read_text())


def hashes(root):
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def scene(seed, side=96):
    return HardScene(side, side, np.random.default_rng(seed), min_visible=0.4, hue_spread=1.0)


def test_the_sizes_of_the_default_set():
    config = HardSyntheticConfig()
    assert {split: config.count(split) for split in config.splits} == {"train": 4000, "val": 500, "tune": 500}
    sides = [max(obj["bbox"][2:]) for obj in boxes(config, 40)]
    assert min(sides) < 20 and max(sides) > 150
    assert 30 < np.median(sides) < 80


def boxes(config, count):
    for index in range(count):
        for obj in draw_scene(config, "val", index).objects:
            rows, columns = np.nonzero(obj.mask)
            yield {"bbox": [columns.min(), rows.min(), np.ptp(columns) + 1, np.ptp(rows) + 1]}


def test_neither_shape_nor_texture_alone_tells_the_class():
    kinds = [tuple(shape.name.split()) for shape in HardScene.shapes]
    classes = kinds[: HardScene.num_classes]
    assert len(set(kinds)) == len(kinds) == 24 and len(classes) == 8
    for texture, shape in classes:
        other_texture = [kind for kind in kinds if kind[1] == shape and kind[0] != texture]
        other_shape = [kind for kind in kinds if kind[0] == texture and kind[1] != shape]
        assert len(other_texture) == 3 and len(other_shape) == 5
    assert list(TINY.class_names) == [" ".join(kind) for kind in classes]


def test_the_hue_does_not_tell_the_class():
    found = {0: [], 4: [], 7: []}
    for seed in range(200):
        drawn = scene(seed, side=32)
        for category, hues in found.items():
            hue, saturation, _ = colorsys.rgb_to_hsv(*drawn._texture(category, drawn._x, drawn._y, 30)[0, 0] / 255)
            if saturation > 0.1:
                hues.append(hue)
    for hues in found.values():
        shares = np.histogram(hues, bins=4, range=(0, 1))[0] / len(hues)
        assert (np.abs(shares - 0.25) < 0.12).all()


def test_bright_and_dark_parts_of_textures_differ_in_gray_too():
    for seed in range(40):
        drawn = scene(seed)
        gray = drawn._texture(1, drawn._x, drawn._y, 30) @ np.array([0.299, 0.587, 0.114])
        assert np.ptp(gray) > 25


def test_look_alikes_are_drawn_but_are_no_objects():
    categories = [obj.category for index in range(30) for obj in draw_scene(TINY, "train", index).objects]
    assert set(categories) == set(range(HardScene.num_classes))
    drawn = []

    class Noted(HardScene):
        def _transform(self, category, *args):
            drawn.append(category)
            return super()._transform(category, *args)

    for seed in range(200):
        assert not Noted(48, 48, np.random.default_rng(seed), 0.4, 1.0).objects
    assert set(drawn) == set(range(HardScene.num_classes, len(HardScene.shapes)))


def test_a_bar_is_cut_out_of_the_masks_it_crosses():
    cut = 0
    for seed in range(30):
        drawn = scene(seed)
        if not drawn.add_object(0, 50):
            continue
        before, canvas = drawn.objects[0].mask, drawn._canvas.copy()
        drawn._add_bar()
        after = drawn.objects[0].mask
        changed = np.abs(drawn._canvas - canvas).max(axis=2)[1:-1, 1:-1] > 1e-6
        assert not (after & ~before).any()
        assert not (ndimage.binary_erosion(after, np.ones((3, 3))) & changed).any()
        assert changed[before & ~after].all()
        assert after.sum() >= 0.4 * drawn.objects[0].area
        cut += (after != before).any()
    assert cut > 15


def test_the_light_varies_between_and_within_images():
    means, ratios = [], []
    for seed in range(40):
        drawn = scene(seed, side=192)
        drawn._canvas[:] = 128.0
        gray = drawn.image().mean(axis=2)
        corners = [gray[:64, :64].mean(), gray[:64, -64:].mean(), gray[-64:, :64].mean(), gray[-64:, -64:].mean()]
        means.append(gray.mean())
        ratios.append(max(corners) / min(corners))
    assert min(means) < 85 and max(means) > 120
    assert np.median(ratios) > 1.1


def test_splits_share_no_image_and_no_layout(root):
    images, layouts = [], []
    for split in TINY.splits:
        content = read(root, split)
        assert len(content["images"]) == TINY.count(split)
        for record in content["images"]:
            pixels = np.asarray(Image.open(root / FOLDER / split / record["file_name"]))
            assert pixels.shape == (192, 192, 3)
            images.append(hashlib.sha256(pixels.tobytes()).hexdigest())
            objects = [a for a in content["annotations"] if a["image_id"] == record["id"]]
            assert TINY.min_objects <= len(objects) <= TINY.max_objects
            layouts.append(tuple(sorted((a["category_id"], *a["bbox"]) for a in objects)))
    total = sum(map(TINY.count, TINY.splits))
    assert len(set(images)) == len(set(layouts)) == total
    placed = [box for layout in layouts for box in layout]
    assert len(set(placed)) == len(placed)  # not even a single object is in the same place twice


@pytest.mark.slow
def test_another_process_makes_the_same_bytes(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    make_synthetic(here, HardSyntheticConfig(num_train=4, num_val=2, num_tune=2))
    code = (
        "import sys; from gw_detectron.data import HardSyntheticConfig, make_synthetic\n"
        "make_synthetic(sys.argv[1], HardSyntheticConfig(num_train=4, num_val=2, num_tune=2))"
    )
    variables = environment(tmp_path, PYTHONHASHSEED="123")
    subprocess.run([sys.executable, "-c", code, str(there)], check=True, capture_output=True, env=variables)
    assert hashes(here) == hashes(there)


@pytest.mark.parametrize("split", ["val", "tune"])
def test_the_coco_api_scores_the_ground_truth_100(root, split):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(root / FOLDER / "annotations" / f"instances_{split}.json"))
        results = [{k: a[k] for k in ("image_id", "category_id", "bbox")} | {"score": 1.0} for a in truth.anns.values()]
        score = COCOeval(truth, truth.loadRes(results), "bbox")
        score.evaluate()
        score.accumulate()
        score.summarize()
    assert score.stats[0] == pytest.approx(1.0)


def test_both_datasets_are_registered_and_made_on_first_use(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    register_synthetic()
    for name in (f"{FOLDER}_tune", f"{FOLDER}_val", f"{FOLDER}_train", "gw_synthetic_train"):
        assert name in DatasetCatalog.list() and f"{name}_panoptic_separated" in DatasetCatalog.list()
    assert not os.listdir(tmp_path)
    register_synthetic(tmp_path, HardSyntheticConfig(num_train=2, num_val=1, num_tune=3))
    assert len(DatasetCatalog.get(f"{FOLDER}_tune")) == 3
    assert os.path.isdir(tmp_path / FOLDER) and not os.path.isdir(tmp_path / "gw_synthetic")
    metadata = MetadataCatalog.get(f"{FOLDER}_tune")
    assert metadata.thing_classes == list(TINY.class_names)
    assert metadata.json_file == str(tmp_path / FOLDER / "annotations" / "instances_tune.json")
    background = MetadataCatalog.get(f"{FOLDER}_val_panoptic_separated").stuff_dataset_id_to_contiguous_id
    assert background == {0: 0, 9: 1}


def test_the_two_datasets_do_not_take_each_others_place(root):
    """A config of the other dataset neither reads nor replaces this one's files."""
    before = hashes(root)
    make_synthetic(root, SyntheticConfig(num_train=1, num_val=1))
    after = hashes(root)
    assert before.items() < after.items()
    with pytest.raises(ValueError, match=rf"'{root / FOLDER}': .*num_tune=12 \(now 13\)"):
        make_synthetic(root, HardSyntheticConfig(num_train=30, num_val=12, num_tune=13))


def test_parameters_out_of_range_are_refused():
    with pytest.raises(ConfigError, match=r"HardSyntheticConfig: num_tune \(0\): out of range. Fix: give 1 to inf"):
        HardSyntheticConfig(num_tune=0)
