# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
# Torch comes first and by exact version: a range alone may pull gigabytes of CUDA libraries.
TORCH  ?= torch==2.13.0
BIN    := .venv/bin
READY  := .venv/.ready
STAMP  := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo others test test-all test-quick fresh versions lowest check install system-packages bench site screenshots packages probes clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

# What the demo needs, without the frameworks and tools that only the tests use.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; this is " + sys.version.split()[0] + ". Set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)" "numpy>=1.26,<3"
	$(BIN)/pip install --quiet -e '.[server,trainer]'
	-$(BIN)/rankscope doctor --build
	touch $@

$(STAMP): $(READY)
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

install: $(STAMP) ## make .venv and install everything into it

demo: $(READY) ## train on 4 ranks, slow one of them, show who it was (DEMO="--fault hang" ...)
	$(BIN)/rankscope demo $(DEMO)

# Whatever becomes of one, the others run; the summary says what was skipped, and what enables it.
test: $(STAMP) system-packages ## all checks and tests, of long ones a part (TESTS="tests/agent -k ring" for some)
	$(BIN)/python -m tests.run $(RUN) test $(TESTS)

others: $(STAMP) ## trackers and launchers that tests use, into artifacts/others
	.ci/others

test-all: $(STAMP) system-packages others ## the same, however long it takes; resumes where it was stopped
	$(BIN)/python -m tests.run all

# No run but one, none that needs a browser, a laboratory or root.
test-quick: $(STAMP) ## what is tested within a process, and one run from end to end
	$(BIN)/python -m tests.run quick

fresh: $(STAMP) ## the two commands in a bare system of its own, as root (FRESH="--all", "--help")
	$(BIN)/python -m tests.fresh $(FRESH)

versions: ## every path to a collective on PyTorch 2.6, 2.9, 2.13 and the newest (VERSIONS="--torch 2.9.1 --json")
	$(PYTHON) tests/versions.py $(VERSIONS)

lowest: ## the quick tests with the lowest versions of dependencies that pyproject.toml declares
	$(PYTHON) .ci/lowest.py

packages: $(STAMP) ## wheel, sources, an offline bundle with its bill of materials, a Debian package, in artifacts/packages
	$(BIN)/python deploy/packages/build.py --deb

probes: $(STAMP) ## build the ready-made probes for every version of PyTorch and machine
	$(BIN)/python .ci/build_probes.py

system-packages: ## what the tests can use, where it is missing and may be installed
	@PYTHON="$(PYTHON)" .ci/system-packages

check: $(STAMP) ## lint, types, import contracts, vendored files
	$(BIN)/python -m tests.run check

bench: $(STAMP) ## the published figures of the README
	$(BIN)/python benchmarks/overhead.py

site: $(STAMP) ## the documents as pages with a search, in artifacts/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f .ci/site/mkdocs.yml

screenshots: $(STAMP) ## every page in both themes at four widths, of real and simulated runs, in artifacts/screenshots
	$(BIN)/python benchmarks/screenshots.py

clean: ## remove what `make` made
	rm -rf .venv artifacts .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
