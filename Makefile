# kvcast: every command sets up what it needs in .venv and runs without root.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvcast-installed
TOOLS := $(VENV)/.kvcast-tools
SHELL_VENV := .venv-p4rt-shell
ENGINES_VENV := .venv-engines
# Tests wait for processes and sockets, too: one worker more than there are processors.
WORKERS ?= $(shell expr $$(nproc) + 1)
# A worker that is done takes over from others: tests that take long lie side by side.
IN_PARALLEL := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
# What must keep step has processes of its own.
IN_STEP := $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
PACKAGES := bench cli controller hostagent native p4 protocol routing service simulation switchsim topologies workloads
FILES := $(shell find $(PACKAGES) -name '*.py' -o -name 'py.typed' | sort)

# Tests start hundreds of processes: each would compile all of kvcast where its bytecode is not kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-shell setup-engines setup-engine-peers demo check test test-long test-mutations test-engines test-rdma lint format p4 clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(TOOLS) ## make .venv and install kvcast and its test tools into it (nothing else)

# The editable install links file by file, so it is repeated when a file appears or vanishes.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvcast needs Python 3.11 or newer; say make PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvcast into $(VENV) (a minute or so the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=23.2' 'setuptools>=77'
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation \
	    --config-settings editable_mode=strict --editable '.[$(EXTRAS)]'
endef

# What kvcast itself runs with is a third of it.
$(STAMP): EXTRAS := all
$(STAMP): pyproject.toml $(VENV)/.kvcast-files
	$(INSTALL)
	@touch $@

$(TOOLS): EXTRAS := all,test,lint
$(TOOLS): pyproject.toml $(VENV)/.kvcast-files
	$(INSTALL)
	@touch $(STAMP) $@

$(VENV)/.kvcast-files: force
	@mkdir -p $(VENV)
	@echo "$(FILES)" | cmp -s - $@ || echo "$(FILES)" > $@

.PHONY: force
force:

# p4runtime-shell needs an old protobuf, so it gets an environment of its own. It is an independent
# client in the tests and the console of `kvcast shell`.
setup-shell: $(SHELL_VENV)/.installed ## make .venv-p4rt-shell with p4runtime-shell
$(SHELL_VENV)/.installed:
	@$(PYTHON) -m venv $(SHELL_VENV)
	@$(SHELL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    'p4runtime-shell==0.0.6' 'protobuf<3.21' 'setuptools<81'
	@touch $@

# Engines bring hundreds of packages of their own, so they get an environment of their own. vLLM's build
# for CPUs pulls in torchvision and its like in builds for another torch; nothing here needs them.
setup-engines: setup $(ENGINES_VENV)/.installed ## make .venv-engines with vLLM for CPUs (3.5 GB, some minutes)
$(ENGINES_VENV)/.installed: bench/engines/requirements.txt bench/engines/adapters.txt $(STAMP)
	@test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	@echo "installing engines into $(ENGINES_VENV) (3.5 GB; some minutes the first time)"
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --requirement bench/engines/requirements.txt
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    --requirement bench/engines/adapters.txt
	@$(ENGINES_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@PYTHONWARNINGS=ignore $(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-build-isolation --config-settings editable_mode=strict --editable .
	@touch $@

# Only what a benchmark compares with: no test needs it.
setup-engine-peers: setup-engines ## add LMCache and Mooncake to .venv-engines, for kvcast.bench.ttft
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --no-deps --requirement bench/engines/requirements-peers.txt
	@$(ENGINES_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    --requirement bench/engines/requirements-peers-needs.txt

demo: $(STAMP) ## eight inference nodes read the same prefixes, plainly and through kvcast
	@$(BIN)/kvcast demo --out kvcast-out

check: setup lint ## lint, types and the tests that are quick: what to run while you work
	@$(IN_PARALLEL) -m 'not slow and not in_step and not long' tests/unit tests/property tests/stf tests/simulation

test: setup ## lint, types and all tests but those below; what needs root or BMv2 skips without
	@$(MAKE) --no-print-directory --output-sync=target -j2 setup-shell lint
	@$(IN_PARALLEL) -m 'not in_step and not mutation and not long'
	@$(IN_STEP) -m 'in_step and not long'

test-long: setup ## whole benches, demonstrations, soaks, and pools at which parts are killed (3 minutes)
	@$(IN_PARALLEL) -m 'long and not in_step'
	@$(IN_STEP) -m 'long and in_step'

# The same tests once more, on a product that has lost a defence or has got a bug.
test-mutations: setup ## would the tests notice? defences are taken out and bugs are planted, one at a time
	@$(IN_PARALLEL) -m mutation

test-engines: setup-engines ## engines share a pool: the same tokens, in time, whatever fails (11 minutes)
	@KVCAST_TEST_ENGINES=1 $(BIN)/python -m pytest tests/engines

# One boot of three emulated machines, in which all tests that need RDMA verbs run.
test-rdma: setup ## tests with RDMA verbs, in virtual machines with Soft-RoCE; says what it lacks
	@$(BIN)/python -m kvcast.topologies.machines --missing
	@KVCAST_RDMA_BED=boot timeout -k 10 1800 $(BIN)/python -m pytest tests/rdma

lint: setup ## ruff, import directions and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@MYPYPATH= $(BIN)/mypy $(foreach package,$(PACKAGES),-p kvcast.$(package))

format: setup ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

p4: setup ## regenerate the P4 header file, and compile for every target whose compiler is installed
	@$(BIN)/python -m kvcast.p4.build

clean: ## remove what make and the tests leave behind
	rm -rf $(VENV) $(SHELL_VENV) $(ENGINES_VENV) build kvcast-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
