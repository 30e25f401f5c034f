# Everything runs in a virtual environment. Only .venv and demo-out are written.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test check bench clean

demo: $(VENV)/plain.installed       ## end to end on built-in data: train, learn, evaluate, verify, draw
	$(BIN)/halve demo --out demo-out

test: $(VENV)/dev.installed         ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

check: $(VENV)/dev.installed        ## lint, check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/dev.installed        ## run all benchmarks, write benchmarks/results
	for script in benchmarks/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) demo-out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/dev.installed: EXTRA = [dev]
$(VENV)/%.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.$(EXTRA)'
	touch $@
