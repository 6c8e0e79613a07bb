"""The split of one COCO file: by the names of its images, the same on every machine and at every time."""

import copy
import hashlib
import json

import pytest
from detectron2.utils.file_io import PathManager

from gw_detectron.data.coco_split import split_coco
from gw_detectron.data.derived_json import DerivedJsonHandler
from gw_detectron.errors import DataError

NAMES = [f"2023/{number}.jpg" for number in range(2000)]


def content(names, first_id=1):
    return {
        "info": {"year": 2023},
        "categories": [{"id": 1, "name": "cup"}],
        "images": [{"id": number, "file_name": name} for number, name in enumerate(names, first_id)],
        "annotations": [
            {"id": 2 * number + extra, "image_id": number}
            for number, _ in enumerate(names, first_id)
            for extra in (0, 1)
        ],
    }


def names(part):
    return {image["file_name"] for image in part["images"]}


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.5, 0.9])
def test_the_share_and_the_objects_of_the_images(fraction):
    whole = content(NAMES)
    train, val = split_coco(copy.deepcopy(whole), fraction)
    assert names(train) | names(val) == set(NAMES) and not names(train) & names(val)
    assert len(val["images"]) / 2000 == pytest.approx(fraction, abs=0.04)  # more than three standard deviations
    for part in (train, val):
        assert part["categories"] == whole["categories"] and part["info"] == whole["info"]
        assert {a["image_id"] for a in part["annotations"]} == {image["id"] for image in part["images"]}
    assert len(train["annotations"]) + len(val["annotations"]) == 4000


def test_the_hash_of_the_name_decides():
    def place(name):
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) / 16**64

    assert names(split_coco(content(NAMES), 0.3).val) == {name for name in NAMES if place(name) < 0.3}


def test_images_stay_on_their_side_when_others_are_added():
    few = names(split_coco(content(NAMES[500:700]), 0.2).val)
    many = names(split_coco(content(NAMES[::-1], first_id=77), 0.2).val)
    assert few == many & set(NAMES[500:700])


@pytest.mark.parametrize("fraction", [0.001, 0.999])
@pytest.mark.parametrize("count", [2, 3, 10])
def test_no_side_is_empty(count, fraction):
    train, val = split_coco(content(NAMES[:count]), fraction)
    assert sorted((len(train["images"]), len(val["images"]))) == [1, count - 1]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_images(count):
    with pytest.raises(DataError, match=f"{count} images cannot be split. Fix: "):
        split_coco(content(NAMES[:count]), 0.5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c.pop("images"),
        lambda c: c.pop("annotations"),
        lambda c: c["images"][0].pop("file_name"),
        lambda c: c["images"][0].update(file_name=3),
        lambda c: c["images"].append(None),
        lambda c: c["annotations"][0].update(image_id=[]),
        lambda c: c["annotations"][0].pop("image_id"),
    ],
)
def test_a_malformed_file_is_left_to_the_checks(damage):
    damaged = content(NAMES[:20])
    damage(damaged)
    assert split_coco(damaged, 0.5) == (damaged, damaged)
    assert split_coco([1], 0.5) == ([1], [1])


def test_an_annotation_of_no_image_is_kept():
    damaged = content(NAMES[:20])
    damaged["annotations"].append({"id": 99, "image_id": 1000})
    train, val = split_coco(damaged, 0.5)
    assert train["annotations"][-1]["id"] == 99 and val["annotations"][-1]["id"] != 99


def test_a_part_is_written_when_it_is_used_as_a_file(tmp_path):
    source, part = tmp_path / "all.json", tmp_path / "run" / "datasets" / "val.json"
    source.write_text(json.dumps(content(NAMES)))
    PathManager.register_handler(
        DerivedJsonHandler(str(part), str(source), lambda content: split_coco(content, 0.1).val), allow_override=True
    )
    expected = split_coco(content(NAMES), 0.1).val
    for mode in ("r", "rb"):
        with PathManager.open(str(part), mode) as file:
            assert json.loads(file.read()) == expected
    assert not part.parent.exists()
    assert PathManager.get_local_path(str(part)) == str(part)
    assert json.loads(part.read_text()) == expected
    source.unlink()
    with PathManager.open(str(part)) as file:
        assert json.load(file) == expected
    assert PathManager.get_local_path(str(part)) == str(part)


@pytest.mark.parametrize(
    ("text", "words"),
    [(b"{", "invalid JSON: "), (b"\x1f\x8b", "invalid JSON: "), (b'{"images": []}', "0 images cannot be split")],
)
def test_the_source_of_a_part_is_named(tmp_path, text, words):
    source, part = tmp_path / "all.json", tmp_path / "run" / "train.json"
    source.write_bytes(text)
    PathManager.register_handler(
        DerivedJsonHandler(str(part), str(source), lambda content: split_coco(content, 0.1).train), allow_override=True
    )
    with pytest.raises(DataError, match=f"'{source}': {words}.*Fix: "):
        PathManager.get_local_path(str(part))
    assert not part.parent.exists()
