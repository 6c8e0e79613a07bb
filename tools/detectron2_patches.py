"""Patches for the Python files of Detectron2 v0.6.

With them Detectron2 runs without compiled operators, on current versions of torch, numpy, Pillow and setuptools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SDIST = "pb1-detectron2==0.6"
FIX_SDIST = f"Fix: use the source archive {SDIST}."


class InstallError(Exception):
    """An error that the user can fix; its message names the fix."""


STUB = '''\
"""Stub of the compiled operators, which this pure Python build of Detectron2 does not have."""

PURE_BUILD = "@RECIPE@"


def get_compiler_version():
    return "none (pure Python build)"


def get_cuda_version():
    return "none (pure Python build)"


def has_cuda():
    return False


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"detectron2._C.{name}: compiled operator, not in the pure Python build of Detectron2. That build has no "
        "rotated boxes, no deformable convolution on a GPU and no fast COCO evaluation. Fix: install Detectron2 from "
        "source, see https://detectron2.readthedocs.io/tutorials/install.html"
    )
'''


@dataclass(frozen=True)
class Patch:
    """Replace all matches of a regular expression in one file.

    Args:
        path: of the file in the release.
        pattern: regular expression, with re.MULTILINE.
        replacement: as in re.sub.
        count: the number of matches, which must be exact.
    """

    path: str
    pattern: str
    replacement: str
    count: int = 1

    def apply(self, root: Path) -> None:
        """Rewrite root/path.

        Raises:
            InstallError: the file does not exist, or the number of matches differs.
        """
        file = root / self.path
        if not file.is_file():
            raise InstallError(f"{self.path}: not in the source archive, which is another release. {FIX_SDIST}")
        text, found = re.subn(self.pattern, self.replacement, file.read_text("utf-8"), flags=re.MULTILINE)
        if found != self.count:
            raise InstallError(
                f"{self.path}: {self.pattern!r} matches {found} time(s), expected {self.count}. "
                f"The source archive is another release; nothing was installed. {FIX_SDIST}"
            )
        file.write_text(text, "utf-8")


def _numpy_aliases(path: str, count: int) -> Patch:
    # numpy 1.24 removed the aliases of builtin types
    return Patch(path, r"\bnp\.(bool|int|float|str|object)\b", r"\1", count)


def _logger_warn(path: str, count: int) -> Patch:
    # Logger.warn is deprecated
    return Patch(path, r"logger\.warn\(", "logger.warning(", count)


PATCHES = (
    _numpy_aliases("detectron2/data/build.py", 2),
    _numpy_aliases("detectron2/data/datasets/pascal_voc.py", 1),
    _numpy_aliases("detectron2/evaluation/pascal_voc_evaluation.py", 2),
    _numpy_aliases("detectron2/evaluation/sem_seg_evaluation.py", 7),
    _numpy_aliases("detectron2/structures/masks.py", 3),
    _numpy_aliases("detectron2/utils/video_visualizer.py", 1),
    _numpy_aliases("detectron2/utils/visualizer.py", 3),
    _logger_warn("detectron2/data/datasets/coco.py", 2),
    _logger_warn("detectron2/engine/defaults.py", 1),
    _logger_warn("detectron2/evaluation/coco_evaluation.py", 2),
    _logger_warn("detectron2/evaluation/lvis_evaluation.py", 2),
    _logger_warn("detectron2/evaluation/sem_seg_evaluation.py", 2),
    # Pillow 10 removed Image.LINEAR, an alias of BILINEAR
    Patch("detectron2/data/transforms/transform.py", r"Image\.LINEAR", "Image.BILINEAR"),
    # setuptools 82 removed pkg_resources
    Patch("detectron2/model_zoo/model_zoo.py", r"^import pkg_resources$", "import importlib.resources"),
    Patch(
        "detectron2/model_zoo/model_zoo.py",
        r'pkg_resources\.resource_filename\(\s*"detectron2\.model_zoo", (.*)\s*\)$',
        r'str(importlib.resources.files("detectron2.model_zoo") / \1)',
    ),
    # PyTorch no longer includes Caffe2; the rest of detectron2.export and utils.analysis does not need it
    Patch(
        "detectron2/export/__init__.py",
        r"^from \.api import \*$",
        "try:\n    from .api import *\nexcept ModuleNotFoundError:  # Caffe2\n    pass",
    ),
    # the fast evaluation is a compiled operator: COCOEvaluator falls back to pycocotools
    Patch(
        "detectron2/evaluation/coco_evaluation.py",
        r"^from detectron2\.evaluation\.fast_eval_api import COCOeval_opt$",
        "COCOeval_opt = COCOeval  # the fast evaluation is a compiled operator",
    ),
    Patch(
        "detectron2/evaluation/coco_evaluation.py",
        r"self\._use_fast_impl = use_fast_impl$",
        "self._use_fast_impl = use_fast_impl and COCOeval_opt is not COCOeval",
    ),
    # torch.cuda.amp is deprecated; torch.amp replaces it
    Patch(
        "detectron2/engine/train_loop.py",
        r"from torch\.cuda\.amp import GradScaler",
        "from torch.amp import GradScaler",
    ),
    Patch(
        "detectron2/engine/train_loop.py",
        r"from torch\.cuda\.amp import autocast",
        "from torch import autocast",
    ),
    Patch("detectron2/engine/train_loop.py", r"with autocast\(\):", 'with autocast("cuda"):'),
    # these two only silence warnings, the second one in every data loading process
    Patch("detectron2/modeling/anchor_generator.py", r"meshgrid\((.*)\)$", r'meshgrid(\1, indexing="ij")'),
    Patch(
        "detectron2/data/detection_utils.py",
        r"target\.gt_boxes = Boxes\(boxes\)$",
        "target.gt_boxes = Boxes(np.array(boxes))",
    ),
)
