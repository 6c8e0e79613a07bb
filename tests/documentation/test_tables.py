"""Tables of the reference pages are complete, and the numbers of the README are those of the files."""

import csv
import re
import statistics

import yaml
from detectron2.config import get_cfg

from experiments.small_batch.plan import DECIDING, LONGER
from experiments.small_batch.results_file import read_results
from experiments.small_batch.tables import scored
from gw_detectron.commands import COMMANDS
from gw_detectron.config import default_config, flat_items
from gw_detectron.norms import norm_options

from .pages import ROOT, read


def rows(page):
    """Return the cells of every row of a page's tables."""
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in read(page).splitlines() if line.startswith("|")
    ]


def test_every_config_key_has_its_default_and_meaning():
    theirs = dict(flat_items(get_cfg()))
    ours = {key: value for key, value in flat_items(default_config()) if key not in theirs}
    listed = [row for row in rows("docs/config_keys.md") if "." in row[0]]
    assert {key.strip("`"): yaml.safe_load(default.strip("`")) for key, default, _ in listed} == ours
    assert len(listed) == len(ours) and all(meaning for _, _, meaning in listed)


def test_every_environment_variable_of_the_package_is_listed():
    code = "\n".join(path.read_text() for path in (ROOT / "gw_detectron").rglob("*.py"))
    listed = {name for row in rows("docs/config_keys.md") for name in re.findall(r"`([A-Z0-9_]+)`", row[0])}
    assert set(re.findall(r"\bGW_DETECTRON_[A-Z]+\b", code)) <= listed


def test_every_norm_name_is_listed_with_its_options():
    listed = {}
    for first, *rest in rows("docs/norm_names.md"):
        for name in re.findall(r"\w+", first.replace(":rotation=cayley", "")):
            listed.setdefault(name, set(re.findall(r"`(\w+)=", rest[-1])))
    listed["BN"].add("rotation")  # in its name
    for name in ("BW", "FrozenBW"):  # their row refers to that of GW
        listed[name] |= listed["GW"] - {"groups"}
    for name, options in norm_options().items():
        assert listed[name] == set(options), name


def test_every_command_is_listed_with_its_script():
    listed = {first.strip("`"): rest[0].strip("`") for first, *rest in rows("docs/commands.md")[2:]}
    assert listed.keys() == COMMANDS.keys()
    for name, script in listed.items():
        flags = COMMANDS[name].flags
        file = ROOT / "tools" / f"{'train_net' if name == 'eval' else COMMANDS[name].module}.py"
        assert script == (" ".join([file.name, *flags]) if file.exists() else "")
        assert not script or flags or f'run("{name}")' in file.read_text()


def benchmark(name):
    lines = (ROOT / "docs" / "benchmark" / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_the_costs_in_the_readme_are_those_of_the_benchmarks():
    layer = [row for row in benchmark("layer_amd_epyc.csv") if row["provider"] == "ours"]
    times = [float(row["to_figure1"]) for row in layer if row["mode"] == "forward+backward"]
    saved = {row["shape"]: float(row["saved_to_group_norm"]) for row in layer if row["mode"] == "memory"}
    maps = [ratio for shape, ratio in saved.items() if not shape.endswith("7x7")]
    (regions,) = {f"{ratio:.2f}" for shape, ratio in saved.items() if shape.endswith("7x7")}
    networks = {(row["model"], row["variant"]): row for row in benchmark("model_amd_epyc.csv")}
    r50, mask_rcnn = networks["R-50", "GW-S1-B2"], networks["mask_rcnn_R-50", "GW"]
    text = " ".join(read("README.md").split())
    for phrase in (
        f"GW takes {min(times):.2f} to {max(times):.2f} of the time of the paper's listing",
        f"keeps {min(maps):.2f} to {max(maps):.2f} times as much memory as GroupNorm on feature maps",
        f"{regions} times on 7 x 7 regions",
        f"with GW at S1-B2 takes {float(r50['to_bn']):.2f} times as long as with BN",
        f"({float(r50['paper_to_bn']):.2f} in the paper, on a GPU)",
        f"Mask R-CNN R-50 with GW {float(mask_rcnn['to_bn']):.2f} times as long as with FrozenBN",
    ):
        assert phrase in text


def test_the_gains_in_the_readme_are_those_of_the_model_zoo():
    aps = {row[0]: [cell for cell in row if re.fullmatch(r"\d+\.\d+", cell)] for row in rows("MODEL_ZOO.md")}

    def ap(config):
        (found,) = (numbers for link, numbers in aps.items() if link.endswith(f"/faster_rcnn_R_50_FPN_{config}.yaml)"))
        return float(found[0])

    gains = [ap(f"{head}1x_GW") - ap(f"{head}1x_FrozenBN") for head in ("", "4conv1fc_")]
    assert f"+{min(gains):.1f} to +{max(gains):.1f} box AP" in read("README.md")


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) < 150


def test_the_times_of_the_study_are_those_of_the_files():
    tables = [
        {row["variant"]: f"{float(row['to_bn']):.2f}" for row in benchmark(f"../data/small_batch_times{batch}.csv")}
        for batch in ("_1", "", "_4", "_8")
    ]
    listed = rows("docs/small_batch_results.md")
    for norm in tables[0].keys() - {"BN"}:
        assert [norm, *(times[norm] for times in tables)] in listed
    four, eight = tables[2:]
    assert (
        f"with four images {four['GW']} (GW) and {four['GN+WS']} times (GN+WS) BN's time, with eight {eight['GW']} and "
        f"{eight['GN+WS']} |" in read("docs/norms.md")
    )


def test_the_study_in_the_readme_and_the_decision_table_is_that_of_the_runs():
    results = read_results(ROOT / "docs" / "data" / "small_batch.jsonl")
    inside, stem = "BN+GW_S1-B1", "BN+GW_S1"
    compared = (*DECIDING, "GN+WS", inside, stem)
    ap = {norm: f"{statistics.mean(scored(results, norm).values()):.1f}" for norm in compared}
    times = {row["variant"]: float(row["to_bn"]) for row in benchmark("../data/small_batch_times.csv")}
    text = " ".join(read("README.md").split())
    assert max(ap, key=lambda norm: float(ap[norm])) == "GN+WS"
    longer = {
        (norm, iterations): f"{statistics.mean(values.values()):.1f}"
        for norm in DECIDING
        for iterations in LONGER
        if (values := scored(results, norm, iterations=iterations))
    }
    more = times["GN+WS"] / times["GW"] - 1
    for row in (
        f"(GN+WS) | **{ap['GN+WS']}** | {times['GN+WS']:.2f} | {ap['GN+WS']}, in {more:.0%}",
        f"| GW everywhere | {ap['GW']} | {times['GW']:.2f} | **{ap['GW']}** |",
        *(
            f"({position}) | {ap[norm]} | {times[norm]:.2f} | {ap[norm]}, in {1 - times[norm] / times['GW']:.0%} less"
            for position, norm in (("S1-B1", inside), ("S1", stem), ("S1-B2", "BN+GW"))
        ),
        *(f"| {norm} | {ap[norm]} | {times[norm]:.2f} | {longer[norm, 2500]} |" for norm in ("GN", "BN")),
    ):
        assert row.replace("%", " %") in text
    assert (
        f"{longer['GW', 6000]} AP, with BN {longer['BN', 7500]} and GN {longer['GN', 7500]} in about the same" in text
    )
    table = read("docs/norms.md")
    one = {norm: f"{statistics.mean(scored(results, norm, batch=1).values()):.1f}" for norm in (*DECIDING, "GN+WS")}
    slow = {row["variant"]: f"{float(row['to_bn']):.2f}" for row in benchmark("../data/small_batch_times_1.csv")}
    assert (
        f"GW has {one['GW']} AP, GN+WS {one['GN+WS']}, GN {one['GN']} and BN {one['BN']}; GW takes {slow['GW']} and "
        f"GN+WS {slow['GN+WS']} times BN's time" in text
    )
    assert (
        f"one image (one seed): {one['GW']} AP, {one['GN+WS']} with GN+WS, {one['BN+GW']} with BN and GW at S1-B2, "
        f"{one['GN']} with GN, "
        f"{one['BN']} with BN" in table
    )
    four, eight = (
        {norm: f"{statistics.mean(scored(results, norm, batch=batch).values()):.1f}" for norm in (*DECIDING, "GN+WS")}
        for batch in (4, 8)
    )
    for words, found in (("four images (one seed)", four), ("eight images", eight)):
        assert (
            f"{words}: {found['GW']} AP with GW, {found['BN+GW']} with BN and GW at S1-B2, "
            f"{found['GN+WS']} with GN+WS, {found['BN']} with BN, {found['GN']} with GN" in table
        )
    assert (
        f"GW has {four['GW']} AP, GN+WS {four['GN+WS']}, BN {four['BN']} and GN {four['GN']}; with eight "
        f"{eight['GW']}, {eight['GN+WS']}, {eight['BN']} and {eight['GN']}." in text
    )
    assert f"BN with GW there has {ap[inside]} AP here (3 seeds)" in " ".join(table.split())
    inside_gn, stem_gn = (statistics.mean(scored(results, f"BN+GN_{where}").values()) for where in ("S1-B1", "S1"))
    assert f"BN with GN at S1-B1 has {inside_gn:.1f}, at S1 {stem_gn:.1f}." in text
    assert f"BN with GN at S1-B1 has {inside_gn:.1f}. GW in the stem alone, S1, costs least: {ap[stem]} AP" in table
    assert f"here: {ap['GW']} AP; in the same time {longer['GN', 2500]} with GN and {longer['BN', 2500]} with" in table
    assert (
        f"{longer['GW', 6000]}; in the same time {longer['GN', 7500]} with GN and {longer['BN', 7500]} with BN" in table
    )
