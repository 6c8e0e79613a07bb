"""What the checks of config, dataset and model find before a run."""

from dataclasses import dataclass, field

from ..errors import PreflightError


@dataclass
class PreflightReport:
    """Problems and warnings of the checks before a run, and what they left out because of problems.

    Each check appends a message to ``errors`` if the run would fail later or learn nothing, or to ``warnings`` if its
    user may want something else.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: str = ""

    def raise_errors(self) -> None:
        """Raise :class:`~gw_detectron.errors.PreflightError` if there is an error."""
        if self.errors:
            raise PreflightError(self.errors, self.unchecked)
