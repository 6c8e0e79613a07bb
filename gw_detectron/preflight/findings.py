"""What the checks before a run hand on to each other."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Findings:
    """What the checks have found so far; each entry is a sentence or two that ends in what to do."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class PreflightError(ValueError):
    """A run that would fail or learn nothing.

    Args:
        problems: one text for each problem.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "this run has a problem:" if count == 1 else f"this run has {count} problems:"
        return "\n".join([head, *(f"  - {problem}" for problem in self.problems)])
