# `make demo` and `make test` set up all they need; nothing else has to be run before them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo bench test test-full lint types walls check clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

venv: $(READY)  ## build .venv with everything

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; this is %s" % sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)  ## train, kill in the middle of a save, resume bit-identically (about two minutes)
	$(BIN)/onward demo --out onward-demo

bench: $(VENV)/.ready-bench  ## saving and loading against the machine's limits and other libraries (15 minutes)
	$(BIN)/python -m bench.save

$(VENV)/.ready-bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,bench]'
	@touch $@

test: $(READY)  ## the test suite
	$(BIN)/python -m pytest -m "not full and not gpu"

test-full: $(READY)  ## the slow sweeps too (as root: real power cuts on loop devices)
	$(BIN)/python -m pytest -m "not gpu" --timeout 3600

lint: $(READY)  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy --strict
	$(BIN)/mypy

walls: $(READY)  ## rooms import downward only
	$(BIN)/lint-imports

check: lint types walls test  ## all that CI runs

clean:  ## remove what was built
	rm -rf $(VENV) build dist onward-demo .mypy_cache .ruff_cache .hypothesis .import_linter_cache
