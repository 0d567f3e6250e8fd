# Self-documenting: `make` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
EXTRA  ?= cpu
BIN    := $(VENV)/bin

# Where it is set, each of the hundreds of processes that tests start compiles our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help slow setup setup-dev run tour test quick check tools lint types imports unit contract deploy parts workers alone matrix clients promises deploy-tools client-tools interop-tools cluster cluster-smoke cluster-tools cluster-programs bench bench-audit bench-speculation bench-reaction bench-cost bench-scraping bench-refresh docs dashboards locks models clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use it

run: setup ## Install what is needed, start the appliance, print its ready line
	@$(BIN)/appliance up

tour: setup ## Start, stream, measure with and without speculation, verify the audit log, stop
	@$(BIN)/python -m demo.tour

setup: $(VENV)/.installed-$(EXTRA) ## Make the environment the appliance runs in

setup-dev: $(VENV)/.installed-dev ## The same with what the tests need

LOCKS := $(wildcard deploy/locks/*.txt)

$(VENV)/.installed-$(EXTRA): pyproject.toml $(LOCKS) deploy/install.sh deploy/torch.sh
	@sh deploy/install.sh $(PYTHON) $(VENV) $(EXTRA)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(EXTRA) deploy/debian-packages.txt
	@sh deploy/install.sh $(PYTHON) $(VENV) dev,docs
	@touch $@ $(VENV)/.installed-docs

$(VENV)/.installed-docs: pyproject.toml $(LOCKS) deploy/install.sh
	@sh deploy/install.sh $(PYTHON) $(VENV) docs
	@touch $@

##@ Check it

# A stage that fails hides no other: all run, then the verdict.  `tools` comes first: all but unit tests need it.
STAGES := tools+unit parts workers+clients+tour+lint+types+imports alone promises

test: ## Everything CI runs, and how long each stage took
	@echo "NOT RUN HERE BUT BY make slow: what is marked in" $$(grep -rl "mark\.slow" tests)
	@$(PYTHON) tests/stages.py $(STAGES)

quick: check unit contract ## What to run at every change: no worker, no container

check: lint types imports ## What a reviewer should not have to say

tools: setup-dev ## Everything the tests need, tools of others included
	@$(MAKE) --no-print-directory -j3 deploy-tools client-tools interop-tools

lint: setup-dev ## Style
	@$(BIN)/ruff format --check --quiet . || (echo "run: $(BIN)/ruff format ." && exit 1)
	@$(BIN)/ruff check --quiet .

types: setup-dev ## Types
	@$(BIN)/mypy

imports: setup-dev ## Import layers
	@$(BIN)/lint-imports

PYTEST := $(BIN)/python -m pytest
# A file is one process's: its tests share a gateway, a worker or a database.
SHARED := --dist loadgroup --no-loadscope-reorder --numprocesses
# Most tests wait half of their time; those with a worker a third, and they need gigabytes.
TWICE := $(SHARED) $(shell expr $$(nproc) \* 2)
ONE_MORE := $(SHARED) $(shell expr $$(nproc) + 1)
HEAVY := worker or engine
UNIT := $(PYTEST) tests/unit --dist worksteal --numprocesses $(shell expr $$(nproc) \* 2)

unit: setup-dev ## Unit tests, in an empty network namespace where the kernel allows it
	@if unshare -rn true 2>/dev/null; then unshare -rn $(UNIT); \
	elif [ "$$CI" = true ]; then echo "FAILED: this machine does not allow network namespaces" && exit 1; \
	else echo "SKIPPED the network namespace: this machine does not allow one" && $(UNIT); fi

contract: setup-dev ## What every database and gateway has to do alike, on SQLite and PostgreSQL
	@$(PYTEST) tests/contract $(TWICE) -m "not worker"

# All there is but what has a stage of its own, so that a new folder cannot be forgotten.
PARTS := tests --ignore=tests/unit --ignore=tests/clients --ignore=tests/cluster

deploy: deploy-tools ## Images, compose, chart, bundle and dashboards, with a container engine where one can be started
	@$(PYTEST) tests/deploy $(ONE_MORE)

# Their marks would leave them out, but only once each process has imported torch for them.
IMPORT_TORCH := $(addprefix --ignore=,$(shell grep -l "^pytestmark = .*mark\.worker" tests/*/*.py))

parts: deploy-tools interop-tools ## Gateway, audit log, databases, faults, attacks, chart: all without a worker or a container engine
	@$(PYTEST) $(PARTS) $(IMPORT_TORCH) $(TWICE) -m "not ($(HEAVY) or alone or slow)"

# A worker touches its whole KV cache at once: at the default, those of the tests fill the memory.
workers clients alone: export APPLIANCE_WORKER__CPU_KV_CACHE_GIB := 0.25

workers: deploy-tools interop-tools ## What starts vLLM on the CPU or a container engine
	@$(PYTEST) $(PARTS) $(ONE_MORE) -m "($(HEAVY)) and not (alone or slow)"

alone: setup-dev ## What is promised in seconds, on a quiet machine
	@$(PYTEST) $(PARTS) -m alone

matrix: setup-dev ## The control contract on each version of vLLM (VERSIONS="0.28.0 0.31.0" for some, KEEP=1 to keep them)
	@$(BIN)/python -m tests.matrix $(VERSIONS)

clients: client-tools ## Unmodified clients against a real worker, each in an environment of its own
	@$(PYTEST) tests/clients

cluster: $(if $(KUBECONFIG),setup-dev,cluster-tools) ## The chart in a Kubernetes of one node, or in that of KUBECONFIG
	@$(PYTEST) tests/cluster --capture=no

cluster-smoke: setup-dev ## Its most important tests: install, chat, helm test, denied connections
	@$(PYTEST) tests/cluster/test_install.py tests/cluster/test_denied_flows.py --capture=no

cluster-tools: ## Build that Kubernetes and Helm from Go modules, once; takes long
	@$(MAKE) --no-print-directory -j2 setup-dev cluster-programs

# Needs no environment, so that the compiler works while packages are fetched.
cluster-programs:
	@$(PYTHON) -m tests.cluster.tools

slow: setup-dev ## What `make test` leaves out: every drafting method, suspect answers, drawn dashboards, attacks on PostgreSQL, the saving of the cost report, benchmarks in small, every fault of a disk
	@$(PYTEST) $(PARTS) -m slow
	@$(PYTEST) tests/faults/test_harmed_writer.py --all-faults

promises: setup-dev ## Whether every test that docs/promises.yaml names has passed; the end of `make test`
	@$(BIN)/python -m docs.promises "$$TESTS_PASSED"

deploy-tools: setup-dev
	@sh tests/deploy/install.sh $(PYTHON) $(BIN)/pip .deploy

client-tools: setup-dev
	@sh tests/clients/install.sh $(PYTHON) $(BIN)/pip .clients

interop-tools: setup-dev
	@sh tests/interop/install.sh $(PYTHON) $(BIN)/pip .interop

bench: setup-dev ## Measure what the gateway adds
	@$(BIN)/python -m benchmarks.gateway_overhead

bench-audit: setup-dev ## Measure the audit log: appends per second, and what `strict` costs a request
	@$(BIN)/python -m benchmarks.audit

bench-speculation: setup-dev ## Compare the monitor with every fixed number of draft tokens, in pairs (hours)
	@$(BIN)/python -m benchmarks.speculation

bench-reaction: setup-dev ## Measure how soon the monitor follows a change of traffic (hours)
	@$(BIN)/python -m benchmarks.speculation.reaction

bench-cost: setup-dev ## Measure whether the cost report's saving is true (ten minutes)
	@$(BIN)/python -m benchmarks.cost_saving

bench-scraping: setup-dev ## Measure what a scrape of the metrics costs (half a minute)
	@$(BIN)/python -m benchmarks.scraping

bench-refresh: setup-dev ## Age the demo pair, refresh its draft, measure what comes back (half an hour)
	@$(BIN)/python -m benchmarks.draft_refresh

##@ Make its parts

# Offline where the kernel allows it; renamed when it is whole, because a gateway may be serving the former.
docs: $(VENV)/.installed-docs ## Build the documentation as a site without a network; the gateway serves it at /docs
	@rm -rf build/docs && offline= && if unshare -rn true 2>/dev/null; then offline="unshare -rn"; fi && \
	NO_MKDOCS_2_WARNING=1 $$offline $(BIN)/mkdocs build --quiet --strict --site-dir build/docs
	@rm -rf appliance/api/site && mv build/docs appliance/api/site
	@echo "built appliance/api/site: open appliance/api/site/index.html, or /docs of a gateway that starts now"

# Grafana's packages only draw here: nothing of them is in an image, a bundle or a wheel (decision 0059).
PANELS := tests/grafana/node_modules/.package-lock.json

$(PANELS): tests/grafana/package-lock.json | deploy-tools
	@cd tests/grafana && PATH="$(CURDIR)/.deploy/helm/bin:$$PATH" npm ci --ignore-scripts --no-audit --no-fund --loglevel=error

dashboards: setup-dev $(PANELS) ## Draw every dashboard with data of the running demo, check each panel, keep pictures for the docs
	@DASHBOARD_PICTURES=docs/images/dashboards $(PYTEST) tests/integration/test_dashboards_drawn.py

locks: setup-dev ## Resolve the dependencies again and write deploy/locks
	@$(BIN)/python deploy/lock.py

models: setup ## Rebuild the demo pair (an hour or more on two cores)
	@$(BIN)/python -m demo.build

clean: ## Remove the environments; data is kept
	@rm -rf $(VENV) .clients .deploy .interop .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
