# Environments are made first, if need be.  A comment behind ## is what bare `make` shows.

SHELL := /bin/bash
VENV ?= .venv
DEMO := examples/demo/checkpoint
MODEL ?= $(DEMO)
# The demo starts eager: compiling takes longer than anyone wants to wait for a first answer.
DEMO_ARGS := $(if $(filter $(DEMO),$(MODEL)),--enforce-eager --served-model-name demo)
VERSIONS ?= 0.28.0 0.32.0
# One that has no wheel for CPU is only read.
UNTESTED ?= 0.33.0
# A module's tests share engines, so each module runs in one of these processes.  Three keep two cores
# busy, as tests wait for servers; tests without an engine have one for each core.
TEST_PROCESSES ?= 3
PYTEST = -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=20
export VENV
# Tests start hundreds of processes, which would each compile our modules.
unexport PYTHONDONTWRITEBYTECODE
# Tests and measurements start several engines at once.  `serve` takes what the model needs.
ifeq (,$(filter serve,$(MAKECMDGOALS)))
export VLLM_CPU_KVCACHE_SPACE ?= 1
endif

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' attnres_serve/__init__.py)
CONTAINER ?= $(shell for tool in docker podman; do $$tool info >/dev/null 2>&1 && echo $$tool && break; done)
COMPOSE ?= $(if $(filter podman,$(CONTAINER)),podman-compose,docker compose)
PROFILE ?= cpu
# As `serve` outside of a container names it.
MODEL_NAME ?= $(if $(filter $(DEMO),$(MODEL)),demo,$(notdir $(abspath $(MODEL))))
DOCKERFILE = docker/Dockerfile.$(if $(filter gpu,$(PROFILE)),cuda,$(PROFILE))

.DEFAULT_GOAL := help
.PHONY: help serve test test-families test-all test-as-users soak mutants test-versions check-vllm bench-check check setup setup-test clean
.PHONY: image image-test up down release

help:
	@echo 'Targets; each makes its environment first, if need be.'
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { print "\n" substr($$0, 5) } \
	  /^[a-z%-]+:.*## / { sub("%", "VERSION", $$1); printf "  make %-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: MODEL=path, ARGS="--port 9000" (flags of the server), DEVICE=cuda (vLLM for CUDA).'
	@echo 'The command itself, after a first `make serve` or `make setup`: $(VENV)/bin/attnres-serve --help'

##@ Serve
serve: setup ## serve MODEL on 127.0.0.1:8000; without one, the bundled demo
	@echo "Other commands, in another terminal: $(VENV)/bin/attnres-serve check $(MODEL)"
	@echo "All of them: $(VENV)/bin/attnres-serve --help"
	exec $(VENV)/bin/attnres-serve serve "$(MODEL)" $(DEMO_ARGS) $(ARGS)

##@ Develop
test: setup-test ## all tests but the slowest
	$(VENV)/bin/python $(PYTEST) -m "not exhaustive and not families and not soak" $(ARGS_TEST)

test-families: setup-test ## every family of backbones
	$(VENV)/bin/python $(PYTEST) -m "families and not exhaustive" $(ARGS_TEST)

test-all: setup-test ## every combination
	$(VENV)/bin/python $(PYTEST) -m "not soak" $(ARGS_TEST)
	@echo "Before a release, also: make test-as-users"

# One at a time: vLLM binds engines that run side by side to the same cores.
test-as-users: export TEST_AS_USERS = 1
test-as-users: TEST_PROCESSES = 1
test-as-users: setup-test ## the engine tests of `make test`, each process as a user starts it
	$(VENV)/bin/python $(PYTEST) -m "engine and not exhaustive and not families and not soak" $(ARGS_TEST)

soak: setup-test ## a server under load, faults and other projects' clients, about twenty minutes
	@requirements/setup.sh soak
	$(VENV)/bin/python -m pytest -m soak -s $(ARGS_TEST)

mutants: setup-test ## plant faults, one at a time: which do the tests catch?  tests/mutants/README.md
	$(VENV)/bin/python -m tests.mutants $(ARGS_TEST)

test-versions: $(addprefix test-vllm-,$(VERSIONS)) ## the oldest and the newest vLLM, each in its environment
	$(MAKE) check-vllm VERSION=$(UNTESTED)

test-vllm-%: ## one that has a file requirements/vllm-VERSION.txt
	@DEVICE=cpu VLLM=$* VENV=$(VENV)-$* requirements/setup.sh test
	$(VENV)-$*/bin/python $(PYTEST) -m "versions or (not engine and not exhaustive)" $(ARGS_TEST)
	$(VENV)-$*/bin/python -m tests.compat.faults

check-vllm: setup-test ## has vLLM VERSION=0.33.0 what our source asks of it?  Fetches and reads its wheel
	@[ "$(origin VERSION)" = "command line" ] || { echo "check-vllm: name one with VERSION=." >&2; exit 1; }
	$(VENV)/bin/python requirements/check_vllm $(VERSION)

bench-check: setup-test ## is the overhead still the one on file?
	$(VENV)/bin/python -m benchmarks.serving.regression $(ARGS)

check: TEST_PROCESSES = logical
check: setup-test ## linters, types and the tests without an engine, a few minutes
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python $(PYTEST) -q -m "not engine and not exhaustive and not families and not soak"

setup: ## make or renew the environment, and no more
	@requirements/setup.sh serve

setup-test: setup
	@requirements/setup.sh test

##@ Containers and releases
# podman's own format has no HEALTHCHECK; docker does not read the variable.
image: ## build the image for CPU; PROFILE=gpu for CUDA
	@[ -n "$(CONTAINER)" ] || { echo "image: no engine of docker or podman answers here." >&2; exit 1; }
	BUILDAH_FORMAT=docker $(CONTAINER) build -f $(DOCKERFILE) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude='*') $(ARGS_BUILD) \
	  -t attnres-serve:$(VERSION)-$(PROFILE) -t attnres-serve:$(PROFILE) .

# A tag moves; a digest does not.
.PHONY: image-release
image-release: ## the image on BASE_IMAGE=NAME@sha256:DIGEST
	@grep -Eq '^[^@]+@sha256:[0-9a-f]{64}$$' <<<"$(BASE_IMAGE)" || { echo "image-release: BASE_IMAGE is" \
	  "'$(BASE_IMAGE)'; expected NAME@sha256: and 64 hexadecimal digits (docker/README.md)." >&2; exit 1; }
	$(MAKE) image ARGS_BUILD="--build-arg BASE_IMAGE=$(BASE_IMAGE) $(ARGS_BUILD)"

image-test: setup-test ## lint docker/, build the image for CPU and try it
	$(VENV)/bin/python -m pytest -q tests/project/test_containers.py tests/project/test_deploy.py
	docker/test.sh $(IMAGE)

up: has-profiles image docker/api_key ## serve MODEL in a container
	@[ -d "$(MODEL)" ] || { echo "up: there is no folder '$(MODEL)'; name one with MODEL=." >&2; exit 1; }
	MODEL="$(abspath $(MODEL))" MODEL_NAME="$(MODEL_NAME)" ARGS="$(ARGS)" \
	  $(COMPOSE) -f docker/compose.yaml --profile $(PROFILE) up -d
	@echo "It serves $(MODEL_NAME). Its first start compiles, about two minutes; later ones take less than one."

down: has-profiles ## end it
	$(COMPOSE) -f docker/compose.yaml --profile $(PROFILE) down

# Before anything is built.  Without an engine, `image` says so.
has-profiles:
	@[ -z "$(CONTAINER)" ] || $(COMPOSE) --help 2>/dev/null | grep -qe --profile || { echo "$(COMPOSE) is" \
	  "missing or has no --profile; install docker compose 2, or podman-compose 1.1 or later." >&2; exit 1; }

docker/api_key:
	head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > $@
	chmod 644 $@

release: setup-test ## wheel and sdist of the last commit in dist/, checked
	@git diff --quiet HEAD || { echo "release: there are changes that are not committed." >&2; exit 1; }
	$(VENV)/bin/python requirements/release.py dist
	$(VENV)/bin/python requirements/sbom.py dist
	RELEASE_DIST=dist $(VENV)/bin/python -m pytest -q tests/project/test_release.py

clean: ## remove environments and builds
	rm -rf $(VENV) $(VENV)-0.* $(VENV)-soak build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
