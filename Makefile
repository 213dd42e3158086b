# On a fresh machine run `make serve` or `make test`. Both first create the environment they need.
PYTHON ?= python3
VENV   ?= .venv
HOST   ?= 127.0.0.1
PORT   ?= 8000
ARGS   ?=
JOBS   ?= $(if $(filter 1,$(shell nproc 2>/dev/null)),1,2)
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help serve test cuda-host gpu wheels check bench lock clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# pyproject.toml lists the dependencies; requirements.lock pins their versions. The marker file is
# written last, so an interrupted install runs again.
$(VENV)/.serve: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Foredraft needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c requirements.lock -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(BIN)/python -m pip install --disable-pip-version-check -c requirements.lock -e '.[dev]'
	@touch $@

serve: $(VENV)/.serve  ## serve the built-in pair on HOST:PORT (ARGS="..." for more)
	@exec $(BIN)/foredraft serve --host $(HOST) --port $(PORT) $(ARGS)

# A file's tests share their models, so a file stays with one worker. The files of the last folder
# are short, so both end together.
test: $(VENV)/.dev  ## run all tests that need no GPU, in JOBS processes
	$(BIN)/python -m pytest -m "not gpu" --numprocesses=$(JOBS) --dist=loadfile \
	  --no-loadscope-reorder $(ARGS)

# All tests are skipped unless FOREDRAFT_CUDA_TORCH names a folder with a CUDA build of torch.
cuda-host: $(VENV)/.dev  ## count the GPU calls of a step, without a GPU (tests/cuda_host/README.md)
	$(BIN)/python -m pytest tests/cuda_host -rs $(ARGS)

# Uses PYTHON, not the environment: the machine's own torch supports its GPU.
gpu:  ## all GPU tests and measurements, in 25 minutes (WHEELS=folder; docs/measuring.md)
	@rm -rf build/wheels
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps --target build/wheels $(WHEELS)/*.whl)
	PYTHONPATH=build/wheels $(PYTHON) -m tests.gpu.day --output build/gpu-day-$$(date +%m%d-%H%M%S) $(ARGS)

# What `make gpu` needs besides torch, transformers, Triton and numba, for the GPU machine's Python.
FOR ?= 3.12
CARRIED = annotated-types pydantic pydantic-core typing-inspection msgspec pyzmq llguidance \
  pytest pytest-timeout pluggy iniconfig pygments hypothesis sortedcontainers
wheels:  ## download to WHEELS what `make gpu` needs on a machine with Python FOR and no network
	$(PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --python-version $(FOR) \
	  $(foreach n,17 26 27 28 31,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64 \
	  -c requirements.lock --dest $(WHEELS) $(CARRIED)

check: $(VENV)/.dev  ## check format, lint, types, import rule and line budgets
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_layers.py tests/unit/test_budgets.py

bench: $(VENV)/.serve  ## measure what speculation gains on this machine (ARGS="--quick" for a short run)
	$(BIN)/foredraft bench suite $(ARGS)

# Without Triton: torch for CUDA needs one version of it.
lock: $(VENV)/.dev  ## write requirements.lock from the installed packages
	$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check \
	  | sed -E 's/\+cpu$$//' | grep -vE '^(-e|foredraft|triton)' > requirements.lock

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
