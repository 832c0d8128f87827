PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_BENCH := .venv/.installed-bench

.PHONY: demo test test-slow lint format bench bench-quick tasks clean

# pretrains a small model on the documentation strings of this machine; interrupted, it continues
demo: $(INSTALLED)
	$(BIN)/bertblocks pretrain

test: lint
	$(BIN)/python -m pytest -m "not slow"

# heavy checks: presets at full size, long texts
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# speed beside transformers, ONNX Runtime, OpenVINO and sentence-transformers: tables, JSON and a picture
bench: $(INSTALLED_BENCH)
	$(BIN)/python -m benchmarks

bench-quick: $(INSTALLED_BENCH)
	$(BIN)/python -m benchmarks --quick

# fine-tuning on real data with goals, then speed and scores beside transformers' Trainer; about an hour
tasks: $(INSTALLED)
	$(BIN)/python -m benchmarks.tasks
	$(BIN)/python -m benchmarks.tasks --trainer

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@
