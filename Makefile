# `make run` trains the embedded default and shows its certificate; `make test` runs every check. Both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
BENCH := .venv-bench/bin
BENCH_INSTALLED := .venv-bench/installed
THREADS ?= 2

.PHONY: run test install format clean bench mutants faults fuzz

run: $(INSTALLED)
	$(BIN)/tacit train

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(THREADS)

install: $(INSTALLED)

COMPILED := $(wildcard src/tacit/*/*.[ch])

$(INSTALLED): pyproject.toml constraints.txt $(COMPILED)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Privacy bugs made on purpose in a copy, of which each must fail a test; and faults upon real runs. Both go on where they stopped.
mutants: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m mutants $(ARGS)

faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults $(ARGS)

# Every parser, with spoiled input.
fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

bench: $(BENCH_INSTALLED)
	OMP_NUM_THREADS=$(THREADS) $(BENCH)/python -m benchmarks run $(ARGS)
	$(BENCH)/python -m benchmarks report

$(BENCH_INSTALLED): pyproject.toml constraints.txt benchmarks/constraints.txt $(COMPILED)
	$(PYTHON) -m venv .venv-bench
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --constraint benchmarks/constraints.txt --editable . opacus opake jax jax-privacy
	touch $@

clean:
	rm -rf .venv .venv-bench build dist src/*.egg-info src/tacit/*/*.so .pytest_cache .mypy_cache .ruff_cache
