# The commands of the project. `make demo` is the place to begin; `make help` lists them.

# The first Python that is new enough and really runs; else python3, which bootstrap.py then refuses in words.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && exit; done; echo python3)
PROFILE ?= demo
WORKERS ?= 2
PY := .venv/bin/python
HAVE_PYTHON = { command -v $(PYTHON) >/dev/null || { echo "make: no $(PYTHON) on this machine. Install Python 3.11 or \
newer (Debian: apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python3 ..." >&2; exit 1; }; }
RQWEN3 := $(PY) -m rqwen3_pipeline.cli

.DEFAULT_GOAL := help
.PHONY: help install install-cluster demo ui check test test-all bench-memory bench-dedup bench-model torture chaos bench-launcher bench-corpus clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install:  ## make .venv with everything the demo needs
	@$(HAVE_PYTHON) && $(PYTHON) bootstrap.py training evaluation hub

install-cluster:  ## the same with Postgres for the event store, see docs/postgres.md
	@$(HAVE_PYTHON) && $(PYTHON) bootstrap.py training evaluation hub cluster

develop:  ## make .venv with everything the checks and tests need
	@$(HAVE_PYTHON) && $(PYTHON) bootstrap.py development

ifdef SAMPLES
demo: export RQWEN3_SOURCES := $(SAMPLES)
demo: export RQWEN3_TOKENIZER := $(TOKENIZER)
demo: PROFILE := samples
endif
demo: install  ## the whole pipeline, small: SAMPLES=DIR [TOKENIZER=FILE] runs it on parquet files of your own
	@$(RQWEN3) --profile "$(PROFILE)" --workers $(WORKERS) run

ui: install  ## the web UI and the daemon on what the demo made: PROFILE=samples PORT=3001
	@$(RQWEN3) --profile "$(PROFILE)" up $(if $(PORT),--port "$(PORT)")

check: develop  ## the static part: style, types, import arrows
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/lint-imports --no-cache
	@$(PY) -m pyright -p .

test: check  ## everything that is checked at each change
	@$(PY) -m pytest -m "not long"

test-all: develop  ## the long tests; those on a SLURM cluster, which mostly wait, beside the others
	@log=$$(mktemp); $(PY) -m pytest -m "long and cluster" >"$$log" 2>&1 & cluster=$$!; \
	$(PY) -m pytest -m "long and not cluster"; others=$$?; \
	wait $$cluster; clusters=$$?; echo "On the cluster:"; cat "$$log"; rm -f "$$log"; exit $$((others + clusters))

bench-memory: develop  ## memory of a filter worker over 2 GB files of awkward shapes: MB=500 makes them smaller
	@$(PY) -m bench.filter_memory $(if $(MB),--mb $(MB))

bench-dedup: develop  ## memory and time of deduplicating 20 and 50 million digests: MILLIONS="2 5" takes fewer
	@$(PY) -m bench.dedup $(if $(MILLIONS),--millions $(MILLIONS))

bench-corpus: develop  ## corpus speed against datatrove and the tokenizer alone: ROUNDS=5 TOKENIZER=FILE
	@$(PY) -m bench.corpus --rounds $(or $(ROUNDS),3) $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)")

bench-model: develop  ## step time and memory of the model against transformers; on a GPU tokens/s and MFU: PAIRS=9
	@$(PY) -m bench.model --pairs $(or $(PAIRS),7)

torture: develop  ## kill the trainer 204 times, in every phase, and judge what is left: KILLS=30 is shorter
	@$(PY) -m bench.torture $(if $(KILLS),--kills $(KILLS)) $(if $(FOLDER),--folder "$(FOLDER)")

chaos: develop  ## kill what a chain of submissions stands on, 36 times, and judge the end: FAULTS=12 STEPS=600
	@$(PY) -m bench.chaos $(if $(FAULTS),--faults $(FAULTS)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(FOLDER),--folder "$(FOLDER)")

bench-launcher: develop  ## cost and start latency of SLURM jobs, on a cluster of Debian's packages: PAIRS=7
	@$(PY) -m bench.launcher --pairs $(or $(PAIRS),7)

clean:  ## delete what the demo made; .venv stays
	rm -rf var
