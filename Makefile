# `make` lists the targets. Each of them creates or reuses .venv. A finished step of the set-up leaves a stamp in
# .venv/stamps and is repeated only if a file it depends on has changed, so an interrupted set-up resumes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=
DEMO_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMPS := $(VENV)/stamps

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format wheel clean distclean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON=/path/to/python3.11  PYTEST_ARGS='-k solvers -x'  DEMO_ARGS='--help'"

setup: $(STAMPS)/package ## create .venv: pinned dependencies, Detectron2, this package

demo: setup ## train and evaluate a small Group Whitening Mask R-CNN; results go to output/demo
	$(BIN)/python tools/demo.py $(DEMO_ARGS)

test: setup ## run the fast tests, which cover every feature: run them before each commit
	$(BIN)/python -m pytest -n auto -m "not slow" $(PYTEST_ARGS)

test-all: test ## run the fast tests, then the slow ones
	$(BIN)/python -m pytest -n auto -m slow $(PYTEST_ARGS)

lint: setup ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: setup ## build the wheel into dist/
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

clean: ## remove build products and caches; .venv, datasets and output stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
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

$(STAMPS)/dependencies: constraints.txt | $(STAMPS)/venv
	$(call step,installing the pinned dependencies; torch is large and this takes minutes)
	@$(PIP) install --quiet --constraint constraints.txt pip setuptools wheel \
	  || $(call stop,installing pip and setuptools failed.,check the network and the registry that pip uses (pip config list))
	@$(PIP) install --build-constraint constraints.txt --requirement constraints.txt \
	  || $(call stop,installing the dependencies failed.,read the message above; check the network and the free disk space (8 GB))
	@touch $@

$(STAMPS)/detectron2: $(wildcard tools/*detectron2*.py) $(STAMPS)/dependencies
	$(call step,installing Detectron2 unless there is one)
	@$(BIN)/python tools/install_detectron2.py --constraint constraints.txt \
	  || $(call stop,installing Detectron2 failed.,read the message above)
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py $(STAMPS)/detectron2
	$(call step,installing this package in editable mode)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable . \
	  || $(call stop,installing this package failed.,read the message above)
	@$(PIP) check || $(call stop,the installed versions do not fit together.,run make distclean)
	@touch $@
