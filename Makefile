# Both `make demo` and `make test` set up all they need, in .venv, and nothing outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := src tests bench examples docs

.PHONY: demo test lint typecheck unit bench docs clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint typecheck unit

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

typecheck: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/pytest

bench: $(READY)
	$(BIN)/python bench/run_all.py

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
