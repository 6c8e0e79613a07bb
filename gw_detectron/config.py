"""Config keys of this package, and reading a yaml with them."""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from detectron2.config import CfgNode, get_cfg
from detectron2.utils.file_io import PathManager

from .errors import ConfigError, MissingFileError, similar_names
from .shipped_configs import find_config_file, similar_configs

_LONGEST_FILE = 2**18  # characters; a dumped config has 10,000, and PyYAML reads 100,000 in a second
_MOST_NODES = 100_000  # values of a file, those of an alias each time; Detectron2 copies them
_DEEPEST = 50  # nesting of a file; Python's recursion ends near 1000
_MOST_FILES = 100  # a config and its bases
_MERGE_ERRORS = (LookupError, ValueError, AssertionError, TypeError, AttributeError, RecursionError, MemoryError)
_YAML_ERRORS = (*_MERGE_ERRORS, ArithmeticError, OSError, yaml.YAMLError)  # PyYAML's for values such as "!!int ''"


def add_gw_config(cfg: CfgNode) -> None:
    """Add this package's config keys with their defaults.

    A second call changes nothing. :mod:`gw_detectron.norms.names` describes norm names. Detectron2's own keys
    ``MODEL.RESNETS.NORM``, ``MODEL.FPN.NORM``, ``MODEL.ROI_BOX_HEAD.NORM``, ``MODEL.ROI_MASK_HEAD.NORM``,
    ``MODEL.RETINANET.NORM`` and ``MODEL.SEM_SEG_HEAD.NORM`` take the same names.

    Args:
        cfg: Detectron2's config.
    """
    model = cfg.MODEL
    defaults = (
        # Compile the backbone, with FPN, by torch.compile. On the CPU that needs a C++ compiler.
        # Default False. The paper has no compiler.
        (model, "COMPILE", False),
        # Norm at WHITEN_POSITIONS of the backbone: any norm name.
        # Default "GW" = "GW:groups=64,iters=5,eps=1e-5,solver=newton", the paper's setting.
        (model.RESNETS, "WHITEN_NORM", "GW"),
        # Positions of WHITEN_NORM. Every other norm of the backbone is MODEL.RESNETS.NORM.
        #   ""                            none
        #   "S1"                          stem
        #   "S1-B1" "S1-B2" "S1-B3"       stem and the first / second / third norm of every block
        #   "S1-B12"                      stem and the first two norms of every block
        #   "ALL"                         stem, every norm of every block, and shortcuts
        # Default "S1-B2", which the paper uses for detection.
        (model.RESNETS, "WHITEN_POSITIONS", "S1-B2"),
        # Apply one ReLU after all convolutions of the box head, instead of one after each.
        # Default False, the paper's head. The authors' released detection code corresponds to True.
        (model.ROI_BOX_HEAD, "SINGLE_RELU", False),
        # Batches of IMS_PER_BATCH images per iteration. An iteration is one optimizer step with their mean gradient, so
        # BASE_LR is the learning rate for ACCUMULATE * IMS_PER_BATCH images. docs/training.md compares it to one batch.
        # Default 1, as in Detectron2. The paper has no such setting.
        (cfg.SOLVER, "ACCUMULATE", 1),
        # Convolutions before a norm: "" plain, "WS" with Weight Standardization (arXiv 1903.10520).
        # Default "". The paper has no Weight Standardization.
        *((node, "CONV", "") for node in (model.RESNETS, model.FPN, model.ROI_BOX_HEAD, model.ROI_MASK_HEAD)),
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


def flat_keys(node: dict) -> Iterator[str]:
    """Yield the keys of a config's values, as in SOLVER.BASE_LR."""
    return (key for key, _ in flat_items(node))


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


def read_config(config_file: str | os.PathLike[str], opts: Sequence[Any] = ()) -> CfgNode:
    """Read a yaml over the defaults of Detectron2 and this package.

    Args:
        config_file: path of the yaml, or a name of :func:`gw_detectron.model_zoo.list_configs`.
        opts: keys to change, as key, value, key, value, ...; a value is text, as on a command line, or a Python value.

    Returns:
        The config, not frozen.

    Raises:
        MissingFileError: the config file does not exist.
        ConfigError: the file or a ``_BASE_`` is no yaml of config keys, or holds Python objects or far too many values;
            a key is unknown or repeated, or a value has the wrong type; or ``MODEL.LOAD_PROPOSALS`` is set.
    """
    cfg = default_config()
    known = set(flat_keys(cfg))
    opts = list(opts)
    if opts[:1] == ["--"]:  # which argparse keeps
        del opts[0]
    _check_words([word for word in opts if isinstance(word, str)], known)
    config_file = find_config_file(config_file)
    if not config_file or not os.path.isfile(config_file):
        raise MissingFileError(_missing_config_message(config_file))
    if config_file.endswith(".py"):
        raise ConfigError(
            f"--config-file ('{config_file}'): is a LazyConfig. Fix: train it with Detectron2's "
            "tools/lazyconfig_train_net.py, or give a yaml."
        )
    keys = _check_yaml(str(config_file), cfg.VERSION, [])
    try:
        cfg.merge_from_file(str(config_file), allow_unsafe=False)
    except _YAML_ERRORS as error:
        raise ConfigError(_bad_keys_message(f"'{config_file}'", keys, known, error)) from error
    if len(opts) % 2:
        file = next((word for word in map(str, opts[::2]) if os.path.isfile(word)), None)
        fix = "give each key one value" if file is None else f"write MODEL.WEIGHTS {file}"
        raise ConfigError(f"Arguments '{' '.join(map(str, opts))}': not pairs of KEY VALUE. Fix: {fix}.")
    try:
        cfg.merge_from_list(opts)
    except _MERGE_ERRORS as error:
        raise ConfigError(_bad_keys_message("Arguments", map(str, opts[::2]), known, error)) from error
    for key in ("OUTPUT_DIR", "DATASETS.TRAIN", "DATASETS.TEST"):  # read before the checks of a run
        if get_value(cfg, key) is None:
            raise ConfigError(f"{key}: has no value. Fix: give one, or leave the key out.")
    if cfg.MODEL.LOAD_PROPOSALS:
        raise ConfigError(
            f"MODEL.LOAD_PROPOSALS ({cfg.MODEL.LOAD_PROPOSALS}): Detectron2 reads proposal files by pickle, which runs "
            "code that they contain. Fix: set it to False and use a proposal generator such as RPN."
        )
    return cfg


def _check_words(words: Sequence[str], known: set[str]) -> None:
    """Refuse arguments that the command line took for keys and values."""
    if joined := [word for word in words if "=" in word and word.partition("=")[0] in known]:
        raise ConfigError(f"Arguments '{joined[0]}': '=' in a key. Fix: write {' '.join(joined[0].split('=', 1))}.")
    if flags := [word for word in words if word.startswith("--")]:
        first = next((word for word in words if not word.startswith("--")), "the KEY VALUE pairs")
        raise ConfigError(f"Arguments: flags after KEY VALUE pairs. Fix: put {' '.join(flags)} before {first}.")


def _check_yaml(path: str, latest_version: int, files: list[str], above: tuple[str, ...] = ()) -> list[str]:
    """Return the keys of a config and its bases, unless a file is unsafe.

    Detectron2 loads yaml with Python's objects by default, resolves aliases into copies, and follows ``_BASE_`` until
    the stack overflows.

    Args:
        path: the config file, or the address of a base.
        latest_version: of Detectron2's configs.
        files: the files that were read; this one is added.
        above: the files whose base this one is.
    """
    local = not path.startswith(("http://", "https://"))
    name = os.path.realpath(path) if local else path
    files.append(name)
    if name in above:
        raise ConfigError(f"'{path}': is its own _BASE_. Fix: name another base.")
    if len(files) > _MOST_FILES:
        raise ConfigError(f"'{path}': more than {_MOST_FILES} files by _BASE_. Fix: use fewer bases.")
    if local and not os.path.isfile(path):  # opening a pipe would block
        raise ConfigError(
            f"'{above[-1] if above else path}': _BASE_ not found: '{path}' (absolute: "
            f"'{os.path.abspath(path)}'). Fix: give an existing file; relative paths start at the folder of the config."
        )
    try:
        with PathManager.open(path, "r") as file:
            tree = parse_config(file.read(_LONGEST_FILE + 1), path)
        version = tree.get("VERSION", latest_version)
        if type(version) is not int or not 1 <= version <= latest_version:
            raise ValueError(f"VERSION is {version!r}, not a number from 1 to {latest_version}")
        bases = tree.pop("_BASE_", [])
        bases = bases if isinstance(bases, list) else [bases]
        if not all(isinstance(base, str) for base in bases):
            raise TypeError(f"_BASE_ is {bases!r}, not a file name")
    except ConfigError:
        raise
    except _YAML_ERRORS as error:
        raise _not_a_config(path, error) from error
    keys = list(flat_keys(tree))
    for base in map(os.path.expanduser, bases):
        if not base.startswith(("/", "http://", "https://")):
            base = os.path.join(os.path.dirname(path), base)
        keys += _check_yaml(base, latest_version, files, (*above, name))
    return keys


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Parse the yaml of a config without its bases.

    Args:
        text: the yaml.
        name: the file, for messages.

    Raises:
        ConfigError: see :func:`read_config`; keys and types are not checked.
    """
    try:
        if len(text) > _LONGEST_FILE:
            raise ValueError(f"longer than {_LONGEST_FILE} characters")
        tree = _ConfigLoader(text, name).get_single_data()
        if not isinstance(tree, dict):
            raise TypeError("empty" if tree is None else f"a {type(tree).__name__} instead of keys and values")
    except ConfigError:
        raise
    except _YAML_ERRORS as error:
        raise _not_a_config(name, error) from error
    return tree


def _not_a_config(name: str, error: Exception) -> ConfigError:
    return ConfigError(f"'{name}': not a yaml file of keys and values: {error}. Fix: correct it.")


class _ConfigLoader(yaml.SafeLoader):
    """Load plain values; refuse Python's objects, repeated keys and aliases that multiply.

    Args:
        text: the file's content.
        name: the file, for messages.
    """

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self._depth = self._count = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias, before, mark = self.check_event(yaml.AliasEvent), self._count, self.peek_event().start_mark
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _yaml_error(mark, f"nested deeper than {_DEEPEST}", "make it flatter")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and node not in self._sizes:
            raise _yaml_error(mark, "an alias inside its own value", "write the value out")
        self._count += self._sizes[node] if is_alias else 1
        if self._count > _MOST_NODES:
            raise _yaml_error(mark, f"more than {_MOST_NODES} values", "use fewer aliases (*name)")
        if not is_alias:
            self._sizes[node] = self._count - before
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise _yaml_error(key.start_mark, f"the key {key.value!r:.99} is not a name", "correct or quote it")
            if key.value in seen:
                raise _yaml_error(key.start_mark, f"the key {key.value!r:.99} is repeated", "remove one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def _refuse(self, node: yaml.Node) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        why = "could run code" if "python" in tag else "is unknown"
        fix = "write the value plainly, without a tag"
        if os.path.basename(self.name) == "Base-RetinaNet.yaml":  # Detectron2's computes its anchors
            fix = "give COCO-Detection/retinanet_R_50_FPN_1x_GW.yaml of this package, or make it your _BASE_"
        raise _yaml_error(node.start_mark, f"the tag {tag} {why}", fix)


_ConfigLoader.add_constructor(None, _ConfigLoader._refuse)


def _yaml_error(mark: yaml.Mark, why: str, fix: str) -> ConfigError:
    return ConfigError(f"'{mark.name}', line {mark.line + 1}: {why}. Fix: {fix}.")


def _missing_config_message(given: str) -> str:
    if not given:
        return "--config-file: not given. Fix: give a file, or a name of `gw-detectron configs`."
    beside = {path.name: str(path) for path in Path(given).parent.glob("*.yaml")}
    return (
        f"--config-file: file not found: '{given}' (cwd: {os.getcwd()}).{similar_configs(given, beside)} Fix: give an "
        "existing file, or a name of `gw-detectron configs`."
    )


def _bad_keys_message(source: str, keys: Iterable[str], known: set[str], error: Exception) -> str:
    unknown = [key for key in keys if key not in known]
    if not unknown:
        reason = str(error.args[0] if error.args else error).rstrip(".")
        # the shell removes quotes, and a tuple of one element needs a comma
        fix = "correct the value"
        if "'tuple'" in reason:
            fix = """a tuple is written as "('name',)" or "(480, 560)\""""
        elif "(<class 'str'> vs." in reason:
            fix = """put a text that reads as another value into quotes, such as "'2024'\""""
        return f"{source}: {reason}. Fix: {fix}."
    lines = [f"{source}: {len(unknown)} unknown config keys."] if len(unknown) > 5 else []
    for key in unknown[:5]:
        if any(name.startswith(f"{key}.") for name in known):
            lines.append(f"{source}: '{key}' is a section of keys, not a key. Fix: give its keys, or remove it.")
        else:
            lines.append(f"{source}: unknown config key '{key}'.{similar_names(key, known)} Fix: correct or remove it.")
    return "\n".join(lines)
