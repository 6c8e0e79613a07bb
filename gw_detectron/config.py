"""Config keys of this package, its config files, and reading a yaml with the keys."""

import copy
import importlib.resources
import itertools
import operator
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg

from .errors import ConfigError, MissingFileError, first_line, similar_names

_DEFAULTS = {
    "MODEL.COMPILE": False,
    # "GW:groups=64,iters=5,eps=1e-5,solver=newton", the paper's setting
    "MODEL.RESNETS.WHITEN_NORM": "GW",
    # "" none; "S1" stem; "S1-B1" "S1-B2" "S1-B3" stem and the first / second / third norm of every block;
    # "S1-B12" stem and the first two; "ALL" stem, blocks and shortcuts. The paper uses "S1-B2" for detection.
    "MODEL.RESNETS.WHITEN_POSITIONS": "S1-B2",
    "MODEL.RESNETS.CONV": "",
    "MODEL.FPN.CONV": "",
    "MODEL.ROI_BOX_HEAD.CONV": "",
    "MODEL.ROI_MASK_HEAD.CONV": "",
    # the paper's head; the authors' released code corresponds to True
    "MODEL.ROI_BOX_HEAD.SINGLE_RELU": False,
    # BASE_LR is the rate for ACCUMULATE * IMS_PER_BATCH images
    "SOLVER.ACCUMULATE": 1,
    "SOLVER.EMA": 0.0,
    # the newest checkpoints that stay in the run folder; 0 for all
    "SOLVER.KEEP": 0,
    # before images are resized (colors: after), e.g. "RandomCrop(size=512)"
    "INPUT.AUGMENTATIONS": [],
    # such as [0.5, 99.5]; with [], images of more than 8 bits are refused
    "INPUT.PERCENTILES": [],
    "TEST.BEST": "",  # "bbox/AP", "validation/total_loss"
    "TEST.PATIENCE": 0,
    "TEST.LOSS": True,
}
# keys of earlier versions, which configs of their runs have; a warning says that they are ignored
_REMOVED = ("TRACKER", "INPUT.SCALE_PER_BATCH")
#: of a yaml whose aliases are expanded; Detectron2's configs have some ten thousand
_MOST_CHARACTERS = 10_000_000
_LEAST_CHARACTERS = 10  # that a value counts as
#: by lists of bases, ten files can be read a billion times
_MOST_LAYERS = 100
#: of an integer; Python prints no integer of more than 4300 digits
_LONGEST_INTEGER = 1000


def add_gw_config(cfg: CfgNode) -> None:
    """Add this package's config keys with their defaults; a second call changes nothing.

    docs/reference.md describes the keys and :mod:`gw_detectron.norms.names` the norm names, which Detectron2's own keys
    ``MODEL.RESNETS.NORM``, ``MODEL.FPN.NORM``, ``MODEL.ROI_BOX_HEAD.NORM``, ``MODEL.ROI_MASK_HEAD.NORM``,
    ``MODEL.RETINANET.NORM`` and ``MODEL.SEM_SEG_HEAD.NORM`` take.
    """
    for key, value in _DEFAULTS.items():
        node, name = _place(cfg, key)
        node.setdefault(name, copy.copy(value))
    for key in _REMOVED:
        if not cfg.key_is_deprecated(key):
            cfg.register_deprecated_key(key)


def default_config() -> CfgNode:
    """Return the defaults of Detectron2 and this package."""
    cfg = get_cfg()
    add_gw_config(cfg)
    return cfg


def flat_items(node: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a config, as in SOLVER.BASE_LR, and their values."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from flat_items(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def get_value(cfg: CfgNode, key: str) -> Any:
    """Return the value of a key such as SOLVER.BASE_LR."""
    return operator.attrgetter(key)(cfg)


def changed_config(cfg: CfgNode, values: Mapping[str, Any]) -> CfgNode:
    """Return a copy of a config, not frozen, with other values of keys such as SOLVER.BASE_LR."""
    changed = cfg.clone()
    changed.defrost()
    for key, value in values.items():
        node, name = _place(changed, key)
        setattr(node, name, value)
    return changed


def _place(cfg: CfgNode, key: str) -> tuple[CfgNode, str]:
    """Return the node of a key such as SOLVER.BASE_LR, and its name there."""
    path, _, name = key.rpartition(".")
    node = get_value(cfg, path) if path else cfg
    return node, name


def shipped_configs() -> dict[str, Path]:
    """Return the paths of all config files by their sorted names relative to the folder ``configs``."""
    package = Path(str(importlib.resources.files("gw_detectron")))
    # A wheel has the configs inside the package; a clone, also an editable install of it, has them beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            files = sorted([*folder.rglob("*.yaml"), *folder.rglob("*.py")])
            files = [path for path in files if path.name != "datasets.yaml"]
            return {path.relative_to(folder).as_posix(): path for path in files}
    raise MissingFileError(
        f"'{package / 'configs'}': no configs. Fix: install gw_detectron again."
    )


def list_configs() -> list[str]:
    """List the configs that train a detector, such as ``COCO-Detection/faster_rcnn_R_50_FPN_1x_GW.yaml``."""
    names = [name for name in shipped_configs() if not name.startswith("common/")]
    return [name for name in names if not PurePath(name).name.startswith("Base-")]


def config_summary(path: Path) -> str:
    """Return the first sentence of the comment at the head of a config file."""
    lines = path.read_text().splitlines()
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    comment = " ".join(line.lstrip("# ") for line in head)
    return re.split(r"(?<=\.) ", comment, maxsplit=1)[0]


def find_config_file(name: str | os.PathLike[str]) -> str:
    """Return the path of a shipped config if no file has this path, else the path itself; of a run, its config.yaml.

    A leading ``configs/``, the folder of a unique file name, and ``.yaml`` may be left out.
    """
    name = os.fspath(name)
    record = os.path.join(name, "config.yaml")
    if name and os.path.isfile(record):
        return record
    if not name or os.path.exists(name):
        return name

    wanted = name.removeprefix("configs/")
    names = (wanted, f"{wanted}.yaml")
    found = [
        path
        for shipped, path in shipped_configs().items()
        if shipped in names or path.name in names
    ]
    return str(found[0]) if len(found) == 1 else name


def read_config(
    config_file: str | os.PathLike[str], opts: Sequence[Any] = ()
) -> CfgNode:
    """Read a yaml over the defaults of Detectron2 and this package, without running code that the yaml names.

    Args:
        config_file: path of the yaml, or a name of :func:`list_configs`.
        opts: keys to change, as key, value, key, value, ...; a value is text, as on a command line, or a Python value.

    Raises:
        FileNotFoundError: the config file does not exist.
        ConfigError: a file is not a yaml of config keys and plain values, or a key or value cannot be used.
    """
    config_file = find_config_file(config_file)
    _check_file(config_file)
    words = [word for word in opts if word != "--"]  # which argparse keeps
    _check_flags(words)

    reader = _Reader(get_cfg())
    add_gw_config(reader)
    try:
        reader.merge_from_file(config_file, allow_unsafe=False)
    except ConfigError:
        raise
    # yacs and the operating system raise errors of many classes
    except Exception as error:
        raise ConfigError(f"'{config_file}': {_explain(error)}") from error

    cfg = CfgNode(reader)
    defaults = dict(flat_items(cfg))
    for place in range(1, len(words), 2):
        is_rate = isinstance(defaults.get(words[place - 1]), float)
        if is_rate and str(words[place]).isdecimal():
            words[place] = float(words[place])
    try:
        cfg.merge_from_list(words)
    except Exception as error:
        raise ConfigError(f"Arguments: {_explain(error)}") from error
    _check_values(cfg)
    return cfg


def _check_file(path: str) -> None:
    if not path:
        raise MissingFileError(
            "--config-file: not given. Fix: give a file, or a name of `gw-detectron list configs`."
        )
    if not os.path.isfile(path):
        raise MissingFileError(
            f"--config-file: file not found: '{path}' (cwd: {os.getcwd()}).{similar_names(path, shipped_configs())} "
            "Fix: give a file, or a name of `gw-detectron list configs`."
        )
    if path.endswith(".py"):
        raise ConfigError(
            f"--config-file ('{path}'): is a LazyConfig. Fix: train it with Detectron2's "
            "tools/lazyconfig_train_net.py, or give a yaml."
        )


def _check_flags(words: Sequence[Any]) -> None:
    flags = [word for word in words if str(word).startswith("--")]
    if flags:
        raise ConfigError(
            f"Arguments: flags after KEY VALUE pairs. Fix: put {' '.join(flags)} before {words[0]}."
        )


def _check_values(cfg: CfgNode) -> None:
    if cfg.MODEL.LOAD_PROPOSALS:
        raise ConfigError(
            f"MODEL.LOAD_PROPOSALS ({cfg.MODEL.LOAD_PROPOSALS}): Detectron2 reads proposal files by pickle, which runs "
            "code that they contain. Fix: set it to False and use a proposal generator such as RPN."
        )

    # yacs accepts None for any key
    for key, default in flat_items(default_config()):
        if isinstance(default, str) and get_value(cfg, key) is None:
            raise ConfigError(f'{key} (None): not a text. Fix: write "" for none.')

    percentiles = cfg.INPUT.PERCENTILES
    if not percentiles:
        return
    if len(percentiles) != 2 or not 0 <= percentiles[0] < percentiles[1] <= 100:
        raise ConfigError(
            f"INPUT.PERCENTILES ({percentiles}): not two ascending percentages. Fix: give e.g. 0.5,99.5."
        )


def _explain(error: Exception) -> str:
    """Return the text of an error of Detectron2's config, and how to write the key or value."""
    reason = first_line(error)
    unknown = re.search(r"Non-existent (?:config )?key: (\S*[^\s.])", reason)
    if unknown:
        known = [key for key, _ in flat_items(default_config())]
        return f"unknown config key '{unknown[1]}'.{similar_names(unknown[1], known)}"
    if "Type mismatch" in reason:
        # a shell removes quotes, and yacs reads text of digits as a number
        return f"""{reason}. Fix: write e.g. "('name',)" for a tuple, "'2024'" for a text."""
    return f"{reason}."


class _Reader(CfgNode):
    """Detectron2's config, which also reads configs of its earlier versions, with files read by :func:`_layers`."""

    @classmethod
    def load_yaml_with_base(
        cls, filename: str, allow_unsafe: bool = False
    ) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for _, tree in _layers(filename):
            _merge(tree, merged)
        _accept_whole_numbers(merged, default_config())
        return merged


def _layers(path: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the keys of a yaml and, before it, of the files that it names as ``_BASE_``."""
    layers = []
    waiting = [path]
    while waiting:  # from the last layer to the first
        file = waiting.pop()
        tree = parse_config(Path(file).read_text("utf-8"), file)
        bases = _read_bases(tree, file)
        layers.append((file, tree))
        waiting += [_find_base(base, os.path.dirname(file)) for base in bases]
        if len(layers) + len(waiting) > _MOST_LAYERS:
            raise ConfigError(
                f"'{path}': reads more than {_MOST_LAYERS} files by _BASE_. Fix: name fewer, and none that leads back "
                "to itself."
            )
    return layers[::-1]


def _read_bases(tree: dict[str, Any], file: str) -> list[str]:
    """Remove ``_BASE_`` from the keys of a file, and return the files that it names."""
    given = tree.pop("_BASE_", [])
    bases = [given] if isinstance(given, str) else given
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"'{file}': _BASE_ ({given!s:.80}): not a file or a list of files. Fix: write e.g. _BASE_: base.yaml."
        )
    return bases


def _find_base(base: str, folder: str) -> str:
    """Return the path of a ``_BASE_`` of a yaml in a folder: of a file, or of a shipped config."""
    path = os.path.join(folder, os.path.expanduser(base))
    return path if os.path.exists(path) else find_config_file(base)


def _merge(tree: dict[str, Any], below: dict[str, Any]) -> None:
    """Write the keys of a tree over those of another."""
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(value, below[key])
        else:
            below[key] = value


def _accept_whole_numbers(tree: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Turn 0 into 0.0 where the default is a float: yacs refuses it."""
    for key, value in tree.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict):
            _accept_whole_numbers(value, default)
        elif type(value) is int and isinstance(default, float):
            tree[key] = float(value)


def given_keys(config_file: str, opts: Sequence[Any] = ()) -> set[str]:
    """Return the keys that the user gave: on the command line, and in yaml files that are not shipped.

    The config of a run has all keys: they are not the user's choice for another run.
    """
    keys = {str(word) for word in opts}
    every = {key for key, _ in flat_items(get_cfg())}
    shipped = {path.resolve() for path in shipped_configs().values()}
    for path, tree in _layers(find_config_file(config_file)):
        own = {key for key, _ in flat_items(tree)}
        if Path(path).resolve() not in shipped and not own >= every:
            keys |= own
    return keys


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Parse a yaml of keys and plain values, without bases, or raise ConfigError with the ``name`` of its file."""
    try:
        return dict(yaml.load(text, Loader=_BoundedLoader).items())
    except Exception as error:  # PyYAML raises errors of many classes
        raise ConfigError(
            f"'{name}': not a yaml file of keys and plain values: {error}"
        ) from error


class _BoundedLoader(yaml.SafeLoader):
    """Load plain values, and refuse aliases that stand for more text than memory holds, or for themselves.

    Nine lines of aliases to the line above, ten in each, are a billion values. Integers that Python cannot print are
    refused, too.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: Counter[yaml.Node] = Counter()  # of what is below a node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        node = super().compose_node(parent, index)
        is_unfinished = node.end_mark is None  # an alias to a node that contains it
        length = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if node.tag.endswith(":int") and length > _LONGEST_INTEGER:
            raise yaml.YAMLError(
                f"an integer of more than {_LONGEST_INTEGER} characters"
            )
        self._sizes[parent] += self._sizes[node] + max(length, _LEAST_CHARACTERS)
        if is_unfinished or self._sizes[parent] > _MOST_CHARACTERS:
            raise yaml.YAMLError(
                f"more than {_MOST_CHARACTERS} characters with aliases expanded"
            )
        return node
