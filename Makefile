# Every target sets up what it needs; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check lint wheel clean

demo: $(STAMP)
	$(BIN)/prequant demo

test: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/quantpolicy lint --meta

check: lint test wheel

wheel: $(STAMP)
	$(BIN)/python tests/wheel.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	$(BIN)/python -m compileall -q quantpolicy prequant
	touch $(STAMP)
