# `make serve` sets up and serves the demo model on two CPU engines; `make test` sets up and runs
# every check. `make quick` lints and runs the tests that need neither vLLM nor a server. A finished
# set-up is kept in .venv and used again until what it was made from changes.
#
#   PYTHON       interpreter to set up with: 3.11 or 3.12
#   TORCH_INDEX  package index for PyTorch, such as https://download.pytorch.org/whl/cpu;
#                empty: whatever build pip's own configuration finds
#   PORT         port of `make serve`
#   ARGS         more arguments for `shoal serve`
#   PYTEST_ARGS  more arguments for pytest
#   PYTEST_PROCESSES  processes that run tests (3; 2 for `make quick`); two of them run all with real
#                     engines, and a third one computes while these wait
#
# docs/contributing.md lists variables of the environment with which tests go deeper.
#
# `make chaos` torments a node of fake engines and then one of real ones, for CHAOS_SECONDS (900) each, with
# events drawn from CHAOS_SEED (0); CHAOS_ENGINE=fake or real does one of them. Before that it kills
# workers of batches, CHAOS_BATCH_KILLS (1000) times, and parts of nodes that work on batches, or whole nodes,
# CHAOS_NODE_KILLS (1000 with fake engines, 20 with real ones) times; 0: not at all.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
TORCH_INDEX ?=
ARGS ?=
PYTEST_ARGS ?=
PYTEST_PROCESSES ?= $(if $(filter quick,$(MAKECMDGOALS)),2,3)

TORCH := torch==2.13.0
UV := uv==0.13.8
# What `make quick` runs, and what of it imports vLLM or starts servers.
QUICK := tests/policies tests/runtime/protocol tests/runtime/controller tests/loadgen \
	tests/grafana/test_dashboards.py tests/grafana/test_draw.py tests/test_docs.py tests/test_imports.py \
	tests/test_makefile.py tests/test_sizes.py
NOT_QUICK := tests/runtime/protocol/test_wire.py tests/loadgen/test_vllm_agreement.py \
	tests/loadgen/test_vllm_bench.py tests/loadgen/bench

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: serve test quick chaos lint style format lock clean setup
.DELETE_ON_ERROR:

serve: setup
	@exec $(BIN)/shoal serve $(ARGS)

# pytest rewrites the assertions of all modules, which takes each process 20 s. So one process does that first,
# beside mypy, which takes one core. Its files are kept for the others (PYTHONDONTWRITEBYTECODE would forbid
# that). It says nothing of a test that it cannot collect, because the run of the tests says so.
test: style
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 & \
		$(BIN)/mypy; code=$$?; wait; exit $$code
	$(BIN)/python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist loadscope $(PYTEST_ARGS)

quick: lint
	$(BIN)/python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist loadscope $(PYTEST_ARGS) \
		--hypothesis-profile quick -m "not real and not slow" $(QUICK) $(NOT_QUICK:%=--ignore=%)

chaos: setup
	$(BIN)/python -m tests.chaos

lint: style
	$(BIN)/mypy

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(VENV)/installed

# Everything is pinned and hashed in the lock, which leaves nothing to resolve: --no-deps. PyTorch comes
# second, and finds its own dependencies in place unless its build brings more of them. What vLLM
# declares and the lock leaves out on purpose (requirements/excludes.txt) is no conflict. pip would compile
# all modules on one core. A third of them is hardly ever imported (RARE). Some cannot be compiled, such as
# templates, and are no modules.
RARE := /(tests?|testing|lexers|fontTools)/|/transformers/models/.*/(modeling|modular|image|video|feature)

$(VENV)/locked: requirements/cpu.lock requirements/make_venv.py
	@echo "Setting up $(VENV) (once; this downloads vLLM and PyTorch)"
	@test -n "$(PYTHON)" || { echo "Shoal needs Python: apt-get install python3"; exit 1; }
	@$(PYTHON) requirements/make_venv.py $(VENV)
	@$(PIP) install --no-compile --no-deps --require-hashes -r requirements/cpu.lock
	@$(PIP) install --no-compile --no-warn-conflicts $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(VENV)/lib || true
	@touch $@

$(VENV)/installed: $(VENV)/locked pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# Resolves for every supported Python at once. The resolver has an environment of its own. cpu.lock is
# for development; cpu-image.lock has its versions, without the tests.
COMPILE := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-annotate --custom-compile-command "make lock" pyproject.toml

lock:
	$(PYTHON) requirements/make_venv.py .venv-lock
	.venv-lock/bin/python -m pip install --quiet $(UV)
	$(COMPILE) requirements/cpu.in --extra cpu --excludes requirements/excludes.txt \
		--output-file requirements/cpu.lock
	$(COMPILE) requirements/torch.in --extra cpu --excludes requirements/excludes.txt \
		--excludes requirements/cpu-image.excludes.txt --constraints requirements/cpu.lock \
		--output-file requirements/cpu-image.lock
	$(COMPILE) --extra cuda --output-file requirements/cuda.lock

clean:
	rm -rf $(VENV) .venv-lock .mypy_cache .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
