"""What a run is asked for: flags become one object, which nothing changes afterwards."""

import argparse
import os
from dataclasses import dataclass, field, fields

from ...errors import ConfigError, check_fraction, existing_path
from ..dataset.datasets_yaml import (
    CocoDataset,
    CocoDatasets,
    check_pair,
    read_datasets,
)
from ..dataset.layouts import names_validation


@dataclass(frozen=True)
class DatasetFlags:
    """The user's own datasets, as flags name them: ``--train-json`` and so on."""

    train_json: str | None = None
    train_images: str | None = None
    val_json: str | None = None
    val_images: str | None = None
    val_fraction: float | None = None
    dataset: str | None = None  # begins the names of the datasets
    datasets: str | None = None  # a yaml, in place of the others

    def read(self) -> CocoDatasets | None:
        """Return the datasets that the flags name, or None without such flags."""
        given = [
            f"--{name.replace('_', '-')}"
            for name, value in vars(self).items()
            if name != "datasets" and value is not None
        ]
        if self.datasets is not None:
            if given:
                listed = ", ".join(given)
                raise ConfigError(
                    f"--datasets: given together with {listed}. Fix: give one of the two."
                )
            return read_datasets(self.datasets)
        if not given:
            return None

        val_json = self.val_json
        splits = self.val_fraction is not None
        if self.train_json is None:
            if val_json is None or splits:
                raise ConfigError(f"{given[0]}: needs --train-json.")
        else:
            # YOLO's data.yaml may name photos for it
            if val_json is None and not splits and names_validation(self.train_json):
                val_json = self.train_json
            if (val_json is None) != splits:
                raise ConfigError(
                    "--train-json: needs either --val-json or --val-fraction, e.g. 0.1 for a tenth of the images"
                )
        train = self._read_side("train", self.train_json, self.train_images)
        val = self._read_side("val", val_json, self.val_images)
        return CocoDatasets(train, val)

    def _read_side(
        self, side: str, annotations: str | None, images: str | None
    ) -> dict[str, CocoDataset]:
        if annotations is None and images is None:
            return {}
        labels = photos = ""
        if annotations is not None:
            labels = existing_path(f"--{side}-json", annotations, os.path.exists)
        if images is not None:
            photos = existing_path(f"--{side}-images", images, os.path.isdir)
        val_fraction = self.val_fraction if side == "train" else None
        if val_fraction is not None:
            check_fraction("--val-fraction", val_fraction)

        dataset = CocoDataset(labels, photos, val_fraction or 0.0)
        check_pair(dataset, f"--{side}-")
        name = "custom" if self.dataset is None else self.dataset
        return {f"{name}_{side}": dataset}


@dataclass(frozen=True)
class RunRequest:
    """A training or an evaluation, as the flags of ``gw-detectron train`` and ``eval`` describe it.

    Attributes:
        config_file: a yaml, or a name of :func:`gw_detectron.config.shipped_configs`.
        opts: config keys to change, as KEY, VALUE, KEY, VALUE, ...; values are text or Python values.
        run: a run folder or a checkpoint, in place of ``config_file`` and, to evaluate, ``MODEL.WEIGHTS``.
        eval_only: evaluate, instead of training.
        resume: continue from the last checkpoint in ``OUTPUT_DIR``, or evaluate it.
        overwrite: replace an earlier run in ``OUTPUT_DIR``.
        auto: set keys by the training data, see :func:`gw_detectron.auto_config`.
        epochs: passes over the images, in place of ``SOLVER.MAX_ITER``.
        minutes: time for training and evaluations, in place of ``epochs``.
        mix: image statistics in the backbone's BN layers of a second evaluation, see
            :func:`gw_detectron.norms.mix_statistics`.
        adapt: a folder of photos whose statistics these layers get in a second evaluation.
        num_gpus: 0 runs on the CPU.
        deterministic: use only deterministic operations of torch.
        allow_partial, ignore_preflight: see :class:`gw_detectron.workbench.Trainer`.
        data: the user's own datasets.
    """

    config_file: str = ""
    opts: tuple = ()
    run: str = ""
    eval_only: bool = False
    resume: bool = False
    overwrite: bool = False
    auto: bool = False
    epochs: float | None = None
    minutes: float | None = None
    mix: str = ""
    adapt: str = ""
    num_gpus: int = 1
    deterministic: bool = False
    allow_partial: bool = False
    ignore_preflight: bool = False
    data: DatasetFlags = field(default_factory=DatasetFlags)

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> "RunRequest":
        """Take a request from parsed flags; flags of other programs are left out."""
        flags = {key: value for key, value in vars(args).items() if value is not None}
        data = {f.name: flags[f.name] for f in fields(DatasetFlags) if f.name in flags}
        own = {f.name: flags[f.name] for f in fields(cls) if f.name in flags}

        opts = tuple(own.get("opts", ()))
        own["opts"] = opts[1:] if opts[:1] == ("--",) else opts  # argparse keeps it
        own["data"] = DatasetFlags(**data)
        return cls(**own)

    def changes(self, key: str) -> bool:
        """Return whether the user has set a config key beside the yaml."""
        return key in self.opts

    def check_flags(self) -> None:
        """Raise ConfigError if flags contradict each other."""
        if self.overwrite and (self.resume or self.eval_only):
            other = "--eval-only, which keeps"
            if self.resume:
                other = "--resume, which continues"
            raise ConfigError(
                f"--overwrite: given together with {other} the earlier run. Fix: give one of the two."
            )

        has_epochs = self.epochs is not None
        has_length = has_epochs or self.changes("SOLVER.MAX_ITER")
        if self.minutes is not None and has_length:
            other = "--epochs" if has_epochs else "SOLVER.MAX_ITER"
            raise ConfigError(
                f"--minutes: given together with {other}. Fix: give one of the two."
            )

        for flag, value in {"--mix": self.mix, "--adapt": self.adapt}.items():
            if value and not self.eval_only:
                raise ConfigError(
                    f"{flag} ({value!r}): only evaluates. Fix: give it to gw-detectron eval, or train with "
                    "MODEL.RESNETS.WHITEN_NORM MixBN."
                )
