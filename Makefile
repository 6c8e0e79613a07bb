# `make` lists the targets. All of them create or reuse .venv. A finished step of the set-up leaves a stamp in
# .venv/stamps and is repeated only if a file it depends on has changed, so an interrupted set-up resumes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEMO := quick_schedules/mask_rcnn_R_18_FPN_BN_GW_demo.yaml
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all lint docs fuzz matrix lock clean

help: ## print this list; PYTEST_ARGS, DEMO_ARGS, MATRIX_ARGS and LOCK_ARGS hold more words for the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/package ## create .venv: pinned dependencies, Detectron2, this package in editable mode

demo: setup datasets/gw_synthetic ## train and evaluate a small Group Whitening Mask R-CNN; results go to output/demo
	$(BIN)/gw-detectron train --overwrite --config-file $(DEMO) $(DEMO_ARGS)
	$(BIN)/gw-detectron report output/demo

datasets/gw_synthetic: | $(STAMPS)/package
	$(BIN)/python -m examples.shapes $@

test: setup ## run the fast tests, which cover every feature: run them before each commit
	$(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)

test-slow: setup ## run the long tail: trainings, several processes, kills, wheel and notebook
	$(BIN)/python -m pytest -n auto -m slow $(PYTEST_ARGS)

test-all: lint docs test test-slow ## run all that .ci/run runs

lint: setup ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup ## build the documentation into site/; broken links and anchors are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

fuzz: setup ## run the property tests with 34 times as many examples
	$(BIN)/python -m pytest -n auto --hypothesis-profile=long $$(grep -rl 'import .*given' tests) $(PYTEST_ARGS)

matrix: setup ## run the tests with the lowest and newest versions, and with libraries of docs/your_model.md; write CONTRIBUTING.md
	$(BIN)/python tools/version_matrix.py $(MATRIX_ARGS)

# The last version of pip that accepts Detectron2's source archive is 26.0.
lock: $(STAMPS)/dependencies ## rewrite requirements.txt (versions and hashes for all systems) from pyproject.toml
	cd tools && ../$(BIN)/python -c 'import install_detectron2 as d; print(*d.DEPENDENCIES, "pip<=26.0", "setuptools", sep="\n")' \
	  | ../$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes --no-annotate \
	    --custom-compile-command 'make lock' $(LOCK_ARGS) --output-file ../requirements.txt ../pyproject.toml -

clean: ## remove build products and caches; .venv, datasets and output stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/venv:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'PYTHON ($(PYTHON)): Python 3.11 or newer is needed. Fix: install it, or give PYTHON=/path/to/python3.11.' >&2; exit 1; }
	@'$(PYTHON)' -m venv $(VENV) || { echo 'Fix: on Debian and Ubuntu, install the package python3-venv.' >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# The build tools come first, so that --no-build-isolation builds source archives with tools of known hashes.
$(STAMPS)/dependencies: requirements.txt | $(STAMPS)/venv
	@echo '[setup] installing the pinned dependencies; torch is large and this takes minutes'
	@awk '/^(pip|setuptools)==/, !/\\$$/' requirements.txt > $(STAMPS)/build_tools.txt
	@$(PIP) install --quiet --require-hashes --requirement $(STAMPS)/build_tools.txt
	@$(PIP) install --quiet --require-hashes --no-build-isolation --requirement requirements.txt \
	  || { echo 'Fix: read the message above; check the network and the disk (8 GB), then run the same command again.' >&2; exit 1; }
	@touch $@

$(STAMPS)/detectron2: tools/install_detectron2.py $(STAMPS)/dependencies
	$(BIN)/python tools/install_detectron2.py
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py $(STAMPS)/detectron2
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@$(PIP) check
	@touch $@
	@echo "Next: source $(BIN)/activate, then gw-detectron doctor"
