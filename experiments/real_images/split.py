"""Split the training images of the nuclei: a seventh, by the hash of the file name, chooses the learning rates.

python -m experiments.real_images.split data/nuclei/train.json data/nuclei
"""

import json
import sys
from pathlib import Path

from gw_detectron.workbench.dataset.coco_content import read_json, split_coco

if __name__ == "__main__":
    parts = split_coco(read_json(sys.argv[1]), 1 / 7)
    for name, part in zip(("fit", "tune"), parts, strict=True):
        Path(sys.argv[2], f"{name}.json").write_text(json.dumps(part))
        print(f"{name}: {len(part['images'])} images")
