# The two commands: `make serve` and `make test`.  Each makes its environment first, if need be.
#
#   make serve                                the bundled demo checkpoint on 127.0.0.1:8000
#   make serve MODEL=path ARGS="--port 9000"  another checkpoint, any flag of the server
#   DEVICE=cuda make serve                    with vLLM's CUDA build
#
#   make test-versions                        the oldest and the newest vLLM, each in its environment
#   make soak                                 a server under load and faults and asked by other
#                                             projects' clients, for about twenty minutes
#   make bench-check                          is the overhead still the one on file?
#   make test-vllm-0.30.0                     one of those with a file requirements/vllm-VERSION.txt
#
#   make up MODEL=path                        the same in a container; `make down` ends it
#   make image PROFILE=gpu                    the image for CUDA instead of the one for CPU
#   make image-test                           lint docker/, build the CPU image and try it
#   make release                              wheel and sdist of the last commit in dist/, checked

SHELL := /bin/bash
VENV ?= .venv
DEMO := examples/demo/checkpoint
MODEL ?= $(DEMO)
# The demo starts eager: compiling takes longer than anyone wants to wait for a first answer.
DEMO_ARGS := $(if $(filter $(DEMO),$(MODEL)),--enforce-eager --served-model-name demo)
VERSIONS ?= 0.28.0 0.32.0
# A module's tests share engines, so each module runs in one of these processes.
TEST_PROCESSES ?= 2
PYTEST = -m pytest -n $(TEST_PROCESSES) --dist loadfile
export VENV
export VLLM_CPU_KVCACHE_SPACE ?= 1

VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' attnres_serve/__init__.py)
CONTAINER ?= $(shell for tool in docker podman; do $$tool info >/dev/null 2>&1 && echo $$tool && break; done)
COMPOSE ?= $(if $(filter podman,$(CONTAINER)),podman-compose,docker compose)
PROFILE ?= cpu
DOCKERFILE = docker/Dockerfile.$(if $(filter gpu,$(PROFILE)),cuda,$(PROFILE))

.PHONY: serve test test-all soak test-versions bench-check check setup setup-test clean
.PHONY: image image-test up down release

serve: setup
	exec $(VENV)/bin/attnres-serve serve "$(MODEL)" $(DEMO_ARGS) $(ARGS)

test: setup-test
	$(VENV)/bin/python $(PYTEST) -m "not exhaustive and not soak" $(ARGS_TEST)

test-all: setup-test
	$(VENV)/bin/python $(PYTEST) -m "not soak" $(ARGS_TEST)

soak: setup-test
	@requirements/setup.sh soak
	$(VENV)/bin/python -m pytest -m soak -s $(ARGS_TEST)

test-versions: $(addprefix test-vllm-,$(VERSIONS))

test-vllm-%:
	@DEVICE=cpu VLLM=$* VENV=$(VENV)-$* requirements/setup.sh test
	$(VENV)-$*/bin/python $(PYTEST) -m "versions or (not engine and not exhaustive)" $(ARGS_TEST)

bench-check: setup-test
	$(VENV)/bin/python -m benchmarks.regression $(ARGS)

check: setup-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python $(PYTEST) -q -m "not engine and not exhaustive"

setup:
	@requirements/setup.sh serve

setup-test: setup
	@requirements/setup.sh test

# podman's own format has no HEALTHCHECK; docker does not read the variable.
image:
	@[ -n "$(CONTAINER)" ] || { echo "image: no engine of docker or podman answers here." >&2; exit 1; }
	BUILDAH_FORMAT=docker $(CONTAINER) build -f $(DOCKERFILE) --build-arg VERSION=$(VERSION) \
	  --build-arg REVISION=$$(git describe --always --dirty --abbrev=40 --exclude='*') $(ARGS_BUILD) \
	  -t attnres-serve:$(VERSION)-$(PROFILE) -t attnres-serve:$(PROFILE) .

image-test: setup-test
	$(VENV)/bin/python -m pytest -q tests/test_containers.py
	docker/test.sh $(IMAGE)

up: image docker/api_key
	@[ -d "$(MODEL)" ] || { echo "up: there is no folder '$(MODEL)'; name one with MODEL=." >&2; exit 1; }
	MODEL="$(abspath $(MODEL))" ARGS="$(ARGS)" $(COMPOSE) -f docker/compose.yaml --profile $(PROFILE) up -d

down:
	$(COMPOSE) -f docker/compose.yaml --profile $(PROFILE) down

docker/api_key:
	head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > $@
	chmod 644 $@

release: setup-test
	@git diff --quiet HEAD || { echo "release: there are changes that are not committed." >&2; exit 1; }
	$(VENV)/bin/python requirements/release.py dist
	ATTNRES_DIST=dist $(VENV)/bin/python -m pytest -q tests/test_release.py

clean:
	rm -rf $(VENV) $(VENV)-0.* $(VENV)-soak build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
