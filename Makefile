# Self-documenting: `make` lists the targets.
PYTHON ?= python3
VENV   ?= .venv
EXTRA  ?= cpu
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev run tour test check lint types imports unit integration whole long clients deploy deploy-tools bench bench-audit bench-speculation bench-cost bench-scraping bench-refresh models clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Use it

run: setup ## Install what is needed, start the appliance, print its ready line
	@$(BIN)/appliance up

tour: setup ## Start, stream, measure with and without speculation, verify the audit log, stop
	@$(BIN)/python -m demo.tour

setup: $(VENV)/.installed-$(EXTRA) ## Make the environment the appliance runs in

setup-dev: $(VENV)/.installed-dev ## The same with what the tests need

$(VENV)/.installed-$(EXTRA): pyproject.toml constraints.txt deploy/install.sh
	@sh deploy/install.sh $(PYTHON) $(VENV) $(EXTRA)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(EXTRA) deploy/debian-packages.txt
	@sh deploy/install.sh $(PYTHON) $(VENV) dev
	@touch $@

##@ Check it

test: export SAME_CASES = 1
test: check unit whole clients tour ## Everything CI runs

check: lint types imports ## What a reviewer should not have to say

lint: setup-dev ## Style
	@$(BIN)/ruff format --check --quiet . || (echo "run: $(BIN)/ruff format ." && exit 1)
	@$(BIN)/ruff check --quiet .

types: setup-dev ## Types
	@$(BIN)/mypy

imports: setup-dev ## Import layers
	@$(BIN)/lint-imports

# What failed is said last; of several lanes it is looked at once more with nothing beside it.
LANES := $(BIN)/python -m tests.lanes

UNIT := $(LANES) unit= --with="--numprocesses auto --dist worksteal" --paths tests/unit

unit: setup-dev ## Unit tests on every core, in an empty network namespace where the kernel allows it
	@if unshare -rn true 2>/dev/null; then unshare -rn $(UNIT); \
	else echo "SKIPPED the network wall: this machine does not allow network namespaces" && $(UNIT); fi

INTEGRATION := tests/integration tests/abuse tests/contract tests/faults tests/attacks tests/test_docs.py
LONG := evaluating and promoting drafts, the cost saving
# Two at once, about as long: what serves models or builds images, and all else.  Not more: they share the cores.
define BESIDE
$(LANES) "served=(worker or engine) and not long and not alone" \
	"other=not worker and not engine and not long and not alone" --paths $(1)
endef
# What is promised in seconds, once nothing runs beside it.
ALONE := $(LANES) alone=alone --paths tests/integration

integration: setup-dev ## The whole appliance on real parts: vLLM on the CPU, SQLite, PostgreSQL, loopback
	@$(call BESIDE,$(INTEGRATION))
	@$(ALONE)
	@echo "SKIPPED tests that take many minutes ($(LONG)): make long"

deploy: deploy-tools ## Images, compose, chart, bundle and dashboards, with a container engine where one can be started
	@$(call BESIDE,tests/deploy)

whole: deploy-tools ## Integration and deploy in one run, so that neither core waits
	@$(call BESIDE,$(INTEGRATION) tests/deploy)
	@$(ALONE)
	@echo "SKIPPED tests that take many minutes ($(LONG)): make long"

deploy-tools: setup-dev
	@sh tests/deploy/install.sh $(PYTHON) $(BIN)/pip .deploy

long: setup-dev ## What takes too long for every change: drafts evaluated and promoted, the cost saving measured
	@$(BIN)/python -m pytest $(INTEGRATION) -m long

clients: setup-dev ## Unmodified clients against a real worker, each in an environment of its own
	@sh tests/clients/install.sh $(PYTHON) $(BIN)/pip .clients
	@$(LANES) clients= --paths tests/clients

bench: setup-dev ## Measure what the gateway adds
	@$(BIN)/python -m benchmarks.gateway_overhead

bench-audit: setup-dev ## Measure the audit log: appends per second, and what `strict` costs a request
	@$(BIN)/python -m benchmarks.audit

bench-speculation: setup-dev ## Measure speculation by concurrency, and how well the monitor chooses (hours)
	@$(BIN)/python -m benchmarks.speculation

bench-cost: setup-dev ## Measure whether the cost report's saving is true (ten minutes)
	@$(BIN)/python -m benchmarks.cost_saving

bench-scraping: setup-dev ## Measure what a scrape of the metrics costs (half a minute)
	@$(BIN)/python -m benchmarks.scraping

bench-refresh: setup-dev ## Age the demo pair, refresh its draft, measure what comes back (half an hour)
	@$(BIN)/python -m benchmarks.draft_refresh

##@ Make its parts

models: setup ## Rebuild the demo pair (an hour or more on two cores)
	@$(BIN)/python -m demo.build

clean: ## Remove the environments; data is kept
	@rm -rf $(VENV) .clients .deploy .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
