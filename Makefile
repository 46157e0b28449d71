# Everything runs in a virtual environment of its own, .venv; no root, safe to run twice.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= deepfm
# Of `make train`; empty is a new folder in runs/ each time.
MODEL_DIR ?=
TENSORFLOW = tensorflow>=2.20,<2.22
BIN = $(VENV)/bin
CC_SOURCES = $(wildcard gba_tf/cc/*/*.cc gba_tf/cc/*/*.h)

.PHONY: all train test test-python test-cc test-cc-tsan test-cc-asan bench-cc benchmark lint format clean

all: $(VENV)/.installed

# The environment first, then the package against the TensorFlow in it: with build isolation pip would
# install TensorFlow a second time just to compile.
$(VENV)/.created: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=77' '$(TENSORFLOW)'
	touch $@

$(VENV)/.installed: $(VENV)/.created setup.py pyproject.toml $(CC_SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test,lint]'
	touch $@

train: $(VENV)/.installed
	$(BIN)/python scripts/train.py --strategy=gba --model=$(MODEL) $(if $(MODEL_DIR),--model_dir=$(MODEL_DIR))

test: test-cc test-python

test-python: $(VENV)/.installed
	$(BIN)/python -m pytest

test-cc:
	$(MAKE) -C tests/cc test

test-cc-tsan:
	$(MAKE) -C tests/cc test-tsan

test-cc-asan:
	$(MAKE) -C tests/cc test-asan

bench-cc:
	$(MAKE) -C tests/cc bench

benchmark: $(VENV)/.installed
	$(BIN)/python scripts/benchmark.py

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CC_SOURCES) tests/cc/*.cc tests/cc/*.h

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CC_SOURCES) tests/cc/*.cc tests/cc/*.h

clean:
	rm -rf build $(VENV) gba_tf.egg-info gba_tf/ops/*.so
