# `make run` trains the embedded default and shows its certificate; `make test` runs every check. Both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
THREADS ?= 2

.PHONY: run test install format clean

run: $(INSTALLED)
	$(BIN)/tacit train

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(THREADS)

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
