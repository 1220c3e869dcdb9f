# Each target does its own set-up: .venv is made from the project's files.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: digits test test-slow test-optimised test-lowest coverage lint types docs wheel
.PHONY: benchmark clean

# Trains KLN on the digits of scikit-learn; within two minutes on two CPU cores.
digits: $(VENV)/installed
	$(BIN)/python train.py --config=configs/digits.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

# Kills, several processes, memory, calibration: what takes minutes.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -n 0

# The tests without the options of XLA that make compiling fast.
test-optimised: $(VENV)/installed
	KLN_JAX_TEST_OPTIMISED=1 $(BIN)/python -m pytest

# The tests with the lowest versions that pyproject.toml allows.
test-lowest: $(VENV)-lowest/installed
	$(VENV)-lowest/bin/python -m pytest

coverage: $(VENV)/installed
	$(BIN)/python -m pytest --cov=kln_jax --cov-report=term:skip-covered

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# The site, in docs/_build/html; runs the notebooks. A warning is an error.
docs: $(VENV)/docs-installed
	$(BIN)/python -m sphinx -W --keep-going docs docs/_build/html

# Builds the wheel and tries it in empty environments and an empty folder.
wheel:
	rm -rf build dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir=dist .
	PYTHON=$(PYTHON) .ci/wheel dist/*.whl

benchmark: $(VENV)/installed
	$(BIN)/python -m benchmarks.step

# The file is touched last, so that an installation that failed is done again.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	touch $@

$(VENV)-lowest/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv --clear $(VENV)-lowest
	sed -E 's/>=([0-9.]+)/==\1.*/' requirements.txt > $(VENV)-lowest/constraints.txt
	$(VENV)-lowest/bin/python -m pip install --quiet --editable '.[dev]' \
	    --constraint $(VENV)-lowest/constraints.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist
