# Needs python3 (3.11 or newer), make and a package registry; everything else goes into .venv, but
# for Chromium, which `make test` drives (and installs where it runs as root).

.PHONY: bench check chromium docs help pytest serve test test-slow test-threats
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
# More than cores: many tests wait for servers that they start. Files are taken in the order of
# tests/conftest.py.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# The first interpreter that is new enough; PYTHON=... chooses another.
PYTHON ?= $(firstword $(foreach name,python3 python3.12 python3.11 python3.13 python3.14,\
  $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

# Pins go by the interpreter inside .venv: jax 0.10.2 is the last for 3.11; newer ones share a file.
PINS = constraints/$(shell $(BIN)/python -c \
  'import sys; print("py311.txt" if sys.version_info < (3, 12) else "py312.txt")')
INPUTS := pyproject.toml $(wildcard constraints/*.txt mmjax/layers/cpu/kernels/*.cc mmjax/layers/cpu/kernels/*.h)
# pip compiles modules one by one: they are compiled behind it, on all cores, but for tests and for
# much that few import (a third of all), which whoever imports it compiles. Some packages have
# files of other versions of Python, hence `true`.
INSTALL = $(BIN)/python -m pip install -qq --no-compile --constraint $(PINS) --editable
COMPILE = $(BIN)/python -m compileall -qq -j 0 -x '/tests?/|/testing/|/_vendor(ed)?/|/transformers/models/|/torch/_inductor/' $(VENV)/lib || true
# Compiled with JAX's headers, by the one core that pip leaves idle; a machine without a compiler
# serves without them.
INSTALL_JAX = $(BIN)/python -m pip install -qq --no-compile --constraint $(PINS) blake3 jax
BUILD_KERNELS = $(BIN)/python -m mmjax.layers.cpu.build || true

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve ## answer questions about pictures on http://127.0.0.1:8000 (MODEL=, PORT=, ARGS=)
	@$(BIN)/python -m mmjax.serve $(MODEL) --port $(PORT) $(ARGS)

test: lint pytest ## run everything that CI runs

pytest: chromium $(VENV)/.dev ## run the tests alone
	@$(PYTEST) -m "not slow and not hub"

test-slow: chromium lint $(VENV)/.ray $(VENV)/.docs ## the same with full counts
	@$(PYTEST) -m "not hub" --timeout 3600 --hypothesis-profile random

# The variable reaches the workers too, and all that the tests start; `-O` reaches neither.
test-threats: $(VENV)/.dev ## the tests of threats at full counts, and again without asserts
	@$(PYTEST) tests/threats --timeout 3600
	@PYTHONOPTIMIZE=1 $(PYTEST) tests/threats --timeout 3600 \
	  -k "not nothing_is_protected_by_an_assert" -W "ignore:assertions not in test modules"

check: lint ## format, lint, types, contracts and the tests that take seconds
	@$(PYTEST) -m "not slow and not hub" tests/test_house.py tests/processing tests/cache tests/layers

bench: $(VENV)/.dev ## measure the embedded default on this machine
	@$(BIN)/python -m benchmarks.offline

docs: $(VENV)/.docs ## build the documentation into build/site, its tables and links checked
	@$(BIN)/python docs/make_configuration.py
	@$(BIN)/python docs/make_from_vllm.py
	@$(BIN)/python docs/check_links.py
	@$(BIN)/python docs/make_site.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict -f docs/mkdocs.yml

chromium:
	@.ci/chromium

.PHONY: lint
lint: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/ruff check --quiet
	@$(BIN)/pyrefly check --summary=none
	@$(BIN)/lint-imports --no-cache --no-logo

# The newest pip: that of Python 3.11 takes three times as long to find what is to be installed.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "mmjax needs Python 3.11 or newer, and found none as python3," \
	  "python3.12 or python3.11; install one, or say PYTHON=/path/to/python" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile --upgrade pip || true

# Each stamp says that its extras stand in .venv as pyproject.toml and the pins now ask.
$(VENV)/.serve: $(INPUTS) | $(BIN)/python
	@echo "installing mmjax and what serving needs into $(VENV)"
	@$(INSTALL_JAX)
	@$(BUILD_KERNELS) & $(INSTALL) '.[serve]'; wait
	@$(COMPILE)
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	@echo "installing mmjax and what its tests need into $(VENV)"
	@$(INSTALL_JAX)
	@$(BUILD_KERNELS) & $(INSTALL) '.[serve,dev]'; wait
	@$(COMPILE)
	@touch $@ $(VENV)/.serve

$(VENV)/.ray: $(VENV)/.dev
	@echo "installing Ray, which the tests of a deployment need, into $(VENV)"
	@$(INSTALL) '.[serve,dev,ray]'
	@$(COMPILE)
	@touch $@

# With what tests need, so that a new machine installs both at once.
$(VENV)/.docs: $(INPUTS) | $(BIN)/python
	@echo "installing mmjax, what its tests need, and mkdocs, which makes a site, into $(VENV)"
	@$(INSTALL_JAX)
	@$(BUILD_KERNELS) & $(INSTALL) '.[serve,dev,docs]'; wait
	@$(COMPILE)
	@touch $@ $(VENV)/.dev $(VENV)/.serve
