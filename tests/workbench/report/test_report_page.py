"""The page stands alone and is well-formed; the command prints and replaces reports."""

import base64
import io
import json
from html.parser import HTMLParser

import pytest
from PIL import Image

from gw_detectron.errors import ConfigError, FileAccessError, MissingFileError
from gw_detectron.workbench.commands.report import get_parser, main
from gw_detectron.workbench.report import write_report

from ...tiny_run import ROOT
from .fake_run import write_run

VOID = {"meta", "img", "br"}
RETINANET = ROOT / "configs" / "quick_schedules" / "retinanet_R_18_FPN_GW_instant.yaml"


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects text, links and images."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.ids, self.links, self.text = [], [], set(), [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        assert tag not in ("script", "link", "iframe", "object", "base")
        if tag == "img":
            self.images.append(values["src"])
        self.links += [values[key] for key in ("href", "srcset", "data") if key in values]
        self.ids |= {values["id"]} if "id" in values else set()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(folder):
    text = (folder / "report.html").read_text()
    assert "url(" not in text and "@import" not in text
    page = Page(text)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    for source in page.images:
        head, _, data = source.partition(",")
        assert head in ("data:image/png;base64", "data:image/jpeg;base64")
        assert (
            min(
                Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
                .convert("RGB")
                .size
            )
            > 20
        )
    numbers = json.loads((folder / "report.json").read_text())
    assert len(page.images) > 3
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json"}
    return page, numbers


def report(*words):
    main(get_parser().parse_args([str(word) for word in words]))


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 3, "config": RETINANET},
        {"classes": 1, "MODEL__MASK_ON": True},  # masks are on, but not in the predictions
        {"classes": 80},
    ],
    ids=["retinanet", "one class", "80 classes"],
)
def test_the_page_is_well_formed_and_stands_alone(tmp_path, options):
    folder = write_run(tmp_path / "run", **options)
    report(folder, "--score", 1, "--output", tmp_path / "none")
    assert set(
        json.loads((tmp_path / "none" / "report.json").read_text())["errors"]["kinds"].values()
    ) == {0, 18}
    report(folder, "--images", 2)
    page, numbers = check_page(folder / "report")
    assert "<b>" in page.text  # the name of a class
    assert page.ids == {"summary", "curves", "ap_per_class", "recall", "predictions", "errors"}
    assert numbers.keys() == page.ids - {"predictions"} | {"missing"}
    assert len(numbers["ap_per_class"]) == options["classes"]
    assert len(numbers["errors"]["images"]) == 2
    kinds, objects = (
        numbers["errors"]["kinds"],
        sum(row["objects"] for row in numbers["ap_per_class"]),
    )
    assert kinds["correct"] + kinds["wrong class"] + kinds["missed"] == objects
    rows = {
        row["class"]: sum(row["found_as"].values()) for row in numbers["errors"]["confusion"]
    }
    assert rows == {
        row["class"]: row["objects"]
        for row in numbers["ap_per_class"]
        if row["objects"] or row["class"] in rows
    }
    recall = numbers["recall"]
    assert recall["objects"] == objects == recall["found"] + sum(recall["not_found"].values())


def test_missing_parts_are_named_on_the_page_and_printed(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "report").mkdir()
    (folder / "report" / "report.json").touch()  # an earlier report is replaced
    (folder / "metrics.json").unlink()
    (folder / "photos" / "1.jpg").unlink()
    config = (folder / "config.yaml").read_text()  # of a script that registers its own heads
    (folder / "config.yaml").write_text(
        config.replace("NAME: StandardROIHeads", "NAME: MyHeads")
    )
    report(folder)
    page = Page((folder / "report" / "report.html").read_text())
    numbers = json.loads((folder / "report" / "report.json").read_text())
    printed = capsys.readouterr().out
    assert [entry["parts"] for entry in numbers["missing"]] == [
        ["Curves"],
        ["Predictions", "Errors"],
    ]
    assert "1.jpg" in numbers["missing"][1]["reason"] and "ap_per_class" in numbers
    assert "bbox AP" in printed and "norms" not in numbers["summary"]
    assert all(
        entry["reason"] in text for entry in numbers["missing"] for text in (page.text, printed)
    )
    (folder / "report" / "thesis.png").touch()
    (folder / "annotations.json").unlink()  # not looked at
    with pytest.raises(FileAccessError, match=r"thesis\.png"):
        write_report(folder)
    assert (folder / "report" / "report.html").exists()


def test_a_report_without_detections_is_printed(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "inference" / "coco_instances_results.json").write_text("[]")
    report(folder)
    _, numbers = check_page(folder / "report")
    assert "bbox AP 0.0" in capsys.readouterr().out
    assert numbers["summary"]["scores"]["bbox"]["AP"] == 0
    assert numbers["errors"]["kinds"]["missed"] == 18 and len(numbers["errors"]["images"]) == 4


def test_runs_side_by_side(tmp_path):
    names = ("gn", "gw$x_$")
    first, second = (write_run(tmp_path / name, classes=3) for name in names)
    predictions = second / "inference" / "coco_instances_results.json"
    kept = [each for each in json.loads(predictions.read_text()) if each["category_id"] != 11]
    predictions.write_text(json.dumps(kept))
    report(first, second, "--output", tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "runs.json").read_text())
    alone = {name: write_report(tmp_path / name) for name in names}
    assert {name: list(rows.values()) for name, rows in numbers["classes"].items()} == {
        name: each["ap_per_class"] for name, each in alone.items()
    }
    lost = [name for name, row in numbers["classes"][names[1]].items() if not row["detections"]]
    page = Page((tmp_path / "out" / "runs.html").read_text())
    assert len(lost) == 1 and len(page.images) == 3
    assert f"0.0 ({-numbers['classes']['gn'][lost[0]]['box AP']:+.1f})" in page.text
    for flag, value in (("--images", 4), ("--score", 0.5)):
        with pytest.raises(ConfigError, match=f"{flag}.*one run"):
            report(first, second, flag, value)


def test_runs_on_dense_images_side_by_side(tmp_path):
    """The AP of all detections has one column, also if models give different numbers of them."""
    runs = [
        write_run(tmp_path / str(limit), classes=1, TEST__DETECTIONS_PER_IMAGE=limit)
        for limit in (100, 500)
    ]
    for run in runs:
        content = json.loads((run / "annotations.json").read_text())
        content["annotations"] = [
            {**content["annotations"][0], "id": number} for number in range(1, 111)
        ]
        (run / "annotations.json").write_text(json.dumps(content))
    report(*runs, "--output", tmp_path / "out")
    scores = [
        each["scores"]["bbox"]
        for each in json.loads((tmp_path / "out" / "runs.json").read_text())["runs"].values()
    ]
    assert [name for each in scores for name in each if "@" in name] == ["AP@110", "AP@500"]
    text = Page((tmp_path / "out" / "runs.html").read_text()).text
    assert text.count("box AP@N") == 1


def test_runs_that_cannot_be_compared(tmp_path):
    runs = [
        write_run(tmp_path / name, classes=classes)
        for name, classes in (("a", 3), ("b", 2), ("c", 3), ("d", 3))
    ]
    for place, part, change in (
        (2, "images", {"file_name": "6.jpg"}),
        (3, "annotations", {"bbox": [1, 1, 9, 9]}),
    ):
        content = json.loads((runs[place] / "annotations.json").read_text())
        content[part][0] |= change
        (runs[place] / "annotations.json").write_text(json.dumps(content))
    for other, error, named in (
        (runs[1], ConfigError, "classes"),
        (runs[2], ConfigError, "images"),
        (runs[3], ConfigError, "annotations"),
        (runs[0], ConfigError, "twice"),
        (tmp_path / "none", MissingFileError, "none"),
    ):
        with pytest.raises(error, match=named):
            report(runs[0], other, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
