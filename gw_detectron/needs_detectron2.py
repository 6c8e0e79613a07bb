"""End a program with one sentence where Detectron2 is missing; tools import this module first."""

import os
import sys

from .errors import MissingDetectron2Error
from .requirements import require_detectron2

try:
    require_detectron2(os.path.basename(sys.argv[0]))
except MissingDetectron2Error as error:
    raise SystemExit(f"Error: {error}") from None
