# `make demo` and `make test` do all the set-up themselves. On a machine without network, name an interpreter that has the
# packages and nothing is installed: make test-gpu PYTHON=python3
PYTHON_BOOTSTRAP ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

ifeq ($(origin PYTHON),command line)
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))
SETUP :=
else
PYTHON := $(VENV)/bin/python
SETUP := $(STAMP)
endif

.PHONY: help setup demo test test-gpu bench lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP) ## create .venv and install the pinned development versions

$(STAMP): pyproject.toml requirements-dev.txt
	$(PYTHON_BOOTSTRAP) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint requirements-dev.txt --editable '.[dev]'
	@touch $@

demo: $(SETUP) ## train and run a mixture of experts over 4 ranks (ARGS='--ranks 2 ...')
	$(PYTHON) -m thunderep demo $(ARGS)

test: export CUDA_VISIBLE_DEVICES :=
test: $(SETUP) ## all tests that need no GPU, with none in sight (ARGS='tests/ops -k ...')
	$(PYTHON) -m pytest -m 'not gpu' $(ARGS)

test-gpu: $(SETUP) ## the tests that need CUDA devices
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: $(SETUP) ## dispatch and combine beside torch.distributed, into bench/results
	$(PYTHON) -m bench.bench_dispatch $(ARGS)

lint: $(SETUP) ## ruff and mypy --strict
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(SETUP) ## put the source into the form that lint expects
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean: ## remove .venv and what tools leave behind
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
