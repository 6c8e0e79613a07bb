"""Progress bars, drawn on a terminal only: logs and CI get none."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


def progress_bar(items: Iterable[Any] | None = None, *, desc: str, unit: str, **options: Any) -> tqdm:
    """Create a bar with count, time left and items per second.

    Args:
        items: what to iterate over; None for a bar that is updated by hand.
        desc: what is done.
        unit: of an item, such as ``image``.
        **options: of tqdm, such as ``total``.
    """
    return tqdm(items, desc=desc, unit=unit, disable=None, mininterval=0.5, **options)


@contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Show which of a few long steps runs; yield a function that begins one by its name."""
    layout = "{desc} [step {n_fmt} of {total_fmt}, {elapsed}]"
    with progress_bar(desc="", unit="step", total=total, bar_format=layout, leave=False) as bar:

        def begin(name: str) -> None:
            bar.set_description_str(name, refresh=False)
            bar.update()
            bar.refresh()

        yield begin
