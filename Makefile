# One front door. Every target makes .venv itself.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The root holds folders named like common packages: keep it off sys.path.
export PYTHONSAFEPATH := 1

.PHONY: help demo test lint docs bench gpu-check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "gpukeeper needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed ## Run real jobs through a real log and a real llama.cpp server, and show every step
	@$(BIN)/gpuq demo

test: $(VENV)/.installed ## Run every test
	$(BIN)/pytest

lint: $(VENV)/.installed ## Check style, types and the import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright

docs: $(VENV)/.installed ## Generate the reference under docs/ again
	$(BIN)/python -P -m gpukeeper.events.schema --write docs/events
	$(BIN)/python -P -m gpukeeper.cli.reference > docs/cli.md

bench: $(VENV)/.installed ## Measure speed as ratios within one run; writes build/bench.json
	$(BIN)/python -P benchmarks/run.py

gpu-check: $(VENV)/.installed ## Check reader and admission against a real NVIDIA GPU; needs no network
	$(BIN)/python -P benchmarks/gpu_check.py

clean: ## Remove what the targets made
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
