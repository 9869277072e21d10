# make bench   the main job: a p2p transfer of a real model between two processes, proven and measured
# make test    every test that this machine can run
# make wheel   a wheel with the CPU and CUDA code, in dist/
# bench and test set up .venv first; a machine needs Python 3.11 or newer and a C++ compiler, nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt constraints.txt $(shell find csrc -type f)

BENCH_ARGS ?= --transport p2p --bucket 1GB

# The wheel is built beside .venv, which thus stays what `pip install` makes of this machine. Without a
# CUDA compiler on the PATH it takes the packages that hold one.
WHEEL_VENV := build/wheel-venv
CUDA_ARCHITECTURES ?= 80-real;90
CUDA_VERSION ?= 13.0
CUDA_PACKAGES := nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm

.PHONY: bench test lint format wheel wheel-venv clean

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

wheel: wheel-venv
	rm -f dist/weightsync-*.whl
	$(WHEEL_VENV)/bin/pip wheel --quiet --no-deps --wheel-dir dist . -C build-dir=build/wheel \
	  -C cmake.define.WEIGHTSYNC_CUDA=ON \
	  -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)"
	$(WHEEL_VENV)/bin/python .ci/check_wheel.py dist/weightsync-*.whl

wheel-venv: $(WHEEL_VENV)/.ready

$(WHEEL_VENV)/.ready:
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet --upgrade pip
	$(WHEEL_VENV)/bin/pip install --quiet --constraint constraints.txt numpy
	command -v nvcc || $(WHEEL_VENV)/bin/pip install --quiet \
	  $(foreach package,$(CUDA_PACKAGES),'$(package)==$(CUDA_VERSION).*')
	touch $@

clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

$(VENV)/.ready: $(VENV)/bin/pip $(SOURCES)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

$(VENV)/.ready-lint: $(VENV)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt ruff mypy clang-format
	touch $@
