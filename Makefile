# For a newcomer: `make demo`, `make test`, `make docs`. Each makes the virtual environment first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check docs install

demo: .venv/installed
	$(BIN)/accel-compile demo

# a worker for each core, of 1 GB at most; whole files where that goes, for what a file's tests share
test: check
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/links.py
	$(BIN)/mypy

docs: .venv/installed
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
