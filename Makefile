# Each target sets up what it needs: .venv from pinned versions (constraints.txt), nothing outside this folder.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

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
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

clean:
	rm -rf .venv
