PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_BENCH := .venv/.installed-bench
INSTALLED_SLOW := .venv/.installed-slow
# one worker per CPU; a worker that runs out of tests takes some of another's, so most module fixtures are built once
PYTEST := $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=worksteal --durations=20

# modules are compiled when they are first imported, which is faster than compiling all of them during the install
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests test-slow gpu-check lint format bench bench-quick tasks clean

# pretrain a small model on the docstrings of this machine; run it again to continue after an interruption
demo: $(INSTALLED)
	$(BIN)/bertblocks pretrain

# lint and tests share the CPUs, because mypy uses one of them only
test: $(INSTALLED)
	$(MAKE) --jobs=2 lint tests

tests: $(INSTALLED)
	$(PYTEST) -m "not slow"

# heavy checks: presets at full size, long texts, kills, several processes
test-slow: $(INSTALLED_SLOW)
	$(PYTEST) -m slow

# every test that needs CUDA, and a table of the outcomes to paste into an issue
gpu-check: $(INSTALLED)
	$(BIN)/python -m tests.gpu_check

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# speed compared with transformers, ONNX Runtime, OpenVINO and sentence-transformers: tables, JSON and a chart
bench: $(INSTALLED_BENCH)
	$(BIN)/python -m benchmarks

bench-quick: $(INSTALLED_BENCH)
	$(BIN)/python -m benchmarks --quick

# fine-tuning on real data with target scores; about half an hour
tasks: $(INSTALLED)
	$(BIN)/python -m benchmarks.tasks

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

# Triton is in a folder of its own, which only the tests of its kernels use: torch's compiler imports it if it can
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
ifeq ($(shell uname -sm),Linux x86_64)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --no-deps --upgrade --target .venv/triton triton
endif
	touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[bench]'
	touch $@

$(INSTALLED_SLOW): $(INSTALLED)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[evaluation]'
	touch $@
