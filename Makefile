# `make help` lists the targets. Those that switch the twin on need root and go through sudo by themselves.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BED := twin/twin.sh
export TWIN_STATE ?= /var/tmp/glm-twin
export TWIN_CACHE ?= /var/tmp/glm-twin
# No colours and boxes where no terminal is
ifeq ($(shell test -t 1 && echo yes),)
export NO_COLOR := 1
export ANSIBLE_NOCOLOR := 1
export PY_COLORS := 0
endif
# Our own tools first: ansible-lint and molecule look for ansible-playbook on PATH
export PATH := $(CURDIR)/.venv/bin:$(PATH)
PYTEST := python -m pytest
SCENARIOS = $(filter-out shared pair faults,$(notdir $(patsubst %/molecule.yml,%,$(wildcard molecule/*/molecule.yml))))
# This role serves only where all the others have run: the whole site is its scenario
SCENARIO = $(patsubst glm-vllm-overlay,pair,$(ROLE))
# The bed of tests/network, beside the pair's
CABLE_BED := TWIN_PREFIX=cable TWIN_STATE=/var/tmp/glm-cable TWIN_NET=10.79.0
# The bed of tests/weights: no engine, and files of some size
WEIGHTS_BED := TWIN_PREFIX=weights TWIN_STATE=/var/tmp/glm-weights TWIN_NET=10.94.0
# The bed of tests/bundle, whose nodes have nothing but the bundle
BUNDLE_BED := TWIN_PREFIX=bundle TWIN_STATE=/var/tmp/glm-bundle TWIN_NET=10.95.0
have = $(wildcard $(1))

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r t d; do printf '  %-12s %s\n' "$$t" "$$d"; done

# The inventory's own pair, or two other addresses in its place
.PHONY: hardware-check
hardware-check: ## HOSTS=a,b: what a pair's hardware does with the release, without weights, as one file for an issue
	@hosts=$$(mktemp --suffix=.yml); trap 'rm -f "$$hosts"' EXIT; IFS=, read -r head worker <<<"$(HOSTS)"; \
	if [ -n "$$worker" ]; then printf '{sparks: {children: {head: {hosts: {spark-a: {ansible_host: "%s"}}}, workers: {hosts: {spark-b: {ansible_host: "%s"}}}}}}\n' "$$head" "$$worker"; \
	elif [ -n "$$head" ]; then echo "make hardware-check HOSTS=a,b takes two addresses: HOSTS is $(HOSTS)." >&2; exit 2; else echo '{all: {}}'; fi >"$$hosts"; \
	ansible-playbook playbooks/hardware_check.yml -i inventory/sparks -i "$$hosts" $(ARGS)

# ---- everything below needs root ------------------------------------------------------------------------------------
ifneq ($(shell id -u),0)
AS_ROOT := setup wheelhouse demo lint docs golden test test-lint test-unit test-overlay test-roles test-network test-weights test-bundle test-pair test-full molecule clean distclean
.PHONY: $(AS_ROOT)
$(AS_ROOT):
	@command -v sudo >/dev/null || { echo "make $@ needs root (it makes namespaces and mounts) and there is no sudo here: run it as root."; exit 1; }
	@sudo --preserve-env=TWIN_STATE,TWIN_CACHE,TWIN_PREFIX,TWIN_NET $(MAKE) $@ $(if $(ROLE),ROLE=$(ROLE)) $(if $(MARK),MARK='$(MARK)')
else

.PHONY: setup
setup: ## tools, environments and wheels; looked at only, when they are there
	@for part in packages controller wheelhouse engine pinned kernels; do twin/setup.sh $$part; done
	@$(BED) ready

.PHONY: wheelhouse
wheelhouse: ## the wheels that the nodes install from
	@twin/setup.sh wheelhouse

.PHONY: demo
demo: setup ## both machines from nothing to an answer
	@$(BED) own 'make demo' python twin/demo.py

.PHONY: lint
lint: test-lint ## ruff, yamllint, ansible-lint, bash -n

.PHONY: docs
docs: setup ## the variable tables of the roles' READMEs and the findings in docs/network.md
	@python tools/argument_docs.py
	@python tools/finding_docs.py

.PHONY: golden
golden: setup ## tests/golden, from what the roles render now
	@GOLDEN_UPDATE=1 $(PYTEST) tests/golden -k renders_what_is_committed

# ---- tests, cheap ones first ----------------------------------------------------------------------------------------
.PHONY: test
test: ## all that a change has to pass: 25 minutes on two cores
	@$(MAKE) test-lint
	@$(MAKE) -j2 test-unit test-overlay # the one mostly waits, the other computes
	@$(MAKE) test-roles
	@$(MAKE) test-network
	@$(MAKE) test-pair

.PHONY: test-lint
test-lint: setup
	@echo "== lint"
	@ruff check .
	@ruff format --check .
	@yamllint --strict .
	@bash -n $(BED) twin/setup.sh .ci/run && sh -n twin/standins.sh
	@python tools/argument_docs.py --check
	@python tools/finding_docs.py --check
	@ansible-lint --offline -q

.PHONY: test-unit
test-unit: setup ## seconds: plugins, modules, the node program, renderings
	@echo "== tests/unit, tests/golden"
	@$(PYTEST) $(call have,tests/unit tests/golden) -m "$(or $(MARK),not full)"

.PHONY: test-overlay
test-overlay: setup ## the engine's numerics, on the CPU
	@echo "== tests/overlay"
	@.venv-engine/bin/$(PYTEST) tests/overlay -m "$(or $(MARK),not full)"

.PHONY: test-roles
test-roles: setup ## one scenario a role, on bare nodes
	@for role in $(SCENARIOS); do $(MAKE) molecule ROLE=$$role; done

.PHONY: molecule
molecule: setup ## ROLE=name: that role's scenario
	@test -n "$(ROLE)" && test -f "molecule/$(SCENARIO)/molecule.yml" || { echo "make molecule ROLE=name, where name is one of: $(SCENARIOS) glm-vllm-overlay"; exit 2; }
	@echo "== molecule $(SCENARIO)"
	@$(if $(filter pair,$(SCENARIO)),$(BED) own 'make molecule') molecule test --scenario-name $(SCENARIO) </dev/null

.PHONY: test-network
test-network: setup ## the cable cut, moved and readdressed, on bare nodes; MARK='full or not full' for all of it
	@echo "== tests/network"
	@$(CABLE_BED) $(PYTEST) tests/network -m "$(or $(MARK),not full)"

.PHONY: test-weights
test-weights: setup ## power cuts and speed of the weights' way, on bare nodes
	@echo "== tests/weights"
	@$(WEIGHTS_BED) $(PYTEST) tests/weights -m "$(or $(MARK),full)"

.PHONY: test-bundle
test-bundle: setup ## the twin installed from a bundle alone, on nodes without a way out
	@echo "== tests/bundle"
	@$(BUNDLE_BED) $(PYTEST) tests/bundle -m full

.PHONY: test-pair
test-pair: setup ## the whole site on the twin, converged once
	@echo "== tests/pair"
	@$(BED) own 'make test' $(MAKE) run-pair MARK='not full'

.PHONY: test-full
test-full: ## test, with both executors and every scenario
	@$(MAKE) test-lint
	@$(MAKE) test-unit test-overlay MARK='full or not full'
	@$(MAKE) test-roles
	@$(MAKE) test-network test-weights MARK='full or not full'
	@$(MAKE) test-bundle
	@echo "== tests/pair"
	@$(BED) own 'make test-full' $(MAKE) run-pair MARK='full or not full' THEN='molecule test --scenario-name pair </dev/null'

.PHONY: run-pair
run-pair:
	@$(BED) clean; trap '$(BED) clean' EXIT; $(PYTEST) tests/pair -m "$(MARK)"; $(or $(THEN),true)

# ---- away with it ---------------------------------------------------------------------------------------------------
.PHONY: clean
clean: ## the twin's machines; the caches stay
	@$(BED) clean
	@$(CABLE_BED) $(BED) clean
	@$(WEIGHTS_BED) $(BED) clean
	@$(BUNDLE_BED) $(BED) clean
	@for role in $(SCENARIOS); do TWIN_PREFIX=$$role TWIN_STATE=/var/tmp/glm-molecule/$$role $(BED) clean; done

.PHONY: distclean
distclean: clean ## the caches and environments too
	@rm -rf "$(TWIN_STATE)" "$(TWIN_CACHE)" /var/tmp/glm-molecule /var/tmp/glm-cable /var/tmp/glm-weights /var/tmp/glm-bundle .venv .venv-engine .cache
	@echo "The Debian packages that setup installed stay: $$(sed -nE 's/^(PACKAGES|CHECKERS)=\(([^)]*)\).*/\2/p' twin/setup.sh | xargs)"

endif
