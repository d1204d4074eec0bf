# make demo     set up and train a first model on the digits that ship with the package
# make test     set up and run the tests
# make test-kernels     set up and run the tests of the C kernels; SANITIZE=1: built with gcc's sanitizers; COMPILER=clang
# make test-plain   set up and run the tests of layers, solvers, gradients, bounds and training without the C kernels
# make test-core    make an environment with nothing but the core, and run the core's tests in it
# make test-browser   set up and try the page to play with in a headless Chromium, which must be on the path
# make hostile N=10000     claims about so many hostile layers, networks and files put before an independent referee
# make docs     set up and build the documentation into docs/_build; a warning is an error
# make check    the tests, the linters, the type checker and the documentation: what .ci/run does
# make bench    set up and measure the speed against other implementations, on trained weights
# make bench AGAINST=REV   measure this code and another revision of it in turns; BENCH='--runs 1' passes options on
# make dist     build the wheel and the source archive in dist/
# make test-wheel   build, install the wheel in a fresh environment, and run the tests against it
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALL = pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help setup demo test test-kernels test-plain test-core test-browser hostile lint docs check bench dist test-wheel clean

help:
	@sed -n 's/^# //p' Makefile

setup: $(VENV)/.ready

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) -e '.[train]'
	touch $@

$(VENV)/.ready: $(VENV)/.installed
	$(BIN)/$(INSTALL) -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/pcdeq train

# A process a core, each with one thread; a file stays in one process, so that its fixtures are made once.
PYTEST = $(BIN)/python -m pytest -n auto --dist loadfile

test: setup
	$(PYTEST)

test-kernels: setup
	$(if $(SANITIZE),PYTHON=$(BIN)/python scripts/sanitize_kernels.sh,$(if $(COMPILER),PYTHON=$(BIN)/python scripts/compile_kernels.sh $(COMPILER),$(BIN)/python -m pytest tests/kernels))

# What runs on GPUs, Macs and in float64: everything that may take a kernel, without one.
PLAIN = tests/solvers tests/proofs tests/faults tests/models tests/training tests/test_layers.py tests/test_implicit.py \
	tests/test_torch_integration.py

test-plain: setup
	PCDEQ_KERNELS=0 $(PYTEST) $(PLAIN)

# What `pip install` without extras must do: layers, solvers, gradients, bounds, networks and their files. Two files of
# tests that take long and import nothing more are left to `make test`.
CORE = tests/solvers tests/proofs tests/theory tests/recipes tests/test_activations.py tests/test_layers.py \
	tests/test_implicit.py tests/test_operators.py tests/test_maps.py tests/test_mistakes.py tests/test_recalibration.py \
	tests/test_extras.py $(addprefix tests/models/test_, networks.py batch_norm.py frozen.py reference.py \
	first_steps.py description.py) $(addprefix src/pcdeq/, activations.py implicit.py injection.py layers.py maps.py \
	operators.py recalibration.py residual.py solvers proofs theory recipes) src/pcdeq/models/store.py

test-core:
	$(PYTHON) -m venv --clear $(VENV)-core
	$(VENV)-core/bin/$(INSTALL) -e . pytest hypothesis
	$(VENV)-core/bin/python -m pytest -p no:cacheprovider $(CORE) \
		--ignore tests/proofs/test_theorems.py --ignore tests/proofs/test_worst_case.py

# PCDEQ_PICTURES=docs/img makes the pictures of it for the documentation.
test-browser: setup
	$(BIN)/python -m pytest tests/browser/play_in_chromium.py

hostile: setup
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m hostile $(or $(N),10000) --first $(or $(SEED),0)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

docs: setup
	$(BIN)/python -m sphinx -E -W --keep-going -q docs docs/_build
	@echo open docs/_build/index.html

check: lint docs test test-plain test-core

bench: setup
	$(BIN)/$(INSTALL) -e '.[test,bench]'
ifdef AGAINST
	$(BIN)/python benchmarks/against.py $(AGAINST) $(BENCH)
else
	$(BIN)/python benchmarks/run.py $(BENCH)
	$(BIN)/python benchmarks/models.py
endif

dist: setup
	rm -rf dist build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python scripts/check_wheel.py dist/*.whl

test-wheel: dist
	PYTHON=$(PYTHON) scripts/test_wheel.sh dist/*.whl

clean:
	rm -rf $(VENV) $(VENV)-core build dist .bench .pytest_cache .ruff_cache .hypothesis docs/_build docs/results
