# `make` lists the targets.
PYTHON ?= python3
BUDGET_S ?= 540
# Tests wait for processes and servers half of their time, so four tests keep two cores busy.
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help quickstart install dev lint format test test-all figures reproduce bench constraints dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/installed ## the main job on real digits: does echoing save fresh examples? (2 minutes)
	$(BIN)/python -m adaecho.run -m experiment=quickstart

install: $(VENV)/installed ## make .venv for runs and figures
dev: $(VENV)/installed-dev ## make .venv with linter, type checker and tests

lint: $(VENV)/installed-dev ## formatting, lint, types, imports, size budgets, prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/size.py
	$(BIN)/python scripts/prose.py

format: $(VENV)/installed-dev ## format, and fix lint errors where possible
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# In the listed order: files with few but long tests must not come last.
test: $(VENV)/installed-dev ## the test suite, WORKERS tests at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/installed-dev ## all tests, in twice the time
	$(BIN)/python -m pytest -m "" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

figures: $(VENV)/installed ## every figure from the committed records; no GPU, no network
	$(BIN)/python -m experiments.evidence

reproduce: $(VENV)/installed ## the next unfinished cells of the reproduction, BUDGET_S seconds at a time
	$(BIN)/python scripts/reproduce.py --budget-s $(BUDGET_S) $(if $(CIFAR10),--cifar10 "$(CIFAR10)")

bench: $(VENV)/installed-dev ## ratios against peers, both sides measured in one run; records in benchmarks/
	@for file in $(filter-out benchmarks/record.py,$(wildcard benchmarks/*.py)); do \
	  name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

constraints: $(VENV)/installed-dev ## write constraints.txt from the tested versions in .venv
	$(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(nvidia-(cu|nc|nv[jst])|cuda|triton)' > constraints.txt

dist: $(VENV)/installed-dev ## sdist and wheel in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 14) else \
	  f"adaecho needs Python 3.11 to 3.14 and $(PYTHON) is {v[0]}.{v[1]}; try: make PYTHON=python3.12 quickstart")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch and the other packages into $(VENV) (about 7 GB, some minutes) ..."
	$(PIP) install -c constraints.txt -e '.[run,figures]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch, the other packages and the developers' tools into $(VENV) (about 7 GB, some minutes) ..."
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/installed
