# Everything runs in a virtual environment. Only .venv and demo-out are written.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test check bench docs figures notebooks wheel clean

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

docs: $(VENV)/dev.installed         ## build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --nitpicky --fail-on-warning --keep-going -q docs docs/_build/html

figures: $(VENV)/dev.installed      ## write all tables and figures from the recorded results
	$(BIN)/python experiments/tables.py

notebooks: $(VENV)/dev.installed    ## run the notebooks and record their outputs
	OMP_NUM_THREADS=1 $(BIN)/python docs/_ext/run_notebook.py docs/tutorials/*.ipynb

wheel: $(VENV)/dev.installed        ## build, check the metadata, and run the demo from the wheel in an environment without the source
	rm -rf build dist
	$(BIN)/python -m pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python experiments/try_wheel.py dist/*.whl

clean:
	rm -rf $(VENV) demo-out docs/_build build dist

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/dev.installed: EXTRA = [dev]
$(VENV)/%.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.$(EXTRA)'
	touch $@
