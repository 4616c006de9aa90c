# `make` lists the targets. The environment lives in .venv and is built when it is needed.
#
#   PYTHON=...   the interpreter to build .venv with (3.11 or newer)
#
# pip's own settings are honoured, so PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can point it at a
# CPU build of torch.

# With compiled modules, which some environments do not write, every process of the tests starts sooner.
unexport PYTHONDONTWRITEBYTECODE

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

ifndef PYTHON
PYTHON := $(shell if python3.11 -c '' 2>/dev/null; then echo python3.11; else echo python3; fi)
endif

FUZZ_SECONDS ?= 600
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

# The stamp holds the directory it was made in: an environment that was moved or copied, or whose
# interpreter no longer starts, is built anew, as is one older than what it was installed from.
USABLE := $(shell test "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -c '' 2>/dev/null && echo yes)

.PHONY: help venv demo federation quick test test-slow check site tutorial fuzz chaos bench clean rebuild

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-13s %s\n", $$1, $$2 }'

venv: $(STAMP) ## build or refresh .venv (the other targets do so themselves)

demo: $(STAMP) ## what 60 clients with few rows gain by learning together, on digits, into runs/demo
	rm -rf runs/demo
	$(BIN)/descant compare experiments/demo.toml --jobs 2 --out runs/demo
	@$(BIN)/python -c 'import descant; print(descant.report("runs/demo").gained)'

federation: $(STAMP) ## a server and four hospitals as real processes over TLS, into runs/federation
	rm -rf runs/federation
	$(BIN)/python examples/federation/run.py runs/federation

quick test test-slow: export OMP_NUM_THREADS = 1

quick: $(STAMP) ## run one case of every test that takes less than a third of a second, in a minute
	$(BIN)/python -m pytest -n 2 --dist worksteal --first

test: $(STAMP) ## run all but the slow tests, two at a time
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP) ## run the tests that start real processes, install the package, or take seconds
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not alone"
	@# these wait more than they work; those that take minutes first, not those of the longest file
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow and alone"

check: $(STAMP) ## lint (ruff), check the types (mypy) and the layers of the package (import-linter)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

site: $(STAMP) ## build the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tutorial: $(STAMP) ## execute the notebooks of the tutorial and keep their output
	OMP_NUM_THREADS=1 $(BIN)/python docs/execute.py

fuzz: $(STAMP) ## try hostile and damaged files and messages, for ten minutes (FUZZ_SECONDS=60)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz --seconds $(FUZZ_SECONDS)

chaos: $(STAMP) ## a federation under kills, stops, a bad network, a full disk, wrong clocks and a liar (CHAOS="--seed 5")
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.chaos $(CHAOS)

bench: $(STAMP) ## measure the speed, into runs/bench (BENCH="--quick": in under a minute)
	$(BIN)/python -m benchmarks.bench $(BENCH)

clean: ## remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(if $(USABLE),,rebuild)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "descant needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo 'not there')." >&2; \
	    echo "Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "installing into $(VENV); this may take some minutes"
	@rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@echo "$(CURDIR)" > $@.part
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@# pip would compile on one core, and others' tests too; what no Python can compile, nobody imports
	$(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true
	@mv $@.part $@ # last, and as old as the start: what changed during the install counts as newer
