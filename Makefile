# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check slow faults mutations audited map gpu site clean

# Installed again only when what is asked for has changed.
.venv/installed: pyproject.toml torch-shm/pyproject.toml rank-watch/pyproject.toml torch-audit/pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./torch-shm -e ./rank-watch -e ./torch-audit -e ./lab
	touch $@

demo: .venv/installed
	$(BIN)/phalanx demo

# Most tests are worlds of threads, which share one interpreter's lock, and some wait for processes.
# Many start processes, which read compiled files where these may be written.
test: .venv/installed
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# Mistakes put into the code on purpose, and what `phalanx verify` says of each.
faults: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m seeded $(FAULTS)

# Small mistakes drawn at random in code that a layout runs, and what notices each: some minutes for each.
# make mutations MUTATIONS="--count 60 --package models,parallel"
mutations: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutations $(MUTATIONS)

# The table of docs/audited.md, made again with the libraries that it names.
# DeepSpeed is built from source, for which torch and wheel must be there.
.venv-audited/installed: benchmarks/audited/requirements.txt
	$(PYTHON) -m venv .venv-audited
	.venv-audited/bin/python -m pip install -q --disable-pip-version-check wheel setuptools ninja $$(grep ^torch $<)
	DS_BUILD_OPS=0 .venv-audited/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation -r $<
	touch $@

audited: .venv-audited/installed
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks:torch-audit/src .venv-audited/bin/python -m audited --write

# Where each thing lives: packages, files and a sentence for each. make map FOLDER=src/phalanx/planner
map:
	@$(PYTHON) tests/house_map.py $(FOLDER)

# On a machine with GPUs, with the Python and torch that are there: nothing is installed.
gpu:
	$(PYTHON) benchmarks/gpu.py

# A folder of pages that needs no server: the playground, the documentation, the lab. Asks npm once.
site: .venv/installed
	$(BIN)/python site/build.py build/site

clean:
	rm -rf .venv .venv-audited build dist torch-shm/build rank-watch/build torch-audit/build lab/build .pytest_cache .mypy_cache .ruff_cache
