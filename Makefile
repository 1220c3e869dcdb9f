# Each target does its own set-up: .venv is made from the project's files.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: digits test test-slow lint types docs benchmark clean

# Trains KLN on the embedded digits; within two minutes on two CPU cores.
digits: $(VENV)/installed
	$(BIN)/python train.py --config=configs/digits.py

test: $(VENV)/installed
	$(BIN)/python -m pytest

# Kills, several processes, memory, calibration: what takes minutes.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -n 0

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed
	$(BIN)/mypy

# The site, in docs/_build/html; runs the notebooks. A warning is an error.
docs: $(VENV)/docs-installed
	$(BIN)/python -m sphinx -W --keep-going docs docs/_build/html

benchmark: $(VENV)/installed
	$(BIN)/python -m benchmarks.step

# The file is touched last, so that an installation that failed is done again.
$(VENV)/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	touch $@

clean:
	rm -rf $(VENV)
