"""Config keys of this package, and reading a yaml with them."""

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml
from detectron2.config import CfgNode, get_cfg

from .errors import ConfigError, MissingFileError


def add_gw_config(cfg: CfgNode) -> None:
    """Add this package's config keys with their defaults.

    A second call changes nothing. :mod:`gw_detectron.modeling.norm` describes norm names. Detectron2's own keys
    ``MODEL.RESNETS.NORM``, ``MODEL.FPN.NORM``, ``MODEL.ROI_BOX_HEAD.NORM`` and ``MODEL.ROI_MASK_HEAD.NORM`` take the
    same names.

    Args:
        cfg: Detectron2's config.
    """
    defaults = (
        # Norm at WHITEN_POSITIONS of the backbone: any norm name.
        # Default "GW" = "GW:groups=64,iters=5,eps=1e-5,solver=newton", the paper's setting.
        (cfg.MODEL.RESNETS, "WHITEN_NORM", "GW"),
        # Positions of WHITEN_NORM. Every other norm of the backbone is MODEL.RESNETS.NORM.
        #   ""                            none
        #   "S1"                          stem
        #   "S1-B1" "S1-B2" "S1-B3"       stem and the first / second / third norm of every block
        #   "S1-B12"                      stem and the first two norms of every block
        #   "ALL"                         stem, every norm of every block, and shortcuts
        # Default "S1-B2", which the paper uses for detection.
        (cfg.MODEL.RESNETS, "WHITEN_POSITIONS", "S1-B2"),
        # Apply one ReLU after all convolutions of the box head, instead of one after each.
        # Default False, the paper's head. The authors' released detection code corresponds to True.
        (cfg.MODEL.ROI_BOX_HEAD, "SINGLE_RELU", False),
    )
    for node, key, value in defaults:
        if key not in node:
            node[key] = value


def read_config(config_file: str, opts: Sequence[str] = ()) -> CfgNode:
    """Read a yaml over the defaults of Detectron2 and this package.

    Args:
        config_file: path of the yaml.
        opts: keys to change, as key, value, key, value, ...

    Returns:
        The config, not frozen.

    Raises:
        MissingFileError: the config file does not exist.
        ConfigError: the file is no yaml of config keys, a key is unknown or a value has the wrong type.
    """
    cfg = get_cfg()
    add_gw_config(cfg)
    known = set(_flat_keys(cfg))
    if not config_file or not os.path.isfile(config_file):
        raise MissingFileError(_missing_config_message(config_file))
    _check_bases(str(config_file))
    try:
        keys = list(_flat_keys(CfgNode.load_yaml_with_base(str(config_file), allow_unsafe=True)))
    except (yaml.YAMLError, AssertionError, AttributeError, OSError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"'{config_file}': not a yaml file of config keys: {error}. Fix: correct it.") from error
    try:
        cfg.merge_from_file(str(config_file))
    except _MERGE_ERRORS as error:
        raise ConfigError(_bad_keys_message(f"'{config_file}'", keys, known, error)) from error
    opts = list(opts)
    if flags := [word for word in opts if word.startswith("--")]:
        raise ConfigError(f"Arguments: flags after KEY VALUE pairs. Fix: put {' '.join(flags)} before {opts[0]}.")
    if len(opts) % 2:
        raise ConfigError(f"Arguments '{' '.join(opts)}': not pairs of KEY VALUE. Fix: give each key one value.")
    try:
        cfg.merge_from_list(opts)
    except _MERGE_ERRORS as error:
        raise ConfigError(_bad_keys_message("Arguments", opts[::2], known, error)) from error
    return cfg


def _check_bases(config_file: str) -> None:
    """Raise ConfigError if a config is its own base.

    Detectron2 would read it until the stack overflows.
    """
    path, seen = config_file, set[str]()
    while os.path.isfile(path):
        if os.path.realpath(path) in seen:
            raise ConfigError(f"'{path}': is its own _BASE_. Fix: name another base.")
        seen.add(os.path.realpath(path))
        try:
            with open(path) as file:
                base = yaml.load(file, yaml.BaseLoader)["_BASE_"]
            path = os.path.join(os.path.dirname(path), os.path.expanduser(base))
        except (KeyError, TypeError, ValueError, RecursionError, yaml.YAMLError):
            return  # no base, or a file that Detectron2 refuses


_MERGE_ERRORS = (KeyError, ValueError, AssertionError, TypeError)


def _flat_keys(node: dict, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _missing_config_message(given: str) -> str:
    if not given:
        return "--config-file: not given. Fix: --config-file configs/<folder>/<name>.yaml."
    near = difflib.get_close_matches(Path(given).name, [path.name for path in Path(given).parent.glob("*.yaml")])
    similar = f" Similar: {', '.join(str(Path(given).parent / name) for name in near)}." if near else ""
    return (
        f"--config-file: file not found: '{given}' (cwd: {os.getcwd()}).{similar} Fix: give an existing file; "
        "gw_detectron.model_zoo.list_configs() lists those of the package."
    )


def _bad_keys_message(source: str, keys: Iterable[str], known: set[str], error: Exception) -> str:
    unknown = [key for key in keys if key not in known]
    if not unknown:
        reason = str(error.args[0] if error.args else error).rstrip(".")
        # the shell removes quotes, and a tuple of one element needs a comma
        example = (
            """ a tuple is written as "('name',)" or "(480, 560)\"""" if "'tuple'" in reason else " correct the value"
        )
        return f"{source}: {reason}. Fix:{example}."
    lines = []
    for key in unknown:
        near = difflib.get_close_matches(key, known, n=3)
        similar = f" Similar: {', '.join(near)}." if near else ""
        lines.append(f"{source}: unknown config key '{key}'.{similar} Fix: correct or remove it.")
    return "\n".join(lines)
