"""The flags of a run, and from them the config."""

import argparse
import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger

from .config import add_gw_config


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


def read_config(config_file: str, opts: Sequence[str] = ()) -> CfgNode:
    """Reads a yaml over the defaults of Detectron2 and this package.

    Args:
        config_file: path of the yaml.
        opts: keys to change, as key, value, key, value, ...

    Returns:
        The config, not frozen.

    Raises:
        FileNotFoundError: there is no such config file.
        ValueError: a key is unknown or a value has the wrong type.
    """
    cfg = get_cfg()
    add_gw_config(cfg)
    known = set(_flat_keys(cfg))
    path = Path(config_file)
    if not config_file or not path.is_file():
        raise FileNotFoundError(_no_config_message(config_file))
    try:
        keys = list(_flat_keys(CfgNode.load_yaml_with_base(str(path), allow_unsafe=True)))
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{path} is not a yaml file of config keys: {error}") from error
    try:
        cfg.merge_from_file(str(path))
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(_bad_keys_message(str(path), keys, known, error)) from error
    opts = list(opts)
    if flags := [word for word in opts if word.startswith("--")]:
        raise ValueError(f"after the flags come pairs of KEY VALUE: put {' '.join(flags)} before {opts[0]}")
    if len(opts) % 2:
        raise ValueError(f"after the flags come pairs of KEY VALUE, but these are {len(opts)} words: {' '.join(opts)}")
    try:
        cfg.merge_from_list(opts)
    except (KeyError, ValueError, AssertionError) as error:
        raise ValueError(_bad_keys_message("the command line", opts[::2], known, error)) from error
    return cfg


def _flat_keys(node: dict, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _no_config_message(given: str) -> str:
    if not given:
        return "no config was given: --config-file configs/<folder>/<name>.yaml"
    folder = Path(given).parent
    names = [path.name for path in folder.glob("*.yaml")]
    near = difflib.get_close_matches(Path(given).name, names, n=3)
    hint = f"near it are: {', '.join(str(folder / name) for name in near)}. " if near else ""
    return (
        f"there is no config file '{given}' (looked from {os.getcwd()}). {hint}"
        "gw_detectron.model_zoo.list_configs() names those that come with the package"
    )


def _bad_keys_message(source: str, keys: Iterable[str], known: set[str], error: Exception) -> str:
    unknown = [key for key in keys if key not in known]
    if not unknown:
        said = f"{source}: {error.args[0] if error.args else error}"
        # the shell takes quotes away, and a tuple of one has a comma
        return said + (""". A tuple is written as "('name',)" or "(480, 560)\"""" if "'tuple'" in said else "")
    lines = []
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=3)
        lines.append(f"{source}: there is no config key {key}" + (f"; near it are {', '.join(near)}" if near else ""))
    return "\n".join(lines)
