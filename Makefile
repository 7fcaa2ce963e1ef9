# The two commands: `make serve` and `make test`.  Each makes its environment first, if need be.
#
#   make serve                                the bundled demo checkpoint on 127.0.0.1:8000
#   make serve MODEL=path ARGS="--port 9000"  another checkpoint, any flag of the server
#   DEVICE=cuda make serve                    with vLLM's CUDA build
#
#   make test-versions                        the oldest and the newest vLLM, each in its environment
#   make bench-check                          is the overhead still the one on file?
#   make test-vllm-0.30.0                     one of those with a file requirements/vllm-VERSION.txt

SHELL := /bin/bash
VENV ?= .venv
DEMO := examples/demo/checkpoint
MODEL ?= $(DEMO)
# The demo starts eager: compiling takes longer than anyone wants to wait for a first answer.
DEMO_ARGS := $(if $(filter $(DEMO),$(MODEL)),--enforce-eager --served-model-name demo)
VERSIONS ?= 0.28.0 0.32.0
export VENV
export VLLM_CPU_KVCACHE_SPACE ?= 1

.PHONY: serve test test-all test-versions bench-check check setup setup-test clean

serve: setup
	exec $(VENV)/bin/attnres-serve serve "$(MODEL)" $(DEMO_ARGS) $(ARGS)

test: setup-test
	$(VENV)/bin/python -m pytest -m "not exhaustive" $(ARGS_TEST)

test-all: setup-test
	$(VENV)/bin/python -m pytest $(ARGS_TEST)

test-versions: $(addprefix test-vllm-,$(VERSIONS))

test-vllm-%:
	@DEVICE=cpu VLLM=$* VENV=$(VENV)-$* requirements/setup.sh test
	$(VENV)-$*/bin/python -m pytest -m "versions or (not engine and not exhaustive)" $(ARGS_TEST)

bench-check: setup-test
	$(VENV)/bin/python -m benchmarks.regression $(ARGS)

check: setup-test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q -m "not engine and not exhaustive"

setup:
	@requirements/setup.sh serve

setup-test: setup
	@requirements/setup.sh test

clean:
	rm -rf $(VENV) $(VENV)-0.* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
