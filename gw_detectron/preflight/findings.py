"""Problems and warnings that the preflight checks collect."""

from dataclasses import dataclass, field

from ..errors import PreflightError


@dataclass
class Findings:
    """Problems and warnings found so far.

    Each is a message that ends with the fix. ``unchecked`` tells what was not checked because of the problems.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str = ""

    def raise_problems(self) -> None:
        """Raise :class:`PreflightError` if there is a problem."""
        if self.problems:
            raise PreflightError(self.problems, self.unchecked)
