# Every target sets up what it needs; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The oldest torch that pyproject.toml allows, and where it is installed. Its CPU multiplies no fp8
# by rows, and its Triton interprets nothing on today's numpy: what it can tell is what it compiles.
OLDEST := $(shell sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
OLDEST_VENV := .venv-oldest

.PHONY: demo test test-oldest check lint wheel clean

demo: $(STAMP)
	$(BIN)/prequant demo

test: $(STAMP)
	$(BIN)/python -m pytest

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -k "compil or one_graph or break" \
		tests/unit/test_mount*.py tests/unit/test_runtime_joined.py tests/unit/test_kernel_ops.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/quantpolicy lint --meta

check: lint test wheel

wheel: $(STAMP)
	$(BIN)/python tests/wheel.py

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[runtime,dev]'
	$(BIN)/python -m compileall -q quantpolicy prequant
	touch $(STAMP)

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST_VENV)
	sed -E '/^(torch|triton)==/d' constraints.txt > $(OLDEST_VENV)/constraints.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --constraint $(OLDEST_VENV)/constraints.txt \
		torch==$(OLDEST) --editable '.[runtime,dev]'
	touch $@
