# make demo | test | lint | bench: each does the whole set-up first, once; a second `make` sets up nothing.
# Needs Python 3.11 or newer and make. Another Python:  make test PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
MODEL ?=

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
LOCKS := requirements.lock requirements-demo.lock
ROOMS := ingest workers atlas queries

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench lock clean

help:
	@echo "make demo    build an atlas of a real language model and look into it (MODEL=othello: of a game's,"
	@echo "             with trained dictionaries whose features have names, in seconds)"
	@echo "make test    run the tests (ARGS='-k plan' is handed to pytest)"
	@echo "make lint    check style and types"
	@echo "make bench   run every benchmark"
	@echo "make lock    write the lock files anew after a change of the dependencies"
	@echo "make clean   remove the environment and what tools left behind"

setup: $(READY)

# uv does the installing: the one on the PATH, or else one of our own under .make (by pip, or by a venv's pip
# where the system's Python has none). The stamp is last: a set-up that was cut off begins again.
$(READY): pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed, and $(PYTHON) is not: make PYTHON=/path/to/python3.11"; exit 2; }
	@set -e; \
	export UV_PYTHON_DOWNLOADS=never; \
	if uv --version >/dev/null 2>&1; then uv=uv; \
	elif [ -x .make/uv/bin/uv ]; then uv=.make/uv/bin/uv; \
	elif [ -x .make/venv/bin/uv ]; then uv=.make/venv/bin/uv; \
	elif $(PYTHON) -m pip install --quiet --target .make/uv uv 2>/dev/null; then uv=.make/uv/bin/uv; \
	elif $(PYTHON) -m venv .make/venv && .make/venv/bin/python -m pip install --quiet uv; then \
	    uv=.make/venv/bin/uv; \
	else echo "no way to get uv: install uv, or pip for $(PYTHON) (Debian: apt-get install python3-venv)"; exit 2; \
	fi; \
	[ -x $(RUN) ] || $$uv venv --quiet --python "$(PYTHON)" $(VENV); \
	$$uv pip sync --quiet --python $(RUN) --require-hashes $(LOCKS); \
	$$uv pip install --quiet --python $(RUN) --no-deps --no-build-isolation --offline --editable .
	@touch $@

demo: $(READY)
	@$(RUN) -m atlas demo $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: $(READY)
	@$(RUN) -m pytest $(ARGS)

lint: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

bench: $(READY)
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(RUN) "$$file" $(ARGS); done

# No address of a registry enters the files: what is installed is decided by the hashes.
lock:
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --all-extras pyproject.toml \
	    -o requirements.lock
	uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-deps requirements-demo.in \
	    -o requirements-demo.lock

clean:
	rm -rf $(VENV) .make .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.atlas othello.atlas
	find $(ROOMS) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
