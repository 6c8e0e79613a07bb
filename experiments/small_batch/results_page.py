"""Write the tables and figures of the small-batch study into its page."""

from pathlib import Path

from gw_detectron.atomic import atomic_write
from gw_detectron.errors import DataError

from . import figures, tables
from .tables import Results, Times

PAGE = "results.md"
# name of the marks -> heading of a new page
_HEADINGS = {
    "hypotheses": "Hypotheses",
    "norms": "Norms at 2 images",
    "rates": "Learning rates",
    "longer": "Longer training",
    "mechanism": "Why",
    "batches": "Batch sizes",
    "variations": "Positions, groups, steps, solver",
}
_FIGURES = {
    "ap.png": figures.ap_figure,
    "features.png": figures.mechanism_figure,
    "losses.png": figures.loss_figure,
    "variations.png": figures.variation_figure,
}


def write_summary(results: Results, times: Times, folder: Path) -> list[Path]:
    """Replace the tables between the marks of the page, and write the figures beside it.

    A page that does not exist is begun.

    Args:
        results: of finished runs.
        times: of training iterations, by norm.
        folder: of the page.

    Returns:
        The files.

    Raises:
        DataError: the page lacks the marks of a table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / PAGE
    text = page.read_text() if page.exists() else _new_page()
    contents = {
        "hypotheses": tables.hypotheses(results),
        "norms": tables.main_table(results, times),
        "rates": tables.grid_table(results),
        "longer": tables.longer_table(results),
        "mechanism": tables.mechanism_table(results),
        "batches": tables.batch_table(results),
        "variations": tables.variation_table(results, times),
    }
    for name, content in contents.items():
        begin, end = _marks(name)
        if text.count(begin) != 1 or text.count(end) != 1:
            raise DataError(f"'{page}': table '{name}' lacks its marks, or has two. Fix: restore the page from git.")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n\n{end}{rest.partition(end)[2]}"
    with atomic_write(page) as temporary:
        temporary.write_text(text)
    drawn = {**_FIGURES, **({tables.BATCH_FIGURE: figures.batch_figure} if tables.has_other_batches(results) else {})}
    for name, draw in drawn.items():
        with atomic_write(folder / name) as temporary:
            draw(results).savefig(temporary, format="png", dpi=110)
    return [page, *(folder / name for name in drawn)]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"


def _new_page() -> str:
    sections = (f"## {title}\n\n{''.join(_marks(name))}\n" for name, title in _HEADINGS.items())
    return "\n".join(("# Small-batch study: results\n", *sections))
