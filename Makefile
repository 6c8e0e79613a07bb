# `make` lists the targets. Each of them creates or reuses .venv. A finished step of the set-up leaves a stamp in
# .venv/stamps and is repeated only if a file it depends on has changed, so an interrupted set-up resumes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=
DEMO_ARGS ?=
MATRIX_ARGS ?=
LOCK_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMPS := $(VENV)/stamps

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all fuzz faults soak matrix lint format docs lock wheel clean distclean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=/path/to/python3.11  PYTEST_ARGS='-k solvers -x'  DEMO_ARGS='--help'"
	@echo "             MATRIX_ARGS='--help'  LOCK_ARGS='--upgrade-package torch'"

setup: $(STAMPS)/package ## create .venv: pinned dependencies, Detectron2, this package

demo: setup ## train and evaluate a small Group Whitening Mask R-CNN; results go to output/demo
	$(BIN)/python tools/demo.py $(DEMO_ARGS)

test: setup ## run the fast tests, which cover every feature: run them before each commit
	$(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)

test-all: test ## run the fast tests, then the slow ones
	$(BIN)/python -m pytest -n auto -m slow $(PYTEST_ARGS)

fuzz: setup ## run over 10 000 property tests; counts go to output/fuzz_counts.json
	@mkdir -p output
	HYPOTHESIS_PROFILE=long FUZZ_COUNTS=output/fuzz_counts.json $(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

faults: setup ## kill runs 100 times at random moments; counts go to output/kills
	rm -rf output/kills
	$(BIN)/python tests/reliability/kill_runs.py

soak: setup ## train for an hour with ten resumes; record memory, open files and step time
	rm -rf output/soak
	$(BIN)/python tests/reliability/soak.py

matrix: setup ## run the tests on several versions of torch, NumPy and Pillow; write docs/reliability.md
	$(BIN)/python tests/reliability/matrix.py $(MATRIX_ARGS)

lint: setup ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Not --quiet: it would hide the warnings from `strict` in mkdocs.yml.
docs: setup ## build the documentation into site/; broken links and anchors are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# uv keeps the versions of requirements.txt that still fit, and lists the hashes of all files of each release, for all
# systems. It reads the registry from UV_DEFAULT_INDEX, not from pip's configuration. The last version of pip that
# accepts Detectron2's source archive is 26.0.
lock: $(STAMPS)/dependencies ## rewrite requirements.txt (versions and hashes) from pyproject.toml
	cd tools && ../$(BIN)/python -c 'import install_detectron2 as d; print(*d.DEPENDENCIES, "pip<=26.0", "setuptools", sep="\n")' \
	  | ../$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes --no-annotate \
	    --custom-compile-command 'make lock' $(LOCK_ARGS) --output-file ../requirements.txt ../pyproject.toml -

wheel: setup ## build the wheel into dist/
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

clean: ## remove build products and caches; .venv, datasets and output stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find gw_detectron tools tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same and .venv
	rm -rf $(VENV)

# $(call step,what is being done): announce a step of the set-up.
step = @echo "[setup] $(1)"
# command || $(call stop,what failed,what to do). No commas or quotes in the arguments.
stop = { printf '\n[setup] STOPPED: %s\n[setup] What to do: %s\n' '$(1)' '$(2)' >&2; \
	echo '[setup] Then run the same make command again; finished steps are not repeated.' >&2; exit 1; }

$(STAMPS)/venv:
	$(call step,creating $(VENV) with $(PYTHON))
	@test -n '$(PYTHON)' || $(call stop,there is no python3 on the PATH.,install Python 3.11 or pass PYTHON=/path/to/python3.11)
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || $(call stop,$(PYTHON) cannot be used: Python 3.11 or newer is needed.,install it or pass PYTHON=/path/to/python3.11)
	@'$(PYTHON)' -m venv $(VENV) \
	  || $(call stop,creating $(VENV) failed.,read the message above; Debian and Ubuntu need the package python3-venv)
	@mkdir -p $(STAMPS) && touch $@

# The build tools come first, so that --no-build-isolation builds source archives with tools of known hashes.
$(STAMPS)/dependencies: requirements.txt | $(STAMPS)/venv
	$(call step,installing the pinned dependencies; torch is large and this takes minutes)
	@awk '/^(pip|setuptools)==/, !/\\$$/' requirements.txt > $(STAMPS)/build_tools.txt
	@$(PIP) install --quiet --require-hashes --requirement $(STAMPS)/build_tools.txt \
	  || $(call stop,installing pip and setuptools failed.,check the network and the registry that pip uses (pip config list))
	@$(PIP) install --require-hashes --no-build-isolation --requirement requirements.txt \
	  || $(call stop,installing the dependencies failed.,read the message above; check the network and the free disk space (8 GB))
	@touch $@

$(STAMPS)/detectron2: tools/install_detectron2.py $(STAMPS)/dependencies
	$(call step,installing Detectron2 unless there is one)
	@$(BIN)/python tools/install_detectron2.py \
	  || $(call stop,installing Detectron2 failed.,read the message above)
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py $(STAMPS)/detectron2
	$(call step,installing this package in editable mode)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable . \
	  || $(call stop,installing this package failed.,read the message above)
	@$(PIP) check || $(call stop,the installed versions do not fit together.,run make distclean)
	@touch $@
