# For a newcomer: `make demo`, `make quick`, `make test`, `make parity`, `make docs`. Each makes the virtual environment first.
PYTHON ?= python3
BIN := .venv/bin
QUICK := $(wildcard tests/runtime/test_*.py tests/passes/test_*.py) $(addprefix tests/laws/test_,draft.py kv_budget.py kv_keep.py kv_score.py kv_when.py length.py tree.py verify.py) \
	$(addprefix tests/test_,layers.py recipes.py capabilities.py facts.py state.py sizes.py packaging.py new.py)

.PHONY: demo quick test parity check docs install models

demo: .venv/installed
	$(BIN)/accel-compile demo

# the engine on a toy model, the laws of methods on the host, recipes, errors, layers: while you work
quick: .venv/installed
	$(BIN)/python -m pytest -n logical --maxprocesses 8 $(QUICK)

# a worker for each core, of 1 GB at most; whole files where that goes, for what a file's tests share
test: check
	$(BIN)/python -m pytest -n logical --maxprocesses 8 --dist worksteal

# the real model that tests take, 93 MB, once, into ~/.cache/accel
models: .venv/installed
	$(BIN)/python tools/models/real.py smollm2-135m

# what eviction keeps, against kvpress; an error where kvpress is not there
parity: .venv-parity/installed
	KVPRESS=required .venv-parity/bin/python -m pytest -n 0 -m "" tests/parity/kvpress

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
	$(BIN)/python tools/links.py
	touch $@

# kvpress takes an older transformers; all else comes from the first environment
.venv-parity/installed: .venv/installed constraints-parity.txt
	$(PYTHON) -m venv .venv-parity
	$(BIN)/python tools/overlay.py .venv-parity
	.venv-parity/bin/python -m pip install -q --disable-pip-version-check -c constraints-parity.txt -e '.[parity]'
	touch $@
