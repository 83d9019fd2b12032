# `make demo` and `make test` set themselves up; all that they need is Python >= 3.11, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# LightningModules of other packages are tested in an environment of their own, of some 3 GB.
# PACKAGES=packages,packages-vision adds those that need torchvision.
PACKAGES ?= packages
PACKAGES_VENV := .venv-packages
PACKAGES_INSTALLED := $(PACKAGES_VENV)/.installed

# Other versions of torch have environments of their own, of some 7 GB where pip takes a build for CUDA.
TORCH ?= 2.15.0
VERSIONS_VENV := .venv-versions/$(TORCH)
VERSIONS_INSTALLED := $(VERSIONS_VENV)/.installed
VERSIONS_TESTS := torch_internals tracer zero fully_sharded recomputation fused_loss tensor_proof \
	compiled_by_user export checkpoint_state

# Processes that share out the files of tests, each with pools of ranks of its own.
TEST_PROCESSES ?= 2
SIDE_BY_SIDE := -n $(TEST_PROCESSES) --dist loadfile

.PHONY: env demo docs test test-install test-matrix test-judge test-signals test-cluster test-gpu test-versions lightning-suite lint clean

env: $(INSTALLED)

# torch comes first and from its pin alone, so that no other package chooses its build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev,test,pictures,docs]"
	touch $@

demo: env
	$(BIN)/python examples/gpt.py

# The documentation as a site, in site/; its tables come from the tests, so that it is built where these run.
docs: env
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test: env
	$(MAKE) --jobs=2 --output-sync=target test-install lint
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The wheel that is built of the sdist, in a fresh environment with what it needs at run time alone, and away from here.
test-install: env
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; unset PYTHONPATH; \
	$(BIN)/python -m build --outdir "$$folder/dist"; \
	$(PYTHON) -m venv "$$folder/venv"; python="$$folder/venv/bin/python"; \
	"$$python" -m pip install --no-compile -c constraints.txt torch; \
	"$$python" -m pip install --no-compile -c constraints.txt "$$folder"/dist/*.whl; \
	"$$python" -m pip check; \
	mkdir "$$folder/example"; cp examples/minimal.py "$$folder/example"; cp tests/scripts/installed.py "$$folder"; \
	cd "$$folder"; "$$python" installed.py dist/*.tar.gz

# Tables of layouts that are too slow for every change, and a sample of the law's cases: LAW_SEED=7 makes it the same again.
test-matrix: env
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m matrix

# Defects planted in the package, each of which the judge of tests/law has to find.
test-judge: env
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m judge

# Signals and failures at random moments, and hundreds of ends of processes: one at a time, as they take their time.
test-signals: env
	$(BIN)/python -m pytest -m signals

# Nodes under torchrun that die, stop, leave and join: one test at a time, as each has two or three nodes.
test-cluster: env
	$(BIN)/python -m pytest -m cluster

# One device against the CPU: a GPU, or the second device where there is none; figures go to benchmarks/results.
test-gpu: env
	DEVICE=$(DEVICE) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m gpu -rs tests/gpu

# Lightning's own tests, from the folder `tests` of a checkout: make lightning-suite LIGHTNING_TESTS=/path/to/tests,
# and some of them on two ranks: LIGHTNING_TESTS="/path/to/tests --devices 2"
lightning-suite: env
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lightning-suite]"
	$(BIN)/python -m tests.lightning_suite $(LIGHTNING_TESTS)

# LightningModules of other packages.
test-packages: $(PACKAGES_INSTALLED)
	$(PACKAGES_VENV)/bin/python -m pytest tests/packages

$(PACKAGES_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PACKAGES_VENV)
	$(PACKAGES_VENV)/bin/python -m pip install -c constraints.txt torch
	$(PACKAGES_VENV)/bin/python -m pip install -c constraints.txt -e ".[dev,test,$(PACKAGES)]"
	touch $@

# Canaries of what torch keeps private, and a sample of the rest, with another version of torch: TORCH=2.15.0
test-versions: $(VERSIONS_INSTALLED)
	$(VERSIONS_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(VERSIONS_TESTS:%=tests/test_%.py) tests/law --law 'gpt.*.plain.none'

$(VERSIONS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERSIONS_VENV)
	grep -vE '^torch(vision)?==' constraints.txt > $(VERSIONS_VENV)/constraints.txt
	$(VERSIONS_VENV)/bin/python -m pip install -c $(VERSIONS_VENV)/constraints.txt torch==$(TORCH)
	$(VERSIONS_VENV)/bin/python -m pip install -c $(VERSIONS_VENV)/constraints.txt -e ".[dev,test,pictures]"
	touch $@

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(PACKAGES_VENV) .venv-versions build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
