# make demo: the main job on a real model.  make test: every check.  make docs: the site.  All make the environment first.
# make thorough: more variants of what `make test` checks.
# make compat: the tests marked so, on the oldest and the newest torch; make compat TORCH="2.12.1 2.14.1": on these.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TESTED := $(shell sed -n 's/^TESTED = (\(.*\))/\1/p' planner/compat/versions.py | tr -d '",')
TORCH ?= $(firstword $(TESTED)) $(lastword $(TESTED))

# without bytecode on disk, each of the many processes that tests start would compile all sources again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env demo test lint pytest thorough compat docs bench clean wheels
.PRECIOUS: .venv-compat-%/.made

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

# side by side: mypy takes one core
test: env
	$(MAKE) --no-print-directory --jobs 2 lint pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

pytest: env
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# the tests that `make test` leaves out
thorough: env
	$(BIN)/python -m pytest -m thorough --numprocesses auto --dist worksteal

# what `python -m benchmarks.cuda --hour` installs on a machine with a GPU, Python 3.12, torch, and no network
wheels: env
	$(BIN)/python -m pip download --quiet --constraint constraints.txt --no-deps --only-binary=:all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
		--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform any \
		--dest .wheels highspy 'pulp>=3.3,<4' diffusers importlib_metadata networkx \
		pydantic pydantic_core annotated-types typing-inspection

docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

compat: $(addprefix compat-,$(TORCH))

compat-%: .venv-compat-%/.made
	.venv-compat-$*/bin/python -m pytest -m compat --numprocesses auto --dist worksteal

# a torch from PyPI has CUDA with it: 6 GB, on a machine without a GPU, too; 2.11 wants an older setuptools
.venv-compat-%/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-compat-$*
	grep --invert-match --extended-regexp '^(torch|setuptools)==' constraints.txt > .venv-compat-$*/constraints.txt
	.venv-compat-$*/bin/python -m pip install --quiet --upgrade pip
	.venv-compat-$*/bin/python -m pip install --quiet --constraint .venv-compat-$*/constraints.txt torch==$*
	.venv-compat-$*/bin/python -m pip install --quiet --constraint .venv-compat-$*/constraints.txt --editable '.[dev]'
	touch $@

bench: env
	$(BIN)/python -m benchmarks.planning

clean:
	rm -rf $(VENV) .venv-compat-*
