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
MORE := gpu-loss-widths gpu-loss-types gpu-step-b32 gpu-step-b16 gpu-step-b16-large gpu-step-l14 gpu-largest-encoded gpu-tune
.PHONY: demo test lint clean install wheels gpu gpu-more $(GPU) $(MORE)

demo: $(INSTALLED)
	$(CLIPSCALE) data demo
	$(CLIPSCALE) train experiment=demo run=demo
	$(CLIPSCALE) eval run=demo
	$(CLIPSCALE) report run=demo

# Three workers for two cores: many tests wait for processes and servers of their own.
# Compiled modules are kept, also where the environment says not to: the tests' many processes would each compile them.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(INSTALLED)
	$(RUN) -m pytest -n 3 --dist worksteal $(TESTS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# ---- what only a CUDA device can show: one target a question, each within ten minutes on one H200 (docs/benchmarks/README.md has the
# arithmetic). Records are written measurement by measurement, and what they hold already is not measured again, so that a target that was
# cut off is taken up by calling it again. A line that starts with - may fail without those after it being left out. In each target, what
# matters most comes first.

RESULTS ?= docs/benchmarks/gpu
# An interrupt, so that the processes that measure end too, and what they have measured is shown.
WITHIN := timeout --signal=INT --kill-after=20
CORES ?= $(shell nproc)

gpu: $(GPU)

gpu-more: $(MORE)

$(GPU) $(MORE): $(INSTALLED) | $(RESULTS)

$(RESULTS):
	mkdir -p $@

# Is it right: kernels, step, offload, fp16, whole runs.
JOBS := 8
GPU_TESTS := tests/test_gpu.py tests/loss/test_gpu.py tests/loss/triton/test_gpu.py tests/loss/triton/test_backend.py tests/loss/triton/test_launches.py tests/loss/triton/test_gluon.py
gpu-right:
	$(RUN) -m clipscale.bench.record make $@ > $(RESULTS)/right.txt
	$(WITHIN) 540 $(RUN) -m pytest -n $(JOBS) -rA --durations=20 $(GPU_TESTS) 2>&1 | tee -a $(RESULTS)/right.txt

# Is the loss fast: by batch at D = 768, beside others; then its choices made otherwise. Other widths and types: more.
loss = -$(WITHIN) $(1) $(CLIPSCALE) bench loss device=cuda resume=true out=$(RESULTS)
TILES := $(patsubst %,triton-tiles-%,128x128x64-4w-3s 128x128x64-8w-4s 128x256x64-8w-3s 256x128x64-8w-3s)
PANELS := $(patsubst %,triton-panel-%,64M 256M 2G 8G)
comma := ,
listed = $(subst $(eval ) ,$(comma),$(strip $(1)))
PEERS := infcl,open_clip,inf_cl,memeff,compile,siglip,siglip_kernel
gpu-loss:
	$(call loss,100) n=64k d=768 dtype=bf16 methods=$(PEERS)
	$(call loss,130) n=1M d=768 dtype=bf16 repeats=2 methods=infcl
	$(call loss,220) n=8k,16k,32k,128k,256k,512k d=768 dtype=bf16 methods=$(PEERS)
	$(call loss,140) n=64k d=768 dtype=bf16 methods=triton,gluon,$(call listed,$(PANELS) $(TILES))

gpu-loss-widths:
	$(call loss,110) n=64k d=512,1024 dtype=bf16 methods=$(PEERS)
	$(call loss,190) n=1M d=512,1024 dtype=bf16 repeats=2 methods=infcl
	$(call loss,290) n=8k,16k,32k,128k,256k,512k d=512,1024 dtype=bf16 methods=$(PEERS)

gpu-loss-types:
	$(call loss,170) n=64k d=768,512,1024 dtype=fp16,tf32 methods=$(PEERS)
	$(call loss,420) n=8k,256k d=768,512,1024 dtype=fp16,tf32 methods=$(PEERS)

# Which tiles are best, forward and backward: for the table in clipscale/loss/triton/tuning.py.
gpu-tune:
	-$(WITHIN) 540 $(CLIPSCALE) bench loss device=cuda resume=true out=$(RESULTS)/tune \
	    n=32k d=768 dtype=bf16 methods=triton,triton-tiles

# Is the step fast: three models, plain and cached, with kept graphs, compiled, beside open_clip's. The rest of each model: more.
step = -$(WITHIN) $(1) $(CLIPSCALE) bench step device=cuda precision=bf16 memory= resume=true
B32 := out=$(RESULTS)/vit-b32 model=vit-b32 chunk=512
B16 := out=$(RESULTS)/vit-b16 model=vit-b16 chunk=256
L14 := out=$(RESULTS)/vit-l14 model=vit-l14 chunk=128
MAIN := plain@max open_clip-plain@max cache keep-80G open_clip compiled-plain@max compiled compiled-open_clip compiled-open_clip-plain@max
REST := plain@max frozen-plain@max compiled-plain@max frozen keep-40G
# The variants at the batches $(1), with what they are compared with.
at = $(call listed,plain@max frozen-plain@max compiled-plain@max $(foreach way,$(2),$(foreach batch,$(1),$(way)@$(batch))))
gpu-step:
	$(call step,200) $(L14) batch=8k repeats=3 methods=$(call listed,$(MAIN))
	$(call step,200) $(B16) batch=32k repeats=3 methods=$(call listed,$(MAIN))
	$(call step,190) $(B32) batch=32k repeats=3 methods=$(call listed,$(MAIN))

gpu-step-b32:
	$(call step,150) $(B32) batch=32k repeats=3 methods=$(call listed,$(REST))
	$(call step,220) $(B32) batch=32k repeats=1 methods=$(call at,64k 128k,cache keep-80G keep-40G frozen compiled open_clip)
	$(call step,220) $(B32) batch=32k repeats=1 methods=$(call at,256k,cache keep-80G frozen compiled)

gpu-step-b16:
	$(call step,140) $(B16) batch=32k repeats=2 methods=$(call listed,$(REST))
	$(call step,260) $(B16) batch=32k repeats=1 methods=$(call at,64k,cache keep-80G keep-40G frozen compiled open_clip)
	$(call step,190) $(B16) batch=32k repeats=1 methods=$(call at,128k,cache keep-80G)

gpu-step-b16-large:
	$(call step,295) $(B16) batch=32k repeats=1 methods=$(call at,256k,cache keep-80G)
	$(call step,295) $(B16) batch=32k repeats=1 methods=$(call at,128k,frozen compiled open_clip)

gpu-step-l14:
	$(call step,190) $(L14) batch=8k repeats=2 methods=$(call listed,$(REST))
	$(call step,400) $(L14) batch=8k repeats=1 methods=$(call at,32k,cache keep-80G compiled keep-40G frozen open_clip)

# Is memory flat in the batch, and is it as predicted: steps with few chunks of distinct pixels, then short runs beside what plan says.
SETTINGS := device=cuda precision=bf16 data=demo data.workers=$(CORES) eval.sets=[] eval.every=0 log.progress=false
# $(1): name of the run, $(2): seconds it may take, $(3): its settings.
predicted = -{ rm -rf runs/gpu-$(1) && $(WITHIN) $(2) $(CLIPSCALE) train run=runs/gpu-$(1) $(SETTINGS) $(3) && \
	    $(CLIPSCALE) plan run=runs/gpu-$(1); } 2>&1 | tee -a $(RESULTS)/memory.txt
gpu-memory:
	$(RUN) -m clipscale.bench.record make $@ >> $(RESULTS)/memory.txt
	$(call step,300) out=$(RESULTS)/flat model=vit-b32 chunk=512 batch=32k repeats=1 methods=plain@max,cache@32k,cache@128k,cache@1M
	$(CLIPSCALE) data demo
	$(call predicted,b32,70,model=vit-b32 batch=16k samples=48k cache.chunk=512)
	$(call predicted,b32-keep,70,model=vit-b32 batch=16k samples=48k cache.chunk=512 cache.keep=40G)
	$(call predicted,b32-device,70,model=vit-b32 batch=16k samples=48k cache.chunk=1k offload=none)
	$(call predicted,l14,70,model=vit-l14 batch=2k samples=6k cache.chunk=128)

# One whole step of the largest batch that plan predicts for an H200 with 128 GiB of host memory: raw pixels there; and encoded pictures, where
# time is the bound.
LARGEST := model=vit-b32 cache.chunk=512 data.buffers=1
gpu-largest:
	$(RUN) -m clipscale.bench.record make $@ >> $(RESULTS)/memory.txt
	$(CLIPSCALE) data demo
	$(call predicted,largest,560,$(LARGEST) batch=704k samples=704k offload=host)

gpu-largest-encoded:
	$(RUN) -m clipscale.bench.record make $@ >> $(RESULTS)/memory.txt
	$(CLIPSCALE) data demo
	$(call predicted,largest-encoded,560,$(LARGEST) batch=1M samples=1M offload=encoded)

# Do the cores, or the device's decoder, feed the model.
gpu-data:
	$(WITHIN) 560 $(CLIPSCALE) bench data workers=$(CORES) batch=4k repeats=3 resume=true out=$(RESULTS)

# What an image with PyTorch, torchvision, timm, matplotlib and pytest lacks, as wheels for a machine that reaches no registry. There:
# python3 -m pip install --no-index --no-deps --target SITE build/wheels/*.whl; PYTHONPATH=SITE make gpu-right INSTALLED= RUN=python3
PYTHON_VERSION ?= 3.12
WHEELS ?= build/wheels
LACKING := braceexpand ftfy hydra-core inf-cl memeff omegaconf open-clip-torch platformdirs siglip-kernel simplejpeg wcwidth webdataset
PLATFORMS := $(foreach n,28 27 24 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 --platform manylinux1_x86_64
PIP := -m pip --quiet --disable-pip-version-check
wheels:
	rm -rf $(WHEELS)
	$(PYTHON) $(PIP) wheel --no-deps --constraint constraints.txt --wheel-dir $(WHEELS) antlr4-python3-runtime
	$(PYTHON) $(PIP) download --no-deps --only-binary=:all: --python-version $(PYTHON_VERSION) --implementation cp $(PLATFORMS) \
	    --constraint constraints.txt --dest $(WHEELS) $(LACKING)
	du -sh $(WHEELS)

install: $(INSTALLED)

# Editable, with the versions that constraints.txt pins; done again when either file changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

# Keeps runs/ and the demo set.
clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
