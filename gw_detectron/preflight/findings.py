"""Problems and warnings that the preflight checks collect."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import ConfigError


@dataclass
class Findings:
    """Problems and warnings found so far.

    Each is a message that ends with the fix.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def raise_problems(self) -> None:
        """Raise :class:`PreflightError` if there is a problem."""
        if self.problems:
            raise PreflightError(self.problems)


class PreflightError(ConfigError):
    """A run would fail later or learn nothing.

    Args:
        problems: one message per problem.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "this run has a problem:" if count == 1 else f"this run has {count} problems:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])
