"""Commands of the documentation are valid, and its reference tables complete.

A command is valid if its parser, config file, keys, make target or extra exists.
`tests/test_your_data.py` also runs those of docs/your_data.md.
"""

import argparse
import re
import runpy
import sys
import tomllib

import pytest
import yaml
from detectron2.config import get_cfg

import gw_detectron.workbench.commands
from gw_detectron.config import default_config, flat_items, read_config
from gw_detectron.norms import norm_options
from gw_detectron.workbench.commands import COMMANDS
from gw_detectron.workbench.commands.parsers import MixedParser

from .pages import PAGES, ROOT, commands, inline_commands, read

#: first words of commands that are not ours
UNCHECKED = [".venv/bin/pre-commit", "hf", "git", "compute-sanitizer"]
#: paths that the reader has, not the repository
READERS = ("output/", "mydata/", "my.yaml", "CONFIG", "FILE")
ALL = [
    (page, words) for page in PAGES for words in commands(page) + inline_commands(page)
]


class Parsed(Exception):
    """Carries the arguments that a script has parsed."""


@pytest.fixture
def parse(monkeypatch):
    """Return a function that runs a program until it has parsed its words."""

    def stopping(real):
        def stop(parser, *given):
            raise Parsed(real(parser, *given))

        return stop

    for kind in (argparse.ArgumentParser, MixedParser):
        monkeypatch.setattr(kind, "parse_args", stopping(kind.parse_args))

    def run(program, *words):
        monkeypatch.setattr(sys, "argv", [program, *words])
        with pytest.raises(Parsed) as parsed:
            if program == "gw-detectron":
                gw_detectron.workbench.commands.main()
            elif program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                monkeypatch.delitem(sys.modules, program, raising=False)
                runpy.run_module(program, run_name="__main__")
        (arguments,) = parsed.value.args
        return arguments

    return run


def check_config(args, tmp_path):
    """Check the config file and the keys of a command."""
    config = getattr(args, "config_file", None) or ""
    opts = getattr(args, "opts", None) or []
    is_readers = config.startswith(READERS)
    if is_readers or (opts and not config):
        empty = tmp_path / "empty.yaml"
        empty.write_text("VERSION: 2\n")
        config = str(empty)
    if config:
        read_config(config, opts)


def check_make(*words):
    makefile = read("Makefile")
    for word in words:
        name, is_variable, _ = word.partition("=")
        known = f"$({name})" if is_variable else f"\n{name}:"
        assert known in makefile


def check_pip(*words):
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for named in re.findall(r"(?:\.|gw-detectron)\[(.+?)\]", " ".join(words)):
        assert set(named.split(",")) <= set(extras)


@pytest.mark.parametrize(
    ("page", "words"),
    ALL,
    ids=[f"{page}: {' '.join(words)[:60]}" for page, words in ALL],
)
def test_a_command_is_valid(page, words, parse, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of the environment
        words = words[1:]
    match words:
        case [program, *_] if program in UNCHECKED:
            pass
        case ["make", *rest]:
            check_make(*rest)
        case ["pip", *rest]:
            check_pip(*rest)
        case ["pytest" | "bash", *rest] | ["python", "-m", "pytest", *rest]:
            files = [
                word for word in rest if "/" in word and not word.startswith(READERS)
            ]
            assert files and all((ROOT / file).exists() for file in files)
        case ["torchrun", _, "examples/timm_models.py", *_] | [
            "torchrun",
            "--master-port",
            *_,
        ]:
            pass  # timm's and torchrun's own flags
        case ["python", "-m", "gw_detectron", *rest]:
            assert not rest
        case (
            ["python", "-m", program, *rest]
            | ["gw-detectron" as program, *rest]
            | ["python", program, *rest]
            | ["torchrun", "--nproc_per_node", _, program, *rest]
        ):
            check_config(parse(program, *rest), tmp_path)
        case _:
            pytest.fail("nothing checks this command")


def rows(page, heading):
    """Return the cells of every row of the tables below a heading, without those of the head."""
    (section,) = re.findall(
        rf"^#+ {heading}\n(.*?)(?=^#|\Z)", read(page), flags=re.DOTALL | re.MULTILINE
    )
    tables = re.findall(r"^\|.*\n\|[- |]+\n((?:\|.*\n)+)", section, flags=re.MULTILINE)
    lines = "".join(tables).splitlines()
    return [re.split(r" *\| *", line)[1:-1] for line in lines]


def test_every_config_key_has_its_default_and_meaning():
    theirs = dict(flat_items(get_cfg()))
    ours = {
        key: value for key, value in flat_items(default_config()) if key not in theirs
    }

    listed = {}
    for key, default, meaning in rows("docs/reference.md", "Config keys"):
        assert meaning
        listed[key.strip("`")] = yaml.safe_load(default.strip("`"))

    assert listed == ours


def test_every_norm_name_is_listed_with_its_options():
    listed = {}
    for names, *_, options in rows("docs/norms.md", "Norm names"):
        for name in re.findall(r"\w+", names.replace(":rotation=cayley", "")):
            listed.setdefault(name, set(re.findall(r"`(\w+)=", options)))
    listed["BN"].add("rotation")  # in its name
    for name in ("BW", "FrozenBW"):  # their row refers to that of GW
        listed[name] |= listed["GW"] - {"groups"}

    for name, options in norm_options().items():
        assert listed[name] == set(options), name


def test_every_command_is_listed():
    listed = {name.strip("`") for name, *_ in rows("docs/reference.md", "Commands")}
    assert listed == COMMANDS.keys()
