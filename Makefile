# `make` alone lists what there is. Everything runs in .venv, which `make setup` makes.
PYTHON ?= python3
PY := .venv/bin/python
INSTALLED := .venv/.installed
DEMO := runs/demo/$(shell date +%Y-%m-%d_%H-%M-%S)
# One thread a process: two test processes share two cores, and features are fastest on one thread.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1 \t\2/' | expand -t 20

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet --editable ".[dev]"
	@touch $@

setup: $(INSTALLED) ## Make .venv and install everything

demo: $(INSTALLED) ## Generate speech, train, average, decode, print a WER table
	$(PY) train.py run_dir=$(DEMO)
	$(PY) decode.py run_dir=$(DEMO) avg=auto
	$(PY) scripts/report.py $(DEMO)

test: $(INSTALLED) ## The fast tests (under 8 minutes on 2 cores)
	$(TEST_ENV) $(PY) -m pytest -n 2 --dist loadgroup -m "not slow"

test-slow: $(INSTALLED) ## The tests that take minutes
	$(TEST_ENV) $(PY) -m pytest -m slow

lint: $(INSTALLED) ## Style, types and import rules
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy asr
	.venv/bin/lint-imports

format: $(INSTALLED) ## Rewrite the code in the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## Remove caches and the environment; runs and data stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
