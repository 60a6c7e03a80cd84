# `make` lists the targets.
PYTHON ?= python3
BUDGET_S ?= 540
# Tests spend half their time waiting for processes and servers, so four workers keep two cores busy.
WORKERS ?= 4
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help quickstart install dev lint format test test-all figures reproduce bench constraints dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/installed ## train on digits with and without echoing, and compare (2 minutes)
	$(BIN)/python -m adaecho.run -m experiment=quickstart

install: $(VENV)/installed ## create .venv for runs and figures
dev: $(VENV)/installed-dev ## create .venv with linter, type checker and tests

lint: $(VENV)/installed-dev ## check formatting, lint, types, imports, size budgets and prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/size.py
	$(BIN)/python scripts/prose.py

format: $(VENV)/installed-dev ## format the code, and fix lint errors where possible
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Keep the listed order, because files with few but long tests must not come last.
test: $(VENV)/installed-dev ## run the tests, WORKERS at a time
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all: $(VENV)/installed-dev ## also run slower tests (takes twice as long)
	$(BIN)/python -m pytest -m "" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

figures: $(VENV)/installed ## draw all figures from the committed records; no GPU or network
	$(BIN)/python -m experiments.evidence

reproduce: $(VENV)/installed ## run the next unfinished experiments for BUDGET_S seconds
	$(BIN)/python scripts/reproduce.py --budget-s $(BUDGET_S) $(if $(CIFAR10),--cifar10 "$(CIFAR10)")

bench: $(VENV)/installed-dev ## benchmark against other libraries, and write records to benchmarks/
	@for file in $(filter-out benchmarks/record.py,$(wildcard benchmarks/*.py)); do \
	  name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

constraints: $(VENV)/installed-dev ## write constraints.txt from the tested versions in .venv
	$(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(nvidia-(cu|nc|nv[jst])|cuda|triton)' > constraints.txt

dist: $(VENV)/installed-dev ## build sdist and wheel in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist

clean: ## remove .venv and caches, but not runs/
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
