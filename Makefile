# The commands of the project. `make demo` is the place to begin; `make help` lists them.

PYTHON ?= $(firstword $(foreach p,python3.13 python3.12 python3.11 python3,$(if $(shell command -v $(p) 2>/dev/null),$(p))) python3)
PROFILE ?= demo
PORT ?= 3000
WORKERS ?= 2
PY := .venv/bin/python
RQWEN3 := $(PY) -m rqwen3_pipeline.cli

.DEFAULT_GOAL := help
.PHONY: help install demo ui check test test-all clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install:  ## make .venv with everything the demo needs
	@$(PYTHON) bootstrap.py training evaluation

develop:  ## make .venv with everything the checks and tests need
	@$(PYTHON) bootstrap.py development

ifdef SAMPLES
demo: export RQWEN3_SOURCES := $(SAMPLES)
demo: export RQWEN3_TOKENIZER := $(TOKENIZER)
demo: PROFILE := samples
endif
demo: install  ## the whole pipeline, small: SAMPLES=DIR [TOKENIZER=FILE] runs it on parquet files of your own
	@$(RQWEN3) --profile "$(PROFILE)" --workers $(WORKERS) run

ui: install  ## the web UI and the daemon on what the demo made: PROFILE=samples PORT=3001
	@$(RQWEN3) --profile "$(PROFILE)" up --port $(PORT)

check: develop  ## the static part: style, types, import arrows
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/lint-imports --no-cache
	@$(PY) -m pyright

test: check  ## everything that is checked at each change
	@$(PY) -m pytest -m "not long"

test-all: develop  ## the long tests
	@$(PY) -m pytest -m long

clean:  ## delete what the demo made; .venv stays
	rm -rf var
