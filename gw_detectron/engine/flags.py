"""Command-line flags of a run, its config and its output folder."""

import argparse

from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from ..config import read_config
from ..errors import ConfigError, FileAccessError


def get_parser() -> argparse.ArgumentParser:
    """Create Detectron2's parser with the flags of this package."""
    parser = default_argument_parser()
    parser.add_argument(
        "--ignore-preflight",
        action="store_true",
        help="start although the checks before the run failed; their messages become warnings",
    )
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="accept MODEL.WEIGHTS that lack a part of the backbone, which then starts from random values, and weights "
        "that were trained with other norms",
    )
    parser.add_argument(
        "--whitening-stats-period",
        type=int,
        default=0,
        metavar="K",
        help="log eigenvalues, condition numbers and residuals of all whitening layers every K iterations; 0: never "
        "(default). Metrics are written every 20 iterations, so a K below 20 costs time without showing more",
    )
    return parser


def run_config(args: argparse.Namespace) -> CfgNode:
    """Read the config of a run without writing anything.

    Args:
        args: the flags of :func:`get_parser`; ``--num-gpus 0`` sets ``MODEL.DEVICE cpu``.

    Returns:
        The frozen config.

    Raises:
        ConfigError: a flag, a key or a value is unknown or unusable.
        MissingFileError: the config file does not exist.
    """
    if getattr(args, "whitening_stats_period", 0) < 0:
        raise ConfigError(
            f"--whitening-stats-period {args.whitening_stats_period}: negative. Fix: give 1 or more iterations, or 0 "
            "to log nothing."
        )
    cfg = read_config(args.config_file, args.opts or [])
    if getattr(args, "num_gpus", None) == 0:
        cfg.MODEL.DEVICE = "cpu"
    cfg.freeze()
    return cfg


def prepare_output(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Set up logging, the seed and the output folder as Detectron2 does, and write ``config.yaml``.

    Raises:
        FileAccessError: ``OUTPUT_DIR`` cannot be written.
    """
    try:
        default_setup(cfg, args)
    except OSError as error:
        raise FileAccessError(
            f"OUTPUT_DIR ('{cfg.OUTPUT_DIR}'): cannot be written: {error}. Fix: give another folder."
        ) from error
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="gw_detectron")


def setup(args: argparse.Namespace) -> CfgNode:
    """Read the config of a run and prepare its output folder, without checks in between."""
    cfg = run_config(args)
    prepare_output(cfg, args)
    return cfg
