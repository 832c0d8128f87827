PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow lint format bench clean

demo: $(INSTALLED)
	$(BIN)/bertblocks describe modernbert-base
	$(BIN)/python examples/minilm.py

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

bench: $(INSTALLED)
	$(BIN)/python benchmarks/encoder.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
