# make demo | make test | make lint | make clean; on a machine with a GPU: make gpu, or one question: make gpu-right, gpu-loss, ...
# TESTS="-m slow" with make test runs the long ones.
# A fresh machine needs Python 3.11 or newer (PYTHON=python3.12 to choose one) and make; the rest is installed into .venv, about 6 GB.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where the packages are there already (on PYTHONPATH, say) and nothing is to be installed: make gpu-loss INSTALLED= RUN=python3
INSTALLED := $(STAMP)
RUN := $(BIN)/python
CLIPSCALE := $(RUN) -m clipscale
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

GPU := gpu-right gpu-loss gpu-step gpu-memory gpu-largest gpu-data
.PHONY: demo test lint clean install gpu gpu-tune $(GPU)

demo: $(INSTALLED)
	$(CLIPSCALE) data demo
	$(CLIPSCALE) train experiment=demo run=demo
	$(CLIPSCALE) eval run=demo
	$(CLIPSCALE) report run=demo

test: $(INSTALLED)
	$(RUN) -m pytest -n 2 $(TESTS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# ---- what only a CUDA device can show: one target a question, each within ten minutes on one H200 (docs/benchmarks/README.md has the
# arithmetic). Records are written measurement by measurement, and what they hold already is not measured again, so that a target that was
# cut off is taken up by calling it again. A line that starts with - may fail without those after it being left out.

RESULTS := docs/benchmarks/gpu
# An interrupt, so that the processes that measure end too.
WITHIN := timeout --signal=INT --kill-after=20

gpu: $(GPU)

$(GPU) gpu-tune: $(INSTALLED) | $(RESULTS)

$(RESULTS):
	mkdir -p $@

# Is it right: kernels, step, offload, fp16, whole runs.
JOBS := 8
GPU_TESTS := tests/test_gpu.py tests/loss/test_gpu.py tests/loss/test_triton_gpu.py tests/loss/test_triton_block.py tests/data/test_device.py
gpu-right:
	$(WITHIN) 540 $(RUN) -m pytest -n $(JOBS) -rA --durations=20 $(GPU_TESTS) 2>&1 | tee $(RESULTS)/right.txt

# Is the loss fast: by batch, width and type, beside others; then where its time goes, and its choices made otherwise.
loss = -$(WITHIN) $$(($(1) + 60)) $(CLIPSCALE) bench loss device=cuda resume=true out=$(RESULTS) seconds=$(1)
TILES := $(patsubst %,triton-tiles-%,128x128x64-4w-3s 128x128x64-8w-4s 128x256x64-8w-3s 256x128x64-8w-3s)
PANELS := $(patsubst %,triton-panel-%,64M 256M 2G 8G)
comma := ,
listed = $(subst $(eval ) ,$(comma),$(strip $(1)))
gpu-loss:
	$(call loss,90) n=8k,32k,64k d=768 dtype=bf16 methods=infcl,open_clip,inf_cl,compile
	$(call loss,130) n=128k,256k,1M d=768 dtype=bf16 methods=infcl,open_clip,inf_cl
	$(call loss,110) n=64k,256k,1M d=512,1024 dtype=bf16 methods=infcl,inf_cl
	$(call loss,60) n=64k,256k d=768 dtype=fp16,tf32 methods=infcl,inf_cl
	$(call loss,110) n=64k d=768 dtype=bf16 profile=true methods=triton,$(call listed,$(PANELS) $(TILES))

# Which tiles are best, kernel by kernel: for the table in clipscale/loss/triton_config.py.
gpu-tune:
	$(WITHIN) 560 $(RUN) -m clipscale.loss.triton_tune --rows 32768 --width 768 --dtype bfloat16 --seconds 480 \
	    --kernels lse 'softmax gradient' | tee $(RESULTS)/tune.txt

# Is the step fast: plain, cached, with kept graphs, frozen, compiled, beside open_clip's.
step = -$(WITHIN) $$(($(1) + 60)) $(CLIPSCALE) bench step device=cuda precision=bf16 memory= resume=true seconds=$(1)
PLAIN := plain@max open_clip-plain@max frozen-plain@max
CACHED := cache keep-80G frozen open_clip
gpu-step:
	$(call step,170) out=$(RESULTS)/vit-b32 model=vit-b32 chunk=512 batch=32k repeats=3 \
	    methods=$(call listed,$(PLAIN) $(CACHED) keep-40G compiled-plain@max compiled cache@256k)
	$(call step,150) out=$(RESULTS)/vit-b16 model=vit-b16 chunk=256 batch=32k repeats=3 \
	    methods=$(call listed,$(PLAIN) $(CACHED) compiled-plain@max)
	$(call step,200) out=$(RESULTS)/vit-l14 model=vit-l14 chunk=128 batch=8k repeats=3 \
	    methods=$(call listed,$(PLAIN) $(CACHED) compiled-plain@max cache@32k)

# Is memory flat in the batch, and is it as predicted: steps with few chunks of distinct pixels, then short runs beside what plan says.
TRAIN := $(CLIPSCALE) train device=cuda precision=bf16 data=demo eval.sets=[] eval.every=0 log.progress=false
PREDICTED := $(RESULTS)/predicted.jsonl
# $(1): name of the run, $(2): seconds it may take, $(3): its settings. A run that is in the record already is not run again.
define predicted
	-grep -qs '"runs/gpu-$(1)"' $(PREDICTED) || { rm -rf runs/gpu-$(1); \
	    $(WITHIN) $(2) $(TRAIN) run=runs/gpu-$(1) $(3) && tail -n 3 runs/gpu-$(1)/metrics.jsonl >> $(RESULTS)/runs.jsonl && \
	    $(CLIPSCALE) plan run=runs/gpu-$(1) json=true | $(RUN) -m json.tool --compact >> $(PREDICTED); }
endef
gpu-memory:
	$(call step,250) out=$(RESULTS)/flat model=vit-b32 chunk=512 batch=32k repeats=1 methods=plain@max,cache@32k,cache@128k,cache@1M
	$(CLIPSCALE) data demo
	$(call predicted,b32,60,model=vit-b32 batch=16k samples=48k cache.chunk=512)
	$(call predicted,b32-keep,60,model=vit-b32 batch=16k samples=48k cache.chunk=512 cache.keep=40G)
	$(call predicted,b32-device,60,model=vit-b32 batch=16k samples=48k cache.chunk=1k offload=none)
	$(call predicted,l14,60,model=vit-l14 batch=2k samples=6k cache.chunk=128)

# The largest batch of one GPU and a host of 128 GiB, one whole step of it: raw pixels in host memory, then encoded pictures.
LARGEST := 704k
LARGEST_ENCODED := 1M
gpu-largest:
	$(CLIPSCALE) data demo
	$(call predicted,largest,280,model=vit-b32 batch=$(LARGEST) samples=$(LARGEST) cache.chunk=512 data.buffers=1 offload=host)
	$(call predicted,largest-encoded,280,model=vit-b32 batch=$(LARGEST_ENCODED) samples=$(LARGEST_ENCODED) cache.chunk=512 offload=encoded)

# Do the cores, or the device's decoder, feed the model.
gpu-data:
	$(WITHIN) 560 $(CLIPSCALE) bench data workers=$(shell nproc) batch=4k repeats=3 out=$(RESULTS)

install: $(INSTALLED)

# Editable, with the versions that constraints.txt pins; done again when either file changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Keeps runs/ and the demo set.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
