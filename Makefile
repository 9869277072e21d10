# make bench   the main job: a p2p transfer of a real model between two processes, proven and measured
# make test    every test that this machine can run
# Both set up .venv first; a machine needs Python 3.11 or newer and a C++ compiler, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find csrc -type f)

BENCH_ARGS ?= --transport p2p --bucket 1GB

.PHONY: bench test lint format clean

bench: $(VENV)/.ready
	$(BIN)/weightsync bench $(BENCH_ARGS)

test: $(VENV)/.ready
	$(BIN)/pytest

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.ready-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' | xargs $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.ready: $(VENV)/bin/pip $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt ruff mypy clang-format
	touch $@
