"""The tables of MODEL_ZOO.md: which cells belong to which config, and what is written into them."""

from experiments.reproduction.zoo_page import fill_page, result_cells, table_rows
from experiments.reproduction.zoo_rows import read_records

from ..coco_rows import LAYOUTS, R50
from ..tiny_run import ROOT

ZOO = ROOT / "MODEL_ZOO.md"
CONFIG = "quick_schedules/faster_rcnn_R_18_FPN_GW_instant.yaml"
OTHER = "quick_schedules/retinanet_R_18_FPN_GW_instant.yaml"
PAGE = f"""# Zoo

## Quick rows (Table 9)

| Config, 8 GPUs | Config, one GPU | AP, paper | AP, ours, 8 GPUs | AP75, ours, one GPU |
| --- | --- | --- | --- | --- |
| [A](configs/a.yaml) | [B](configs/{CONFIG}) | 1.00 | | 7.77 |
| Detectron2's | `c` | - | | |

## Masks

| Config | box AP / AP50, paper | box AP, ours | mask AP, ours |
| :--- | --- | --- | ---: |
| [M](configs/{OTHER}) | 2.00 / 3.00 | | |

## The end
"""


def run(config=CONFIG, changes=None, **metrics):
    metrics = {name.replace("_", "/"): value for name, value in metrics.items()}
    versions = {"torch": "2", "detectron2": "0.5", "gpu": "H100"}
    fixed = {"commits": ["a" * 40, "b" * 40 + "-dirty"], "versions": versions, "processes": 8, "seconds": 5400.0}
    return {"config": config, "changes": changes or {}, "log": "out/log.txt", **fixed, **metrics}


def test_cells_of_the_columns_ours():
    found = [(cell.heading, cell.config, cell.metric, cell.gpus) for cell in result_cells(PAGE)]
    assert found == [
        ("## Quick rows (Table 9)", "a.yaml", "bbox/AP", 8),
        ("## Quick rows (Table 9)", CONFIG, "bbox/AP75", 1),
        ("## Masks", OTHER, "bbox/AP", 8),
        ("## Masks", OTHER, "segm/AP", 8),
    ]


def test_rows_of_a_table():
    assert table_rows(PAGE, "9") == {"a.yaml": 8, CONFIG: 1}
    assert table_rows(PAGE, "masks") == {OTHER: 8}
    assert table_rows(PAGE, "") == {"a.yaml": 8, CONFIG: 1, OTHER: 8}
    assert table_rows(PAGE, "0") == table_rows(PAGE, "end") == {}


def test_numbers_go_to_their_cells_and_nothing_else_changes():
    runs = [run(bbox_AP=38.126, bbox_AP75=41.0), run(OTHER, bbox_AP=44.4, segm_AP=39.0)]
    filled = fill_page(PAGE, runs)
    old, new = PAGE.splitlines(), filled.splitlines()
    assert [(a, b) for a, b in zip(old, new, strict=False) if a != b] == [
        (
            f"| [A](configs/a.yaml) | [B](configs/{CONFIG}) | 1.00 | | 7.77 |",
            f"| [A](configs/a.yaml) | [B](configs/{CONFIG}) | 1.00 | | 41.00 |",
        ),
        (f"| [M](configs/{OTHER}) | 2.00 / 3.00 | | |", f"| [M](configs/{OTHER}) | 2.00 / 3.00 | 44.40 | 39.00 |"),
    ]
    assert new[len(old) + 1] == '## Runs behind the columns "ours"'
    row = next(line for line in new if line.startswith("| [quick_schedules/faster"))
    assert row.endswith(
        "| 38.13 | | aaaaaaaaaa, bbbbbbbbbb with local changes | 8 x H100 | 1.5 h | torch 2, detectron2 0.5 "
        "| `out/log.txt` |"
    )
    assert fill_page(filled, runs) == filled
    assert fill_page(filled, []) == PAGE.replace("7.77 |", "|")  # a number without a record is removed


def test_a_changed_run_has_a_table_of_its_own():
    changed = run(changes={"SOLVER.MAX_ITER": "10 in the row, 3 here"}, bbox_AP75=55.0, bbox_AP=56.0)
    page = fill_page(PAGE, [changed])
    assert "55.00" not in page and "Runs behind" not in page
    assert "| 56.00 | | `SOLVER.MAX_ITER`: 10 in the row, 3 here |" in page.split("## Runs with changed options")[1]
    both = fill_page(page, [changed, run(bbox_AP75=41.0)])
    assert "| 41.00 |\n" in both and both.index("Runs behind") < both.index("changed options")


def test_model_zoo_follows_from_the_records():
    """A number that was typed in, or a record that was not written, is found here."""
    page = ZOO.read_text()
    assert fill_page(page, read_records(ROOT / "docs" / "data" / "reproduced.jsonl")) == page


def test_tables_of_model_zoo_have_the_papers_rows():
    page = ZOO.read_text()
    norms = ("FrozenBN", "GN", "GW")
    table4 = [f"{R50}1x_{n}" for n in norms] + [f"{R50}4conv1fc_1x_{n}{s}" for s in ("", "_released") for n in norms]
    assert table_rows(page, "4") == {f"{name}.yaml": 8 for name in table4}
    rows = table_rows(page, "")
    assert {f"{name}.yaml" for name in LAYOUTS} <= set(rows)
    assert {config for config, gpus in rows.items() if gpus == 1} == {c for c in rows if c.endswith("_1gpu.yaml")}
