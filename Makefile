# Every target sets up what it needs. PYTHON is the interpreter that the environment is made from, VENV where it goes.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.galv-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench format

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv and install galv with what it needs for development

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev,reports,transformers]' --constraint constraints.txt
	@touch $@

demo: $(READY) ## plan a real model, then plan and train a small one on this machine
	$(BIN)/python examples/demo.py

test: $(READY) ## run all tests
	$(BIN)/python -m pytest

check: $(READY) ## format, lint, types, layers and all quick tests: what CI runs
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not slow"

bench: $(READY) ## run the benchmarks; DATA=DIR also prices the published runs in DIR
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/fuzz.py --plans 200
	$(BIN)/python benchmarks/runtime.py
	$(BIN)/python benchmarks/resume.py
	$(if $(DATA),$(BIN)/python benchmarks/published.py --data $(DATA),@echo "published runs: make bench DATA=DIR")
	$(foreach dir,$(wildcard $(DATA)/galvatron $(DATA)/peers/galvatron),$(BIN)/python benchmarks/galvatron.py --data $(dir))

format: $(READY) ## put the code in its one form
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
