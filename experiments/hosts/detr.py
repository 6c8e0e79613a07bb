"""Train D-FINE on blood cells with a norm in its backbone; see PLAN.md. Needs ``pip install transformers``.

python -m experiments.hosts.detr BLOOD_CELLS RESULTS.csv [NORM ...]

BLOOD_CELLS is the folder of prepare.py. Rows that the file has already are not trained again.
"""

import contextlib
import io
import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.data.detection_utils import read_image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DFineConfig,
    DFineForObjectDetection,
    HGNetV2Config,
    RTDetrImageProcessor,
)

from gw_detectron import convert_norms
from gw_detectron.workbench.compare.plan import SEARCH_SEED

from ..study import ResultsFile, score_arms

#: norms of the backbone, whose narrowest layers have 16 channels; the default is BN
NORMS = {"BN": "", "GN": "GN:groups=8", "GW": "GW:groups=16"}
RATES = (0.0004, 0.0008, 0.0016)
SEEDS = (1, 2)
ITERATIONS = 1000
WARMUP = 40
BATCH = 2
SIDE = 192
PROCESSOR = RTDetrImageProcessor(size={"height": SIDE, "width": SIDE})


def make_model(norm: str, classes: int) -> DFineForObjectDetection:
    """Return a D-FINE-N with random weights."""
    backbone = HGNetV2Config(
        stem_channels=[3, 16, 16],
        stage_in_channels=[16, 64, 256, 512],
        stage_mid_channels=[16, 32, 64, 128],
        stage_out_channels=[64, 256, 512, 1024],
        hidden_sizes=[64, 256, 512, 1024],
        depths=[1, 1, 2, 1],
        stage_num_blocks=[1, 1, 2, 1],
        stage_numb_of_layers=[3, 3, 3, 3],
        use_learnable_affine_block=True,
        out_features=["stage3", "stage4"],
    )
    config = DFineConfig(
        backbone_config=backbone,
        encoder_in_channels=[512, 1024],
        feat_strides=[16, 32],
        encode_proj_layers=[1],
        encoder_hidden_dim=128,
        encoder_ffn_dim=512,
        hidden_expansion=0.34,
        depth_mult=0.5,
        d_model=128,
        decoder_in_channels=[128, 128],
        decoder_ffn_dim=512,
        decoder_layers=3,
        decoder_n_points=[6, 6],
        num_feature_levels=2,
        num_queries=100,
        num_labels=classes,
        freeze_backbone_batch_norms=False,
    )
    model = DFineForObjectDetection(config)
    if NORMS[norm]:
        convert_norms(model, {"model.backbone.*": NORMS[norm]})
    return model


class Photos(Dataset[tuple[Any, dict[str, Any]]]):
    """The photos of a COCO file, and its categories numbered from 0."""

    def __init__(self, data: Path, file: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.coco = COCO(data / file)
        self.folder = data / "images"
        self.numbers = list(self.coco.imgs)
        self.categories = sorted(self.coco.cats)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Return a photo and its annotations as the processor takes them."""
        number = self.numbers[index]
        photo = read_image(self.folder / self.coco.imgs[number]["file_name"], "RGB")
        annotations = [
            {**a, "category_id": self.categories.index(a["category_id"])}
            for a in self.coco.imgToAnns[number]
        ]
        return photo, {"image_id": number, "annotations": annotations}


def collate(batch: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Resize photos and boxes; flip half of them."""
    photos, targets = zip(*batch, strict=True)
    inputs = PROCESSOR(photos, annotations=list(targets), return_tensors="pt")
    pixels, labels = inputs["pixel_values"], inputs["labels"]
    for index, is_flipped in enumerate(torch.rand(len(batch)) < 0.5):
        if is_flipped:
            pixels[index] = pixels[index].flip(-1)
            labels[index]["boxes"][:, 0] = 1 - labels[index]["boxes"][:, 0]
    return {"pixel_values": pixels, "labels": [dict(label) for label in labels]}


def batches(photos: Photos) -> Iterator[dict[str, Any]]:
    """Yield batches without end."""
    loader: DataLoader[Any] = DataLoader(
        photos, BATCH, shuffle=True, drop_last=True, collate_fn=collate
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def train(
    photos: Photos, norm: str, rate: float, seed: int, iterations: int
) -> nn.Module:
    """Return a trained detector."""
    torch.manual_seed(seed)
    model = make_model(norm, len(photos.categories))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=1e-4)

    def share(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / iterations))
        return min(1.0, (step + 1) / WARMUP) * cosine

    schedule = LambdaLR(optimizer, share)
    for batch in itertools.islice(batches(photos), iterations):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def box_ap(model: nn.Module, photos: Photos) -> float:
    """Return the box AP of a detector, in percent."""
    model.eval()
    found = []
    for photo, target in map(photos.__getitem__, range(len(photos))):
        inputs = PROCESSOR(photo, return_tensors="pt")
        result = PROCESSOR.post_process_object_detection(
            model(**inputs), threshold=0.0, target_sizes=[photo.shape[:2]]
        )[0]
        scores, labels = result["scores"].tolist(), result["labels"].tolist()
        boxes = result["boxes"].tolist()
        for score, label, box in zip(scores, labels, boxes, strict=True):
            left, top, right, bottom = box
            found.append(
                {
                    "image_id": target["image_id"],
                    "category_id": photos.categories[label],
                    "bbox": [left, top, right - left, bottom - top],
                    "score": score,
                }
            )
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = COCOeval(photos.coco, photos.coco.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return 100 * float(evaluation.stats[0])


def main(folder: str, results: str, *norms: str) -> None:
    data = Path(folder)
    file = ResultsFile(results, ("norm", "rate", "seed"), ("AP", "seconds"))
    photos = {part: Photos(data, f"{part}.json") for part in ("train", "val", "test")}

    def run(norm: str, rate: float, seed: int) -> float:
        is_search = seed == SEARCH_SEED
        iterations = ITERATIONS // 4 if is_search else ITERATIONS
        model = train(photos["train"], norm, rate, seed, iterations)
        return box_ap(model, photos["val" if is_search else "test"])

    arms = [(norm,) for norm in norms or NORMS]
    score_arms(file, arms, run, RATES, SEEDS)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
