"""Every command line of the documentation is valid: its parser, config file, keys, make target or extra exists.

`tests/test_your_data.py` also runs the commands of docs/your_data.md.
"""

import argparse
import re
import runpy
import sys
import tomllib

import pytest

import gw_detectron.commands
from gw_detectron.config import read_config

from .pages import PAGES, ROOT, commands, inline_commands, read

#: commands that nothing here checks, by their first words, with the reason
UNCHECKED = {
    (".venv/bin/pre-commit", "install"): "pre-commit's own command",
    ("hf", "upload"): "the command of huggingface_hub",
    ("python", "-m", "gw_detectron"): "the module behind gw-detectron; see commands/test_commands.py",
    ("pip", "--require-hashes"): "flags that the Makefile uses",
    ("torchrun", "--nproc_per_node=2", "-m", "gw_detectron.timm_models"): "timm's train.py; see test_timm_models.py",
    ("torchrun", "--master-port"): "a flag of torchrun alone",
    ("TRITON_INTERPRET=0", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", "compute-sanitizer"): "NVIDIA's, needs a GPU",
}
#: paths that the reader has, not the repository
READERS = ("output/", "mydata/", "my.yaml", "CONFIG", "FILE")
ALL = [(page, words) for page in PAGES for words in commands(page) + inline_commands(page)]


class Parsed(Exception):
    """Carries the arguments that a script has parsed."""


@pytest.fixture
def parse(monkeypatch):
    """Return a function that runs a script, or `gw-detectron`, until it has parsed its words."""
    real = argparse.ArgumentParser.parse_args

    def stop(parser, *given):
        raise Parsed(real(parser, *given))

    def run(program, *words):
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        monkeypatch.setattr(sys, "argv", [program, *words])
        with pytest.raises(Parsed) as parsed:
            if program == "gw-detectron":
                gw_detectron.commands.main()
            elif program.startswith("experiments"):
                monkeypatch.delitem(sys.modules, program, raising=False)
                runpy.run_module(program, run_name="__main__")
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
        return parsed.value.args[0]

    return run


def check_config(args, tmp_path):
    """Check the config file and the keys of a command."""
    config = getattr(args, "config_file", None) or (args.name if getattr(args, "action", "") == "show" else "")
    opts = getattr(args, "opts", None) or []
    if config.startswith(READERS) or (opts and not config):
        config = str(tmp_path / "empty.yaml")
        (tmp_path / "empty.yaml").write_text("VERSION: 2\n")
    if config:
        read_config(config, opts)


def check_make(*words):
    makefile = read("Makefile")
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert re.search(rf"^{name} [?:]=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), word


def check_pip(*words):
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|gw-detectron)\[(.+)\]", word):
            assert set(found[1].split(",")) <= set(extras), word


def check_files(*words):
    files = [word for word in words if "/" in word]
    assert files and all((ROOT / file).exists() for file in files)


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)[:60]}" for page, words in ALL])
def test_a_command_is_valid(page, words, parse, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if any(tuple(words[: len(first)]) == first for first in UNCHECKED):
        return
    match words:
        case ["make", *rest]:
            check_make(*rest)
        case ["pip", "install", *rest]:
            check_pip(*rest)
        case ["pytest" | "bash", *rest] | ["python", "-m", "pytest", *rest]:
            check_files(*rest)
        case ["python", "-m", program, *rest] if program.startswith("experiments"):
            check_config(parse(program, *rest), tmp_path)
        case ["gw-detectron" as program, *rest] | ["python", program, *rest]:
            check_config(parse(program, *rest), tmp_path)
        case ["torchrun", "--nproc_per_node", _, program, *rest]:
            check_config(parse(program, *rest), tmp_path)
        case _:
            pytest.fail("nothing checks this command: add a case, or an entry of UNCHECKED with the reason")


def test_every_exception_is_needed():
    for first in UNCHECKED:
        assert any(tuple(words[: len(first)]) == first for _, words in ALL), first


@pytest.mark.parametrize(
    "line",
    ["tools/train_net.py --no-such-flag", "tools/export_model.py --config-file x", "gw-detectron no-such-command"],
)
def test_a_wrong_command_is_noticed(line, parse):
    with pytest.raises(SystemExit, match="2"):
        parse(*line.split())
    with pytest.raises(AssertionError):
        check_make("no-such-target")
    with pytest.raises(AssertionError):
        check_pip("install", ".[weights,no_such_extra]")
