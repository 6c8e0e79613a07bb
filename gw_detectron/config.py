"""Config keys of this package, its config files, and reading a yaml with the keys."""

import importlib.resources
import itertools
import operator
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg

from .errors import ConfigError, MissingFileError, similar_names


def add_gw_config(cfg: CfgNode) -> None:
    """Add this package's config keys with their defaults; a second call changes nothing.

    docs/reference.md describes the keys and :mod:`gw_detectron.norms.names` the norm names, which Detectron2's own keys
    ``MODEL.RESNETS.NORM``, ``MODEL.FPN.NORM``, ``MODEL.ROI_BOX_HEAD.NORM``, ``MODEL.ROI_MASK_HEAD.NORM``,
    ``MODEL.RETINANET.NORM`` and ``MODEL.SEM_SEG_HEAD.NORM`` take.
    """
    model = cfg.MODEL
    defaults = (
        (model, "COMPILE", False),
        (
            model.RESNETS,
            "WHITEN_NORM",
            "GW",
        ),  # "GW:groups=64,iters=5,eps=1e-5,solver=newton", the paper's setting
        # "" none; "S1" stem; "S1-B1" "S1-B2" "S1-B3" stem and the first / second / third norm of every block;
        # "S1-B12" stem and the first two; "ALL" stem, blocks and shortcuts. The paper uses "S1-B2" for detection.
        (model.RESNETS, "WHITEN_POSITIONS", "S1-B2"),
        (
            model.ROI_BOX_HEAD,
            "SINGLE_RELU",
            False,
        ),  # the paper's head; the authors' released code corresponds to True
        (
            cfg.SOLVER,
            "ACCUMULATE",
            1,
        ),  # BASE_LR is the rate for ACCUMULATE * IMS_PER_BATCH images
        (cfg.SOLVER, "EMA", 0.0),
        (
            cfg.INPUT,
            "AUGMENTATIONS",
            [],
        ),  # before images are resized (colors: after), e.g. "RandomCrop(size=512)"
        (cfg.INPUT, "SCALE_PER_BATCH", False),
        (
            cfg.INPUT,
            "PERCENTILES",
            [],
        ),  # such as [0.5, 99.5]; with [], images of more than 8 bits are refused
        (cfg.TEST, "BEST", ""),  # "bbox/AP", "validation/total_loss"
        (cfg.TEST, "PATIENCE", 0),
        (cfg.TEST, "LOSS", True),
        (cfg, "TRACKER", ""),
        *(
            (node, "CONV", "")
            for node in (model.RESNETS, model.FPN, model.ROI_BOX_HEAD, model.ROI_MASK_HEAD)
        ),
    )
    for node, key, value in defaults:
        if key not in node:
            node[key] = value


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
        node, _, name = key.rpartition(".")
        setattr(get_value(changed, node) if node else changed, name, value)
    return changed


def training_sides(cfg: CfgNode) -> tuple[float, float]:
    """Return the shorter side, of several their median, and the longest one, to which training resizes images."""
    return float(statistics.median(cfg.INPUT.MIN_SIZE_TRAIN)), float(cfg.INPUT.MAX_SIZE_TRAIN)


def anchor_strides(cfg: CfgNode) -> list[int]:
    """Return the strides of the feature maps with anchors."""
    node = cfg.MODEL.RETINANET if "RetinaNet" in cfg.MODEL.META_ARCHITECTURE else cfg.MODEL.RPN
    return [
        2 ** int(name[-1]) if name[-1].isdigit() else 16 for name in node.IN_FEATURES
    ]  # p2, res4


def shipped_configs() -> dict[str, Path]:
    """Return the paths of all config files by their sorted names relative to the folder ``configs``."""
    package = Path(str(importlib.resources.files("gw_detectron")))
    # A wheel has the configs inside the package; a clone, also an editable install of it, has them beside it.
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            files = sorted(
                path
                for path in folder.rglob("*")
                if path.suffix in (".yaml", ".py") and path.name != "datasets.yaml"
            )
            return {path.relative_to(folder).as_posix(): path for path in files}
    raise MissingFileError(
        f"'{package / 'configs'}': no configs. Fix: install gw_detectron again."
    )


def config_summary(path: Path) -> str:
    """Return the first sentence of the comment at the head of a config file."""
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text().splitlines()
    )
    comment = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.) ", comment, maxsplit=1)[0]


def find_config_file(name: str | os.PathLike[str]) -> str:
    """Return the path of a shipped config if no file has this path, else the path itself; of a run, its config.yaml.

    A leading ``configs/``, the folder of a unique file name, and ``.yaml`` after it may be left out.
    """
    name = os.fspath(name)
    if os.path.isfile(of_run := os.path.join(name, "config.yaml")) and name:
        return of_run
    if os.path.exists(name) or not name:
        return name
    files, wanted = shipped_configs(), name.removeprefix("configs/")
    found = [path for file, path in files.items() if path.name in (wanted, f"{wanted}.yaml")]
    found = [files[wanted]] if wanted in files else found
    return str(found[0]) if len(found) == 1 else name


def read_config(config_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """Read a yaml over the defaults of Detectron2 and this package, without running code that the yaml names.

    Args:
        config_file: path of the yaml, or a name of :func:`gw_detectron.model_zoo.list_configs`.
        opts: keys to change, as key, value, key, value, ...; a value is text, as on a command line, or a Python value.

    Raises:
        FileNotFoundError: the config file does not exist.
        ConfigError: a file is not a yaml of config keys and plain values, or a key or value cannot be used.
    """
    cfg = default_config()
    opts = list(opts)
    if opts[:1] == ["--"]:  # which argparse keeps
        del opts[0]
    if flags := [word for word in opts if isinstance(word, str) and word.startswith("--")]:
        raise ConfigError(
            f"Arguments: flags after KEY VALUE pairs. Fix: put {' '.join(flags)} before {opts[0]}."
        )
    config_file = find_config_file(config_file)
    _check_file(config_file)
    if len(opts) % 2:
        raise ConfigError(f"Arguments '{' '.join(map(str, opts))}': not pairs of KEY VALUE.")
    source = f"'{config_file}'"
    try:
        cfg = _merged(cfg, config_file)
        source = "Arguments"
        cfg.merge_from_list(opts)
    except Exception as error:  # PyYAML, fvcore and yacs raise errors of many classes
        raise ConfigError(f"{source}: {_explain(error)}") from error
    if cfg.MODEL.LOAD_PROPOSALS:
        raise ConfigError(
            f"MODEL.LOAD_PROPOSALS ({cfg.MODEL.LOAD_PROPOSALS}): Detectron2 reads proposal files by pickle, which runs "
            "code that they contain. Fix: set it to False and use a proposal generator such as RPN."
        )
    percentiles = cfg.INPUT.PERCENTILES
    if percentiles and not (
        len(percentiles) == 2 and 0 <= percentiles[0] < percentiles[1] <= 100
    ):
        raise ConfigError(
            f"INPUT.PERCENTILES ({percentiles}): not two ascending percentages. Fix: give e.g. 0.5,99.5."
        )
    return cfg


def given_keys(config_file: str, opts: Sequence[Any] = ()) -> set[str]:
    """Return the keys that the user gave: on the command line, and in yaml files that are not shipped."""
    keys, shipped = (
        {str(word) for word in opts},
        {path.resolve() for path in shipped_configs().values()},
    )
    files = [Path(find_config_file(config_file)).resolve()]
    for path in files:
        if path not in shipped:
            tree = parse_config(path.read_text(), str(path))
            base = tree.pop("_BASE_", [])
            bases = [base] if isinstance(base, str) else base
            files += [
                Path(_find_base(str(path.parent / each), str(path.parent))).resolve()
                for each in bases
            ]
            keys |= {key for key, _ in flat_items(tree)}
    return keys


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Parse a yaml of keys and plain values, without bases, or raise ConfigError with the ``name`` of its file."""
    try:
        return dict(yaml.safe_load(text).items())
    except Exception as error:  # PyYAML raises errors of many classes
        raise ConfigError(
            f"'{name}': not a yaml file of keys and plain values: {error}"
        ) from error


def _merged(cfg: CfgNode, config_file: str) -> CfgNode:
    """Merge a yaml into a config; its ``_BASE_`` may also be the name of a shipped config."""
    folders: list[str] = []

    class Reader(CfgNode):
        @classmethod
        def load_yaml_with_base(
            cls, filename: str, allow_unsafe: bool = False
        ) -> dict[str, Any]:
            filename = _find_base(filename, folders[-1]) if folders else filename
            folders.append(os.path.dirname(filename))
            content = super().load_yaml_with_base(filename, allow_unsafe)
            folders.pop()
            return content

    reader = Reader(cfg)
    reader.merge_from_file(config_file, allow_unsafe=False)
    return CfgNode(reader)


def _find_base(path: str, folder: str) -> str:
    """Return the path of a ``_BASE_`` that a yaml in a folder names: of a file, or of a shipped config."""
    return path if os.path.exists(path) else find_config_file(os.path.relpath(path, folder))


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


def _explain(error: Exception) -> str:
    """Return the text of an error of Detectron2's config, and how to write the key or value."""
    reason = (
        str(error.args[0] if isinstance(error, KeyError) else error).rstrip(".")
        or type(error).__name__
    )
    if unknown := re.search(r"Non-existent (?:config )?key: (\S*)", reason):
        known = [key for key, _ in flat_items(default_config())]
        return f"unknown config key '{unknown[1]}'.{similar_names(unknown[1], known)}"
    if "(<class 'float'> vs. <class 'int'>)" in reason:
        return f"{reason}. Fix: write the number with a point, such as 50.0."
    if (
        "'tuple'" in reason
    ):  # the shell removes quotes, and a tuple of one element needs a comma
        return f"""{reason}. Fix: write a tuple as "('name',)" or "(480, 560)"."""
    if "(<class 'str'> vs." in reason:
        return f"""{reason}. Fix: quote text that looks like a number, such as "'2024'"."""
    return f"{reason}."
