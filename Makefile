# make demo | make test | make lint | make clean
# TESTS="-m slow" with make test runs the long ones.
# A fresh machine needs Python 3.11 or newer (PYTHON=python3.12 to choose one) and make; the rest is installed into .venv, about 6 GB.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint clean install

demo: $(INSTALLED)
	$(BIN)/clipscale data demo
	$(BIN)/clipscale train experiment=demo run=demo
	$(BIN)/clipscale eval run=demo
	$(BIN)/clipscale report run=demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 $(TESTS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

# Editable, with the versions that constraints.txt pins; done again when either file changes.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Keeps runs/ and the demo set.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
