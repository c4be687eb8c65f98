# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# Torch comes first and by exact version: a range alone may pull gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
STAMP  := .venv/.installed

# Tests of one process that need no quiet machine: as many at once as there are processors.
ALONE  := tests/analysis tests/book tests/score tests/server tests/simulator tests/preflight
# Hosts of namespaces, real agents and their torch: several laboratories at once, by themselves.
LAB    := $(addprefix tests/preflight/,test_laboratory.py test_choice_truth.py \
	test_preflight_alive.py test_preflight_over_a_server.py smoke board/test_ssh.py)

.DEFAULT_GOAL := help
.PHONY: help demo test versions check install system-packages bench screenshots clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)" "numpy>=1.26,<3"
	$(BIN)/pip install --quiet -e '.[dev]'
	-$(BIN)/rankscope doctor --build
	touch $(STAMP)

install: $(STAMP) ## make .venv and install everything into it

demo: $(STAMP) ## train on 4 ranks, slow one of them, show who it was (DEMO="--fault hang" ...)
	$(BIN)/rankscope demo $(DEMO)

test: $(STAMP) system-packages check ## all checks and all tests (TESTS="tests/agent -k ring" for some)
ifdef TESTS
	$(BIN)/pytest $(TESTS)
else
	$(BIN)/pytest --numprocesses logical --maxprocesses 8 $(ALONE) $(addprefix --ignore=,$(LAB))
	$(BIN)/pytest $(LAB)
	$(BIN)/pytest --durations=25 $(addprefix --ignore=,$(ALONE))
endif

versions: ## every path to a collective on PyTorch 2.6, 2.9, 2.13 and the newest (VERSIONS="--torch 2.9.1 --json")
	$(PYTHON) tests/versions.py $(VERSIONS)

system-packages: ## Chromium for the browser tests, where it is missing and may be installed
	@.ci/system-packages

check: $(STAMP) ## lint, types, import contracts, vendored files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/vendor_web.py check
	PATH="$(CURDIR)/$(BIN):$$PATH" .ci/check-web

bench: $(STAMP) ## the published figures of the README
	$(BIN)/python benchmarks/overhead.py

clean: ## remove what `make` made
	rm -rf .venv artifacts .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
