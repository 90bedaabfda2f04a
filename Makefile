# Two commands for a newcomer: `make demo` and `make test`. Both build .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo flower-demo test test-network torture lint bench clean wheel-check

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "perada needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/perada train digits

flower-demo: $(VENV)/.installed
	$(BIN)/python examples/flower_demo.py

test-network: $(VENV)/.installed
	$(BIN)/python -m pytest tests/network

# 1,000 random faults in the files of a run folder; `make test` tries 100.
torture: $(VENV)/.installed
	PERADA_MUTATIONS=1000 $(BIN)/python -m pytest tests/torture

test: lint $(VENV)/.installed
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal
	$(MAKE) wheel-check

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Builds the wheel, installs it into an empty environment and trains from it, so that a file missing from
# the wheel cannot hide behind the source tree.
wheel-check: $(VENV)/.installed
	rm -rf .wheel-check && mkdir .wheel-check
	$(BIN)/python -m build --quiet --wheel --outdir .wheel-check .
	$(PYTHON) -m venv .wheel-check/venv
	.wheel-check/venv/bin/python -m pip install --quiet .wheel-check/*.whl
	cd .wheel-check && venv/bin/perada --version && venv/bin/perada train digits --set train.rounds=3 --set train.epochs=1 --set distill.steps=5
	rm -rf .wheel-check

# On a machine with a GPU also the steps beside a plain loop, whole rounds, and the fast path against the plain one.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/lanes.py
	$(BIN)/python benchmarks/conv_kernels.py
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "no GPU here: that was all"; exit 0; } \
	&& $(BIN)/python benchmarks/plain_loop.py && $(BIN)/python benchmarks/rounds.py && $(BIN)/python benchmarks/fast_vs_plain.py

clean:
	rm -rf $(VENV) .wheel-check build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
