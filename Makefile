# Each target works on a fresh machine with Python 3.11, pip and make: the first one to run builds
# .venv with the versions in constraints.txt, and rebuilds it when they or pyproject.toml change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
EXTRAS := train,export,openvino,report,lightning,hf,docs,dev
# Two processes, each with half of the tests; the one that finishes first takes from the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# What nearly every change touches: from the paper's Eq. 7 to a compact, verified model.
CORE   := tests/test_*.py $(foreach part,tracing planning pruning workflow,tests/$(part) src/fpgm/$(part)) \
          src/fpgm/criteria.py tests/integration/test_boundaries.py tests/integration/test_public_api.py

# Tests start many processes that import the package: let them share its compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test lint types docs dist bench zoo clean
.DEFAULT_GOAL := test

demo: $(STAMP)  ## prune a trained wide ResNet on real images: recover, verify, time, report
	$(BIN)/python scripts/demo.py

check: $(STAMP)  ## lint, types and the core's tests: about a minute, for every small change
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types
	$(PYTEST) -q -m "not sweep and not slow" $(CORE)

test: $(STAMP)  ## everything a change must pass: lint, types, documentation, tests
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint types docs
	$(PYTEST) -m "not sweep"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)  ## build the site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

dist: $(STAMP)  ## wheel and source archive, checked
	$(PIP) build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

bench: $(STAMP)  ## measure the numbers that the documentation quotes
	$(BIN)/python benchmarks/paper_flops.py
	$(BIN)/python benchmarks/criteria.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/loader.py            # needs CIFAR-10: fpgm data cifar10
	$(BIN)/python benchmarks/soft_cost.py
	$(BIN)/python benchmarks/soft_digits.py
	$(BIN)/python benchmarks/soft_sweeps.py
	$(BIN)/python benchmarks/recovery_outputs.py
	$(BIN)/python benchmarks/demo.py              # needs CIFAR-10
	$(BIN)/python benchmarks/sample_encoding.py   # needs CIFAR-10
	$(BIN)/python benchmarks/sharing.py
	$(BIN)/python benchmarks/median_agreement.py  # needs trained weights: FPGM_WEIGHTS
	$(BIN)/python benchmarks/figures.py           # needs trained weights
	$(BIN)/python benchmarks/regrowth.py          # needs both
	$(BIN)/python benchmarks/soft_cifar.py        # needs both
	$(PIP) --no-deps torch-pruning
	$(BIN)/python benchmarks/recovery.py          # needs both
	$(BIN)/python benchmarks/latency.py           # needs both
	$(BIN)/python benchmarks/paper.py             # needs both

zoo: $(STAMP)  ## random networks, then all torchvision and many timm models, compared with Torch-Pruning (long)
	$(PIP) --no-deps torch-pruning
	$(PYTEST) -m sweep
	$(BIN)/python benchmarks/fuzz.py --files 20000 --forged 20000
	$(BIN)/python benchmarks/property_sweep.py --examples 20000 --seconds 7200
	$(BIN)/python benchmarks/structures.py --workers 2
	$(BIN)/python benchmarks/zoo.py --jobs 2

clean:
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torchvision, timm and Ultralytics are installed without dependencies: torchvision's pin of torch
# would replace the CPU build. What they need besides torch is installed by the line before.
# Ultralytics (AGPL-3.0) is for tests only; the headless opencv is enough for it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[$(EXTRAS)]' huggingface_hub pillow psutil pyyaml requests
	$(PIP) --no-deps torchvision timm
	$(PIP) --no-deps ultralytics ultralytics-thop opencv-python-headless polars polars-runtime-32
	touch $@
