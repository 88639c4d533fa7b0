# Each target first makes .venv, if it is missing or older than the project's files.
# `make gpu-test PYTHON=python3` uses that interpreter as it is instead, with no installation and no network.
ifeq ($(origin PYTHON), command line)
READY :=
export PYTHONPATH := src
else
PYTHON := .venv/bin/python
READY := .venv/.ready
endif

.PHONY: demo test test-with lint bench docs gpu-test sanitize

demo: $(READY)
	$(PYTHON) -m ostinato demo

# In two processes, where the interpreter has pytest-xdist.
test: $(READY)
	$(PYTHON) -m pytest -m "not gpu" $$($(PYTHON) -c 'import xdist; print("-n 2 --dist worksteal")' 2> /dev/null)

# With another PyTorch that is supported: make test-with TORCH=2.11.0
test-with:
	python3 -m venv .venv-$(or $(TORCH),$(error say which, such as TORCH=2.11.0))
	grep -v '^torch==' constraints.txt > .venv-$(TORCH)/constraints.txt
	.venv-$(TORCH)/bin/python -m pip install -q -c .venv-$(TORCH)/constraints.txt torch==$(TORCH) -e '.[dev]'
	$(MAKE) test PYTHON=.venv-$(TORCH)/bin/python

gpu-test: $(READY)
	$(PYTHON) -m pytest -m gpu

# Without torch's memory pool, so that every tensor has bounds of its own.  A process takes several parts, as starting one
# under a tool takes longer than most of them.  Racecheck skips kernels whose order it does not see, and which it would
# take for races: by words that carry the number of their step, or its last bit, between blocks of a cluster; by an
# mbarrier at which one lane arrives for its warp; by a named barrier at which some warps wait for others' reads.
sanitize: $(READY)
	for tool in memcheck racecheck initcheck synccheck; do \
		skip=none; test $$tool != racecheck || skip='clusters\|ping-pong\|wide'; \
		$(PYTHON) tests/every_kernel.py --list | grep -v $$skip | PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P 8 -n 4 \
			compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 $(PYTHON) tests/every_kernel.py \
			|| exit 1; \
	done

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	! grep -rnE --include='*.cu' --include='*.cuh' '.{121}' src  # lines as long as Python's
	! grep -rnP --include='*.cu' --include='*.cuh' '(?<!return)(?<=[\w>]) [*&](?=\w)(?!.*, [*&]\w)' src  # T* x, but T *x, *y

# Without a GPU the small shapes only.  The speeds that the documentation shows: make bench RESULTS=benchmarks/results
# Each part writes its own files, so that one that fails leaves the others; what was compiled beforehand is not timed.
RESULTS := bench
KINDS := scan layer persistent training recurrence calls networks 'training --sweep' 'training --random 40'
LAYER := mingru --batch 1 --length 4096 --hidden-size 512 --trace $(RESULTS)/trace.json
bench: $(READY)
	mkdir -p $(RESULTS)
	gpu=$$($(PYTHON) -c 'import torch; print(int(torch.cuda.is_available()))'); \
	if [ $$gpu = 1 ]; then $(PYTHON) -m ostinato bench warm; else quick=--quick; fi; \
	for kind in $(KINDS); do $(PYTHON) -m ostinato bench $$kind $$quick --json $(RESULTS) || failed=1; done; \
	$(PYTHON) -m ostinato bench papers $$quick --json $(RESULTS) || failed=1; \
	$(PYTHON) -m ostinato bench profile $(LAYER) --json $(RESULTS) || failed=1; \
	if [ $$gpu = 1 ]; then \
		$(PYTHON) -m ostinato bench profile $(LAYER) --contestant 'Ostinato, time loop' \
			--json $(RESULTS)/profile-loop-gpu.json || failed=1; \
		$(PYTHON) benchmarks/ablation.py --output $(RESULTS)/ablation-gpu.json || failed=1; \
	fi; \
	test -z "$$failed"

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

.venv/.ready: pyproject.toml constraints.txt
	python3 -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
