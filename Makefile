# Two commands for a newcomer: `make demo` and `make test`. Both make the virtual environment first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check install

demo: .venv/installed
	$(BIN)/accel-compile demo

test: check
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/python tools/links.py
	$(BIN)/mypy

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
