# make demo: the main job on a real model.  make test: every check.  make docs: the site.  All make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: env demo test docs bench clean

env: $(VENV)/.made

# torch first and by its exact version: a range would fetch the largest build there is
$(VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: env
	$(BIN)/python -m planner demo

test: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: env
	$(BIN)/python -m benchmarks.planning

clean:
	rm -rf $(VENV)
