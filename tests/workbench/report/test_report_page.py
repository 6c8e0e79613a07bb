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
from .fake_run import change_json, results_file, write_run

VOID = {"meta", "img", "br"}
REFUSED = {"script", "link", "iframe", "object", "base"}
RETINANET = ROOT / "configs" / "quick_schedules" / "retinanet_R_18_FPN_GW_instant.yaml"


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects text, links and images."""

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.images = []
        self.ids = set()
        self.links = []
        self.text = ""
        self.feed(path.read_text())
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in REFUSED
        values = dict(attrs)
        if tag == "img":
            self.images.append(values["src"])
        if "id" in values:
            self.ids.add(values["id"])
        self.links += [
            values[key] for key in ("href", "srcset", "data") if key in values
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_page(folder):
    """Return the page and the numbers of a report that refers to nothing outside of it."""
    text = (folder / "report.html").read_text()
    assert "url(" not in text
    assert "@import" not in text

    page = Page(folder / "report.html")
    for link in page.links:
        assert link[0] == "#"
        assert link[1:] in page.ids
    for source in page.images:
        head, _, data = source.partition(",")
        assert head in ("data:image/png;base64", "data:image/jpeg;base64")
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        assert min(image.convert("RGB").size) > 20
    assert len(page.images) > 3
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json"}
    return page, read_numbers(folder)


def read_numbers(folder, name="report.json"):
    return json.loads((folder / name).read_text())


def report(*words):
    main(get_parser().parse_args([str(word) for word in words]))


@pytest.mark.parametrize(
    "options",
    [
        {"classes": 3, "config": RETINANET},
        # masks are on, but not in the predictions
        {
            "classes": 1,
            "MODEL__MASK_ON": True,
        },
        {"classes": 80},
    ],
    ids=["retinanet", "one class", "80 classes"],
)
def test_the_page_is_well_formed_and_stands_alone(tmp_path, options):
    folder = write_run(tmp_path / "run", **options)
    report(folder, "--images", 2)

    page, numbers = check_page(folder / "report")
    assert "<b>" in page.text  # the name of a class
    assert page.ids == {
        "summary",
        "curves",
        "ap_per_class",
        "recall",
        "predictions",
        "errors",
    }
    assert numbers.keys() == page.ids - {"predictions"} | {"missing"}
    assert len(numbers["ap_per_class"]) == options["classes"]
    assert len(numbers["errors"]["images"]) == 2

    objects = {row["class"]: row["objects"] for row in numbers["ap_per_class"]}
    total = sum(objects.values())
    kinds = numbers["errors"]["kinds"]
    assert kinds["correct"] + kinds["wrong class"] + kinds["missed"] == total
    for row in numbers["errors"]["confusion"]:
        if row["class"] != "no object":
            assert sum(row["found_as"].values()) == objects.pop(row["class"])
    assert not any(objects.values())
    assert 0 < numbers["errors"]["best_threshold"] < 1
    recall = numbers["recall"]
    assert recall["objects"] == total
    assert recall["found"] + sum(recall["not_found"].values()) == total


def test_labels_that_were_changed_since_the_run_are_told(tmp_path):
    folder = write_run(tmp_path / "run")
    labels = str(folder / "annotations.json")
    sources = {"fake_val": [labels, "a digest of then"]}
    (folder / "sources.json").write_text(json.dumps(sources))

    write_report(folder)

    assert "has changed since the run" in Page(folder / "report" / "report.html").text


def test_all_objects_are_missed_above_all_scores(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    report(folder, "--score", 1, "--output", tmp_path / "none")

    errors = read_numbers(tmp_path / "none")["errors"]
    highest = f"for scores above {errors['best_threshold']:.3g}. The page shows scores"
    assert highest in capsys.readouterr().out
    kinds = errors["kinds"]
    assert kinds.pop("missed") == 18
    assert set(kinds.values()) == {0}


def test_missing_parts_are_named_on_the_page_and_printed(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    (folder / "report").mkdir()
    (folder / "report" / "report.json").touch()  # an earlier report is replaced
    (folder / "metrics.json").unlink()
    (folder / "photos" / "1.jpg").unlink()
    # of a script that registers its own heads
    config = (folder / "config.yaml").read_text()
    config = config.replace("NAME: StandardROIHeads", "NAME: MyHeads")
    (folder / "config.yaml").write_text(config)
    report(folder)

    printed = capsys.readouterr().out
    page = Page(folder / "report" / "report.html")
    numbers = read_numbers(folder / "report")
    curves, pictures = numbers["missing"]
    assert curves["parts"] == ["Curves"]
    assert pictures["parts"] == ["Predictions", "Errors"]
    assert "1.jpg" in pictures["reason"]
    for entry in (curves, pictures):
        assert entry["reason"] in page.text
        assert entry["reason"] in printed
    assert "bbox AP" in printed
    assert "ap_per_class" in numbers
    assert "norms" not in numbers["summary"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "annotations.json").unlink()  # not looked at
    (folder / "report").mkdir()
    for name in ("thesis.png", "report.json"):
        (folder / "report" / name).touch()

    with pytest.raises(FileAccessError, match=r"thesis\.png"):
        write_report(folder)


def test_links_that_point_to_themselves_are_named(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    run = str(write_run(tmp_path / "run"))
    words = ([run, "--output", str(loop)], [run, str(loop), "--output", f"{run}/x"])
    for each in words:
        with pytest.raises((FileAccessError, MissingFileError), match="loop"):
            main(get_parser().parse_args(each))


def test_names_of_classes_are_cut_and_escaped_on_the_page(tmp_path):
    folder = write_run(tmp_path / "run\x1b[31m")
    names = ["n" * 10_000, "n" * 10_000, "a\n\x1b[31m\ud800"]

    def rename(content):
        for category, name in zip(content["categories"], names, strict=True):
            category["name"] = name
        return content

    change_json(folder / "annotations.json", rename)
    report(folder)

    page, numbers = check_page(folder / "report")
    shown = [row["class"] for row in numbers["ap_per_class"]]
    assert shown == ["n" * 60 + "...", "n" * 60 + "... (1)", "a\\n\\x1b[31m\\ud800"]
    assert numbers["missing"] == []
    assert "\x1b" not in page.text
    assert "n" * 61 not in page.text


def test_a_report_without_detections_is_printed(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    results_file(folder).write_text("[]")
    report(folder)

    assert "bbox AP 0.0" in capsys.readouterr().out
    _, numbers = check_page(folder / "report")
    assert numbers["summary"]["scores"]["bbox"]["AP"] == 0
    assert numbers["errors"]["kinds"]["missed"] == 18
    assert len(numbers["errors"]["images"]) == 4


@pytest.fixture
def two_runs(tmp_path):
    """Two runs on the same images; the second one finds no object of a class."""
    first = write_run(tmp_path / "gn")
    second = write_run(tmp_path / "gw$x_$")
    change_json(
        results_file(second),
        lambda results: [result for result in results if result["category_id"] != 11],
    )
    return first, second


def test_runs_side_by_side(tmp_path, two_runs):
    report(*two_runs, "--output", tmp_path / "out")

    classes = read_numbers(tmp_path / "out", "runs.json")["classes"]
    for run in two_runs:
        alone = write_report(run)["ap_per_class"]
        assert list(classes[run.name].values()) == alone

    lost = classes["gn"]["class 1"]["box AP"]
    page = Page(tmp_path / "out" / "runs.html")
    assert classes["gw$x_$"]["class 1"]["detections"] == 0
    assert f"0.0 ({-lost:+.1f})" in page.text
    assert page.text.count("40 of 40") == 2
    assert len(page.images) == 3


def test_runs_on_dense_images_side_by_side(tmp_path):
    """The AP of all detections has one column, also if models give different numbers of them."""

    def crowd(content):
        first = content["annotations"][0]
        annotations = [{**first, "id": number} for number in range(1, 111)]
        return {**content, "annotations": annotations}

    runs = []
    for limit in (100, 500):
        run = write_run(
            tmp_path / str(limit), classes=1, TEST__DETECTIONS_PER_IMAGE=limit
        )
        change_json(run / "annotations.json", crowd)
        runs.append(run)
    report(*runs, "--output", tmp_path / "out")

    facts = read_numbers(tmp_path / "out", "runs.json")["runs"]
    assert "AP@110" in facts["100"]["scores"]["bbox"]
    assert "AP@500" in facts["500"]["scores"]["bbox"]
    assert Page(tmp_path / "out" / "runs.html").text.count("AP@N") == 1


def with_change(folder, part, change):
    def changed(content):
        content[part][0] |= change
        return content

    change_json(write_run(folder) / "annotations.json", changed)
    return folder


OTHERS = {
    "classes": lambda folder: write_run(folder, classes=2),
    "images": lambda folder: with_change(folder, "images", {"file_name": "6.jpg"}),
    "annotations": lambda folder: with_change(
        folder, "annotations", {"bbox": [1, 1, 9, 9]}
    ),
    "twice": lambda folder: folder.parent / "run",
}


@pytest.mark.parametrize("named", OTHERS)
def test_runs_that_cannot_be_compared(tmp_path, named):
    run = write_run(tmp_path / "run")
    other = OTHERS[named](tmp_path / "other")

    with pytest.raises(ConfigError, match=named):
        report(run, other, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_missing_is_named(tmp_path):
    with pytest.raises(MissingFileError, match="none"):
        report(
            write_run(tmp_path / "run"), tmp_path / "none", "--output", tmp_path / "out"
        )
