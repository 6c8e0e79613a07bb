"""Problems and warnings that the preflight checks collect."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import ConfigError


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


class PreflightError(ConfigError):
    """A run would fail later or learn nothing.

    Args:
        problems: one message per problem.
        unchecked: what was not checked because of them.
    """

    def __init__(self, problems: Iterable[str], unchecked: str = "") -> None:
        self.problems = tuple(problems)
        self.unchecked = unchecked
        super().__init__(self.problems, unchecked)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "this run has a problem:" if count == 1 else f"this run has {count} problems:"
        lines = [head, *(f"  - {problem}" for problem in self.problems)]
        return "\n".join([*lines, self.unchecked] if self.unchecked else lines)
