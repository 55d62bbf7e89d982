# `make` alone lists what can be done. Each target sets up what it needs, inside this folder.
PYTHON ?= python3
ARGS ?=
FLOOR_TESTS ?= tests/test_client.py tests/test_framing.py

VENV := .venv
BIN := $(VENV)/bin
PROTO := .venv-proto
FLOOR := .venv-floor

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-floor bench lint format proto proto-check clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.stamp ## Make .venv, with all that tests and examples need (PYTHON=... chooses)

demo: setup ## Run the demo on this machine
	$(BIN)/python docs/examples/demo.py $(ARGS)

test: setup ## Run the tests, in two processes (ARGS="-k push" chooses)
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-floor: $(FLOOR)/.stamp ## Run FLOOR_TESTS with the lowest versions that pyproject.toml admits
	$(FLOOR)/bin/python -m pytest $(FLOOR_TESTS) $(ARGS)

bench: setup ## Measure it beside yardsticks, some minutes (ARGS="--quick")
	$(BIN)/python -m benchmarks $(ARGS)

lint: setup ## Check style, format, types and the contract
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/buf lint protos

format: setup ## Rewrite the sources in the house format
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

proto: $(PROTO)/.stamp ## Rewrite the stubs in paramserver/v1 from protos/
	$(PROTO)/bin/python protos/generate.py

proto-check: $(PROTO)/.stamp ## Fail if the committed stubs differ from protos/
	$(PROTO)/bin/python protos/generate.py --check

clean: ## Remove caches and build outputs; .venv and ckpt stay
	rm -rf $(PROTO) $(FLOOR) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path './$(VENV)' -prune -o -name __pycache__ -prune -exec rm -rf {} +

# An environment is made again only when what it was made from has changed.
$(VENV)/.stamp: pyproject.toml requirements/dev.txt
	$(make-venv)
	$(@D)/bin/python -m pip install -q -c requirements/dev.txt -e '.[dev,examples]'
	@touch $@

$(PROTO)/.stamp: requirements/proto.txt
	$(make-venv)
	$(@D)/bin/python -m pip install -q -r requirements/proto.txt
	@touch $@

$(FLOOR)/.stamp: pyproject.toml requirements/floor.txt
	$(make-venv)
	$(@D)/bin/python -m pip install -q -c requirements/floor.txt -e . pytest pytest-timeout hypothesis
	@touch $@

define make-venv
@command -v $(PYTHON) >/dev/null || \
	{ echo 'Python 3.11 or newer is needed and $(PYTHON) is not there: make PYTHON=...' >&2; exit 1; }
@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else \
	"Python 3.11 or newer is needed and $(PYTHON) is %d.%d: make PYTHON=..." % v[:2])'
@echo 'setting up $(@D) (some minutes the first time)'
@$(PYTHON) -m venv $(@D)
endef
