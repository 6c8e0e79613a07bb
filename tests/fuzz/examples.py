"""Number of examples per profile, a time limit for each, and their counts."""

import functools
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings

#: examples of a test, relative to the default; HYPOTHESIS_PROFILE=long is `make fuzz`
SCALE = {"long": 34.0}.get(os.environ.get("HYPOTHESIS_PROFILE", ""), 1.0)
#: test -> number of examples that it ran
COUNTS: Counter[str] = Counter()
_SECONDS = 60  # an example that runs longer hangs


def fuzz(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a hypothesis test ``count`` times the profile's scale; below ``given``."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            COUNTS[test.__name__] += 1
            previous = signal.signal(signal.SIGALRM, _hang)
            signal.alarm(_SECONDS)
            try:
                test(*args, **kwargs)
            finally:
                signal.alarm(0)
                signal.signal(signal.SIGALRM, previous)

        return settings(
            max_examples=int(count * SCALE),
            deadline=None,  # measured after the example; the alarm also ends one that hangs
            derandomize=SCALE == 1.0,  # a test suite gives the same result twice
            database=None,
            suppress_health_check=list(HealthCheck),
        )(run)

    return decorate


def _hang(*_: Any) -> None:
    raise TimeoutError(f"an example ran longer than {_SECONDS} s")
