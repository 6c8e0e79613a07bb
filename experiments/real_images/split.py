"""Split images by the hashes of their file names: a part, a seventh unless given, chooses the learning rates.

python -m experiments.real_images.split data/nuclei/train.json data/nuclei [SHARE]

Writes fit.json and tune.json.
"""

import json
import sys
from pathlib import Path

from gw_detectron.workbench.dataset.coco_content import read_json, split_coco

if __name__ == "__main__":
    share = float(sys.argv[3]) if len(sys.argv) > 3 else 1 / 7
    parts = split_coco(read_json(sys.argv[1]), share)
    for name, part in zip(("fit", "tune"), parts, strict=True):
        Path(sys.argv[2], f"{name}.json").write_text(json.dumps(part))
        print(f"{name}: {len(part['images'])} images")
