"""How messages list names."""

from collections.abc import Iterable


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Joins the first names by commas and counts the others."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
