# Two commands for a newcomer: `make demo` and `make test`. Both use .venv: the first installs what the demo needs, and the
# second adds what the tests need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo flower-demo test test-network test-lowest test-pythons torture lint docs bench clean wheel-check audit sbom

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "perada needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

# The tests open pages in a real browser: an installed Chromium or Chrome, Debian's, or else Playwright's own.
$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	$(BIN)/python tools/browser.py
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/perada train digits

flower-demo: $(VENV)/.tested
	$(BIN)/python examples/flower_demo.py

test-network: $(VENV)/.tested
	$(BIN)/python -m pytest tests/network

# 1,000 random faults in the files of a run folder, and of each kind of input; `make test` tries fewer.
torture: $(VENV)/.tested
	PERADA_MUTATIONS=1000 PERADA_EXAMPLES=1000 $(BIN)/python -m pytest tests/torture tests/test_mutated_inputs.py

test: lint $(VENV)/.tested
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal
	$(MAKE) docs wheel-check

# The documentation site, in .site. It is built without a network; a link that leads nowhere is an error.
docs: $(VENV)/.tested
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The same code with the lowest versions that pyproject.toml allows; `make test` has the newest. Python 3.11 or 3.12:
# the lowest numpy has wheels for no newer one.
LOWEST := .lowest
$(LOWEST)/.installed: pyproject.toml tools/lowest.py
	$(PYTHON) -m venv --clear $(LOWEST)
	$(PYTHON) tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable '.[onnx,tensorboard,dicom]' onnxruntime pytest pytest-xdist
	@touch $@

test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n 2 tests/test_offline.py tests/test_config.py tests/data/test_images.py \
	tests/data/test_fit.py tests/data/test_dicom.py tests/data/test_from_memory.py tests/test_run_folders.py tests/test_resume.py \
	tests/test_report.py tests/test_evaluate.py tests/models/test_weights.py tests/e2e/test_using_runs.py

# A part of the tests with each Python from 3.11 to 3.13 that is here, in an environment of its own.
SOME_TESTS := tests/test_offline.py tests/test_config.py tests/data/test_from_memory.py tests/test_run_folders.py \
	tests/test_join.py tests/test_report.py tests/test_methods.py
test-pythons:
	@$(PYTHON) tools/pythons.py | while read -r version python; do \
	echo "Python $$version: $$python"; \
	test -x .pythons/$$version/bin/perada || { $$python -m venv --clear .pythons/$$version && \
	.pythons/$$version/bin/python -m pip install --quiet --editable '.[tensorboard]' 'pytest>=8.2,<10' 'hypothesis>=6.100,<7'; } || exit 1; \
	OMP_NUM_THREADS=1 .pythons/$$version/bin/python -m pytest -q $(SOME_TESTS) < /dev/null || exit 1; done

# The packages that `pip install 'perada[flower]'` brings, with their versions: sbom.cdx.json (CycloneDX).
sbom: $(VENV)/.tested
	$(BIN)/python tools/sbom.py

audit:
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/python -m pip install --quiet 'pip-audit>=2.10,<3'; }
	.audit/bin/python tools/audit.py

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Builds wheel and sdist and checks what an index would refuse. Installs the wheel into an empty environment and trains
# from it, so that a file missing from the wheel cannot hide behind the source tree.
wheel-check: $(VENV)/.tested
	rm -rf .wheel-check && mkdir .wheel-check
	$(BIN)/python -m build --quiet --outdir .wheel-check .
	$(BIN)/python -m twine check --strict .wheel-check/*.whl .wheel-check/*.tar.gz
	$(PYTHON) -m venv .wheel-check/venv
	.wheel-check/venv/bin/python -m pip install --quiet .wheel-check/*.whl
	cd .wheel-check && venv/bin/perada --version && venv/bin/perada train digits --set train.rounds=3 --set train.epochs=1 --set distill.steps=5
	rm -rf .wheel-check

# On a machine with a GPU also the steps beside a plain loop, whole rounds, and the fast path against the plain one.
bench: $(VENV)/.tested
	$(BIN)/python benchmarks/lanes.py
	$(BIN)/python benchmarks/conv_kernels.py
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "no GPU here: that was all"; exit 0; } \
	&& $(BIN)/python benchmarks/plain_loop.py && $(BIN)/python benchmarks/rounds.py && $(BIN)/python benchmarks/fast_vs_plain.py

clean:
	rm -rf $(VENV) $(LOWEST) .audit .wheel-check .pythons .site build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
