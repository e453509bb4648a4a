# Set-up, demo and tests. `make` alone lists the targets; everything sets itself up first.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.PHONY: help setup demo test test-all test-harnesses bench-serve bench-sandbox bench-train harnesses lint
MAKEFLAGS += --no-print-directory

RUN ?= runs/demo
MODEL ?= $(shell .venv/bin/python recipes/get_model.py 2>/dev/null)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

setup: ## install what is missing: system packages, .venv, model, base image, harnesses
	@recipes/setup.sh

demo: setup ## the main job on this machine: rollout, grade, train, new weights, twice; RUN=runs/demo
	@loop="$(MAKE) -f recipes/demo.mk RUN=$(RUN) MODEL=$(MODEL)"; \
	if $$loop -q loop 2>/dev/null; then \
	    echo "$(RUN) is finished; ROUNDS=N goes on with it, RUN=runs/NAME starts another" >&2; \
	    exec $$loop; \
	fi; \
	exec setpriv --pdeathsig TERM bin/lego-serve --log $(RUN)/serve.log $(MODEL) -- $$loop

lint: setup ## ruff, mypy and the import rules
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports

# Most tests wait for containers and processes: two at a time, each file by one worker, whose fixtures are a module's.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: lint ## lint and the tests; at most 25 minutes on 2 cores
	@.venv/bin/pytest -m "not slow" $(TWO)

test-all: harnesses lint ## also the slow tests
	@.venv/bin/pytest $(TWO)

test-harnesses: harnesses ## install every harness, and run the tests that drive them
	@.venv/bin/pytest -m harness

harnesses: export LEGORL_HARNESSES = $(notdir $(basename $(filter-out %/command.toml,$(wildcard legorl/harnesses/*.toml))))
harnesses: setup

bench-serve: setup ## how fast lego-serve is, beside its own engine and vLLM's server; JSON (docs/benchmarks.md)
	@.venv/bin/python tests/bench/serve.py $(PARTS)

bench-train: setup ## how fast a training step is, beside TRL's and beside itself without trees; JSON (docs/benchmarks.md)
	@.venv/bin/python tests/bench/train.py $(PARTS)

bench-sandbox: setup ## how fast sandboxes and grading are, and what they leave behind; JSON (docs/benchmarks.md)
	@.venv/bin/python tests/bench/sandbox.py $(PARTS)
