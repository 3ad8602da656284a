# Each target sets up what it needs: .venv from pinned versions (constraints.txt), nothing outside this folder.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Tests at once, each with one core.
JOBS ?= 2

.PHONY: install demo test lint clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "LoKA needs Python 3.11 or newer, this is " + sys.version.split()[0] + " (set PYTHON=...)")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/loka demo

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

clean:
	rm -rf .venv
