# make demo | make test | make lint | make gpu | make clean
# TESTS="-m slow" with make test runs the long ones.
# A fresh machine needs Python 3.11 or newer (PYTHON=python3.12 to choose one) and make; the rest is installed into .venv, about 6 GB.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint gpu clean install

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

# Everything that only a CUDA device can show: the tests, then the figures, into docs/benchmarks.
GPU_BENCH := device=cuda precision=bf16 out=docs/benchmarks
gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m clipscale.loss.triton_tune --rows 32768 --width 768 --dtype bfloat16
	$(BIN)/clipscale bench loss n=8k,32k,64k,256k,1M d=512,768,1024 dtype=bf16 methods=infcl,open_clip,inf_cl,compile device=cuda out=docs/benchmarks
	$(BIN)/clipscale bench step model=vit-b32 batch=32k chunk=2k memory=32k,128k,256k $(GPU_BENCH)/vit-b32
	$(BIN)/clipscale bench step model=vit-b16 batch=8k chunk=512 memory=8k,32k,128k $(GPU_BENCH)/vit-b16
	$(BIN)/clipscale bench step model=vit-l14 batch=4k chunk=128 memory=4k,16k,64k $(GPU_BENCH)/vit-l14
	$(BIN)/clipscale bench data workers=$(shell nproc) batch=4k out=docs/benchmarks

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
