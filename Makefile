# make demo     set up and train a first model on the digits that ship with the package
# make test     set up and run the tests
# make check    the tests, the linters and the type checker: what .ci/run does
# make bench    set up and measure the speed against other implementations, on trained weights
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: help setup demo test lint check bench clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/pcdeq train

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

check: lint test

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/models.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
