"""Write the number of examples of each test to $FUZZ_COUNTS."""

import json
import os
import sys
from pathlib import Path

import pytest

from .examples import COUNTS


@pytest.fixture(scope="session", autouse=True)
def counts():
    yield
    total = {"total": sum(COUNTS.values()), **COUNTS}
    print(f"\nfuzz examples: {json.dumps(total)}", file=sys.__stderr__)
    if path := os.environ.get("FUZZ_COUNTS"):
        Path(path).write_text(json.dumps(total, indent=1) + "\n")
