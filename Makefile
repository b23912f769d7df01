# Each target makes the virtual environment first, if it is not there: `make demo` on a fresh
# machine needs Python and make only. Another Python: `make test PYTHON=python3.12`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test check bench clean

help: ## Print this list
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /make \1\t/' | expand -t 14

demo: $(INSTALLED) ## Train on real digits, kill the run, resume it on 3 and 1 processes, compare
	$(BIN)/destrier demo

test: $(INSTALLED) ## Run the tests
	$(BIN)/python -m pytest -q

check: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(INSTALLED) ## Run the benchmarks
	$(BIN)/python benchmarks/run.py

clean: ## Remove what the targets wrote, but for the virtual environment
	rm -rf build dist demo-out benchmarks/out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev,demo]'
	touch $@
