"""Progress bars, drawn on a terminal only: logs and CI get none."""

from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress_bar(
    items: Iterable[Any] | None = None, *, desc: str, unit: str, **options: Any
) -> tqdm:
    """Create a tqdm bar for ``items`` or, without them, one that is updated by hand."""
    return tqdm(items, desc=desc, unit=unit, disable=None, mininterval=0.5, **options)
