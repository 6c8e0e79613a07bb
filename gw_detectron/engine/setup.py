"""The flags of a run, and from them the config."""

import argparse

from detectron2.config import CfgNode
from detectron2.engine import default_argument_parser, default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from ..config import read_config


def get_parser() -> argparse.ArgumentParser:
    """Returns Detectron2's parser with ``--ignore-preflight``, ``--allow-partial`` and ``--whitening-stats-period``."""
    parser = default_argument_parser()
    parser.add_argument(
        "--ignore-preflight",
        action="store_true",
        help="start although the checks before the run have found problems; they are logged as warnings",
    )
    parser.add_argument(
        "--allow-partial",
        action="store_true",
        help="let the parts of the backbone that MODEL.WEIGHTS does not have start from random values, and accept "
        "norms that are not those of the weights",
    )
    parser.add_argument(
        "--whitening-stats-period",
        type=int,
        default=0,
        metavar="K",
        help="every K iterations, log eigenvalues, condition numbers and residuals of all whitening layers; 0: never. "
        "The writers take the latest numbers every 20 iterations, so that K below 20 costs time and shows no more",
    )
    return parser


def config_of_run(args: argparse.Namespace) -> CfgNode:
    """Reads the config of a run, and writes nothing yet.

    Args:
        args: ``config_file`` and ``opts`` as :func:`read_config` takes them; ``num_gpus`` 0 means ``MODEL.DEVICE cpu``.

    Returns:
        The frozen config.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_config`.
    """
    cfg = read_config(args.config_file, args.opts or [])
    if getattr(args, "num_gpus", None) == 0:
        cfg.MODEL.DEVICE = "cpu"
    cfg.freeze()
    return cfg


def prepare_run(cfg: CfgNode, args: argparse.Namespace) -> None:
    """Prepares logging, seed and output folder as Detectron2 does, and writes ``config.yaml``.

    Raises:
        OSError: ``OUTPUT_DIR`` cannot be written.
    """
    try:
        default_setup(cfg, args)
    except OSError as error:
        raise OSError(f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} cannot be written: {error}. Give another folder") from error
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="gw_detectron")


def setup(args: argparse.Namespace) -> CfgNode:
    """Reads the config of a run and prepares it, without checks in between."""
    cfg = config_of_run(args)
    prepare_run(cfg, args)
    return cfg
