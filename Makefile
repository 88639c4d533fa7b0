# Each target first makes .venv, if it is missing or older than the project's files.
# `make gpu-test PYTHON=python3` uses that interpreter as it is instead, with no installation and no network.
ifeq ($(origin PYTHON), command line)
READY :=
export PYTHONPATH := src
else
PYTHON := .venv/bin/python
READY := .venv/.ready
endif

.PHONY: demo test lint bench gpu-test

demo: $(READY)
	$(PYTHON) -m ostinato demo

test: $(READY)
	$(PYTHON) -m pytest -m "not gpu"

gpu-test: $(READY)
	$(PYTHON) -m pytest -m gpu

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)
	mkdir -p benchmarks/results
	$(PYTHON) -m ostinato bench scan --json benchmarks/results
	$(PYTHON) -m ostinato bench layer --json benchmarks/results

.venv/.ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
