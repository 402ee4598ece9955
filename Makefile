# make demo | make test | make mutants | make oldest | make newest | make lint | make docs | make clean; on a machine with a GPU: make gpu, or one question: make gpu-right, gpu-loss, ...
# make test TESTS="-m slow" runs the slow tests.
# A fresh machine needs Python 3.11 or newer (PYTHON=python3.12 to choose one) and make; the rest is installed into .venv, about 6 GB.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# TORCH=cpu: without CUDA's libraries, which are most of it (also TORCH=cu126 and so on).
# CPU_WHEELS=ADDRESS: an index of your own with the CPU builds of torch and torchvision that constraints.txt pins.
TORCH ?=
CPU_WHEELS ?=
# Where the packages are there already (on PYTHONPATH, say) and nothing is to be installed: make gpu-loss INSTALLED= RUN=python3
INSTALLED := $(STAMP)
RUN := $(BIN)/python
CLIPSCALE := $(RUN) -m clipscale
# benchmarks/ are scripts; the package lies beside them.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

GPU := gpu-first gpu-changes gpu-second gpu-third gpu-right gpu-loss gpu-train gpu-compiled gpu-step gpu-memory gpu-data gpu-largest
MORE := gpu-loss-widths gpu-step-large gpu-memory-1m
.PHONY: demo test mutants oldest newest lint docs clean install wheels gpu gpu-more gpu-eight $(GPU) $(MORE)

demo: $(INSTALLED)
	$(CLIPSCALE) data demo
	$(CLIPSCALE) train experiment=demo run=demo
	$(CLIPSCALE) eval run=demo
	$(CLIPSCALE) report demo
	$(RUN) benchmarks/demo.py beside=runs/demo

# Three workers for two cores: many tests wait for processes and servers of their own.
# Compiled modules are kept, also where the environment says not to: the tests' many processes would each compile them.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(RUN) -m pytest -n 3 --dist worksteal $(TESTS)

# The same with the lowest versions that pyproject.toml allows, or the newest there are, each in an environment of its own (6 GB).
VERSIONS_oldest := --resolution=lowest-direct
VERSIONS_newest := --upgrade 'hydra-core>=1.4.0rc1' 'omegaconf>=2.4.0rc1'
oldest newest:
	$(PYTHON) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet --disable-pip-version-check uv
	.venv-$@/bin/uv pip install --quiet --python .venv-$@/bin/python $(VERSIONS_$@) --editable '.[dev,bench,sweeps]'
	$(MAKE) test VENV=.venv-$@ INSTALLED=

# Breaks the core in a hundred drawn places, one at a time, and says which breaks no test notices. MUTANTS='--seed 1' draws others.
mutants: $(INSTALLED)
	$(RUN) -m tests.mutants $(MUTANTS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# site/: needs no network, fails at a dead link.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# ---- what only a CUDA device can show: one target a question, each within ten minutes on one H100 or H200 (docs/benchmarks/README.md has the
# arithmetic, and an order). RESULTS=FOLDER is where a target leaves its records, at most eight files in folders of their own; each is whole
# after every measurement. If a line that starts with - fails, the lines after it still run.

RESULTS ?= docs/benchmarks/gpu
RUNS ?= runs
# Words that come after a benchmark's own and win, such as SMALLER_LOSS='device=cpu n=32'; SMALLER_RUN takes the place of a run's own settings.
# The tests run everything below on a CPU.
SMALLER_LOSS ?=
SMALLER_STEP ?=
SMALLER_DATA ?=
SMALLER_TRAIN ?=
SMALLER_RUN ?=
SMALLER_RANKS ?=
SMALLER_CHANGES ?=
# An interrupt, so that the processes that measure end too. WITHIN= for a slow machine: no command has a limit.
WITHIN ?= timeout --signal=INT --kill-after=20
# $(1): seconds.
within = $(if $(WITHIN),$(WITHIN) $(1))
CORES ?= $(shell nproc)

gpu: $(GPU)

gpu-more: $(MORE)

$(GPU) $(MORE): $(INSTALLED) | $(RESULTS)

$(RESULTS):
	mkdir -p $@

# Is it right: kernels, step, offload, fp16, whole runs.
JOBS := 8
GPU_TESTS := tests/test_gpu.py tests/loss/test_gpu.py tests/loss/triton/test_backend.py
gpu-right:
	-$(call within,30) $(CLIPSCALE) doctor > $(RESULTS)/right.txt
	$(call within,540) $(RUN) -m pytest -n $(JOBS) -rA --durations=20 $(GPU_TESTS) 2>&1 | tee -a $(RESULTS)/right.txt

# Is the loss fast, beside others: $(1): folder, $(2): seconds it may take.
loss = -$(call within,$(2)) $(RUN) benchmarks/loss.py device=cuda dtype=bf16 out=$(RESULTS)/$(1)
PEERS := infcl,open_clip,inf_cl,memeff,compile,siglip,siglip_kernel
gpu-loss:
	$(call loss,loss-64k,150) n=64k d=768 methods=$(PEERS) $(SMALLER_LOSS)
	$(call loss,loss-1m,100) n=1M d=768 repeats=2 methods=infcl $(SMALLER_LOSS)
	$(call loss,loss,330) n=16k,128k d=768 methods=$(PEERS) $(SMALLER_LOSS)

gpu-loss-widths:
	$(call loss,loss-widths,590) n=64k,256k d=512,1024 methods=$(PEERS) $(SMALLER_LOSS)

# Is training fast: whole runs from JPEGs of 256 pixels, and what plan predicts of them.
TRAINED := model=vit-b16 precision=bf16 batch=8k side=256 steps=12 repeats=1 methods=clipscale,clipscale-twice
gpu-train:
	$(call within,560) $(RUN) benchmarks/train.py device=cuda $(TRAINED) workers=$(CORES) out=$(RESULTS)/train $(SMALLER_TRAIN)

# Is the step fast: two models, plain and cached, with kept graphs, beside open_clip's (ViT-L/14: gpu-first). $(1): folder, $(2): seconds it may take.
step = -$(call within,$(2)) $(RUN) benchmarks/step.py device=cuda precision=bf16 out=$(RESULTS)/$(1)
# Whole batches of $(1), which fit 80 GB by calculation, and cached steps.
WAYS = plain@$(1),open_clip-plain@$(1),cache,keep-50G,open_clip
gpu-step:
	$(call step,vit-b16,240) model=vit-b16 chunk=256 batch=8k repeats=2 methods=$(call WAYS,768) $(SMALLER_STEP)
	$(call step,vit-b32,240) model=vit-b32 chunk=512 batch=32k repeats=2 methods=$(call WAYS,2k) $(SMALLER_STEP)

# Compiled towers. Each row compiles anew.
COMPILED = compiled,plain@$(1),compiled-plain@$(1),compiled-open_clip
gpu-compiled:
	$(call step,compiled-b16,290) model=vit-b16 chunk=256 batch=8k repeats=2 methods=$(call COMPILED,768) $(SMALLER_STEP)
	$(call step,compiled-b32,290) model=vit-b32 chunk=512 batch=16k repeats=2 methods=$(call COMPILED,2k) $(SMALLER_STEP)

# The first minutes of a GPU, and the next ones. First the default, a step as `clipscale train` takes it (through the cache, captions sorted, the
# image blocks compiled, the graphs kept; the whole batch is a chunk, as cache.chunk=auto takes it where it is the fastest), beside plain ones and
# open_clip's; then chunks of L/14, warm. docs/benchmarks/README.md has the arithmetic.
PAIRS_1K := model=vit-b16 batch=1k samples=12k
DEFAULT := repeats=3 profile=40 methods=compiled-keep,plain,compiled-plain,open_clip-plain
gpu-first:
	$(call step,first-b16,185) model=vit-b16 chunk=768 batch=768 $(DEFAULT) $(SMALLER_STEP)
	$(call step,first-l14,185) model=vit-l14 chunk=256 batch=256 $(DEFAULT) $(SMALLER_STEP)
	$(call step,first-l14-cached,200) model=vit-l14 chunk=128 batch=4k warm=4k repeats=2 profile=40 methods=compiled,cache $(SMALLER_STEP)

gpu-second:
	$(call demo,15)
	$(call run,b16-1k,60,$(PAIRS_1K))
	$(call run,b16-1k-keep,60,$(PAIRS_1K) cache.keep=64G)
	$(call step,first-compiled,150) model=vit-b16 chunk=256 batch=2k repeats=3 methods=compiled,compiled_text,cache $(SMALLER_STEP)
	$(call step,first-flat,105) model=vit-b32 chunk=512 repeats=1 methods=cache@32k,cache@128k $(SMALLER_STEP)

# What each change to the towers gains, and the loss's kernels apart.
gpu-changes:
	-$(call within,60) $(RUN) benchmarks/changes.py device=cuda precision=bf16 model=vit-b16 batch=768 out=$(RESULTS)/changes $(SMALLER_CHANGES)
	$(call loss,loss-kernels,45) n=64k d=768 repeats=3 profile=12 methods=infcl,siglip $(SMALLER_LOSS)

gpu-third:
	$(call step,first-h14,120) model=vit-h14 chunk=64 batch=128 repeats=2 profile=40 methods=plain,compiled-plain $(SMALLER_STEP)
	$(call demo,15)
	$(call run,b16-1k-compiled,90,$(PAIRS_1K) model.compile=true)

# A machine with several GPUs: do they compute what one does, after a kill too, and how much faster.
PROCS ?= 8
gpu-eight: $(INSTALLED) | $(RESULTS)
	$(call demo,20)
	$(call within,560) $(RUN) benchmarks/ranks.py gpus=$(PROCS) out=$(RESULTS)/ranks $(SMALLER_RANKS)

gpu-step-large:
	$(call step,vit-b32-large,590) model=vit-b32 chunk=512 batch=256k repeats=1 methods=plain@2k,cache,keep-50G,frozen,compiled $(SMALLER_STEP)

# Is memory flat in the batch, and is it as predicted: steps with few chunks of distinct pixels, then short runs beside what plan says.
SETTINGS := device=cuda precision=bf16 data=demo data.workers=$(CORES) eval.sets=[] eval.every=0
demo = $(call within,$(1)) $(CLIPSCALE) data demo
# $(1): name of the run, $(2): seconds it may take, $(3): its settings. `predicted`: and then, in 35 seconds, what plan says.
run = -{ rm -rf $(RUNS)/gpu-$(1) && $(call within,$(2)) $(CLIPSCALE) train run=$(RUNS)/gpu-$(1) $(or $(SMALLER_RUN),$(SETTINGS) $(3)); } \
    2>&1 | tee -a $(RESULTS)/memory-$(1).txt
predicted = $(call run,$(1),$(2),$(3)) && $(call within,35) \
    $(CLIPSCALE) plan $(if $(SMALLER_RUN),$(SMALLER_RUN) hardware=cpu,$(SETTINGS) $(3)) 2>&1 | tee -a $(RESULTS)/memory-$(1).txt
gpu-memory:
	$(call step,flat,150) model=vit-b32 chunk=512 repeats=1 methods=plain@2k,cache@32k,cache@128k $(SMALLER_STEP)
	$(call demo,20)
	$(call predicted,b32,70,model=vit-b32 batch=16k samples=48k cache.chunk=512)
	$(call predicted,b32-keep,70,model=vit-b32 batch=16k samples=48k cache.chunk=512 cache.keep=40G)
	$(call predicted,b32-device,70,model=vit-b32 batch=16k samples=48k cache.chunk=1k offload=none)
	$(call predicted,l14,70,model=vit-l14 batch=2k samples=6k cache.chunk=128)

gpu-memory-1m:
	$(call step,flat-1m,560) model=vit-b32 chunk=512 repeats=1 methods=cache@1M $(SMALLER_STEP)

# One whole step of the largest batch that plan predicts for an H200 with 128 GiB of host memory.
gpu-largest:
	$(call demo,20)
	$(call predicted,largest,540,model=vit-b32 cache.chunk=512 data.buffers=1 batch=704k samples=704k offload=host)

# Do the cores feed the model.
gpu-data:
	$(call within,560) $(RUN) benchmarks/data.py workers=$(CORES) batch=4k repeats=3 out=$(RESULTS)/data $(SMALLER_DATA)

# make wheels HAVE=FILE: what a machine with the packages of FILE (one name a line) lacks, as wheels, for one that reaches no registry. There:
# python3 -m pip install --no-index --no-deps --target SITE build/wheels/*.whl; PYTHONPATH=SITE make gpu-right INSTALLED= RUN=python3
PYTHON_VERSION ?= 3.12
WHEELS ?= build/wheels
PLATFORMS := $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64
PIP := -m pip --quiet --disable-pip-version-check
SOURCES := antlr4-python3-runtime
wheels:
	$(if $(HAVE),,$(error HAVE is not set; give HAVE=FILE, the names of the packages that the other machine has, one a line))
	rm -rf $(WHEELS)
	$(PYTHON) $(PIP) wheel --no-deps --constraint constraints.txt --wheel-dir $(WHEELS) $(SOURCES)
	$(PYTHON) $(PIP) download --no-deps --only-binary=:all: --python-version $(PYTHON_VERSION) --implementation cp $(PLATFORMS) \
	    --constraint constraints.txt --dest $(WHEELS) $$($(RUN) benchmarks/missing.py $(HAVE) | tr ' ' '\n' | grep -vx $(SOURCES))
	du -sh $(WHEELS)

install: $(INSTALLED)

# uv installs several times as fast as pip. It does not read pip's settings, such as a mirror's address: where it fails, pip installs.
QUIET_PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PACKAGES := --constraint constraints.txt --editable '.[dev,bench,sweeps]'
BY_UV = $(QUIET_PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(if $(TORCH),--torch-backend $(TORCH)) $(PACKAGES)
BY_PIP = $(QUIET_PIP) $(if $(CPU_WHEELS),--extra-index-url '$(CPU_WHEELS)') $(PACKAGES)

# Editable, with the versions that constraints.txt pins; done again when either file changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(if $(CPU_WHEELS),$(BY_PIP),$(BY_UV) $(if $(TORCH),,|| $(BY_PIP)))
	@touch $@

# Keeps runs/ and the demo set.
clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
