# Each target makes the virtual environment first, if it is not there: `make demo` on a fresh
# machine needs Python and make only. Another Python: `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers

.PHONY: help demo test check bench bench-full peers clean

help: ## Print this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 14

demo: $(INSTALLED) ## Train on real digits, kill the run, resume it on 3 and 1 processes, compare
	$(BIN)/destrier demo

test: $(INSTALLED) peers ## Run the tests
	$(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile

check: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(INSTALLED) peers ## Run the benchmarks on little data: little can be told from them
	$(BIN)/python benchmarks/run.py --quick

bench-full: $(INSTALLED) peers ## Run the benchmarks in full, an hour, and write docs/benchmarks.md
	$(BIN)/python benchmarks/run.py

peers: $(PEERS)/.installed ## Install the original libraries, the oracles of the formats

clean: ## Remove what the targets wrote, but for the virtual environment
	rm -rf build dist demo-out benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,demo]'
	touch $@

# Where they cannot be installed, the tests that need them are skipped, and say so.
$(PEERS)/.installed: tests/peers/requirements.txt tests/peers/requirements-peers.txt constraints.txt
	$(PYTHON) -m venv $(PEERS)
	rm -f $(PEERS)/failed
	($(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --requirement tests/peers/requirements.txt torch && \
	 $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --requirement tests/peers/requirements-peers.txt) || touch $(PEERS)/failed
	touch $@
