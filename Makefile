# SPDX-License-Identifier: Apache-2.0
BIN ?= .venv/bin

.DEFAULT_GOAL := help
.PHONY: help lint types imports test proofs check bench calibration simulation chaos campaign-proof laws-proof mutants docs docs-serve lock build

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# README's first steps make a .venv without what development needs: the stamp says that it was installed, and when.
# Whoever gives a BIN of their own looks after it.
DEV := $(if $(filter .venv/bin,$(BIN)),.venv/dev.stamp,$(BIN)/python)

.venv/dev.stamp: pyproject.toml constraints.txt
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

lint: $(DEV) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) ## Check the types of both packages
	$(BIN)/mypy reconciler webhooks

imports: $(DEV) ## Check that no module imports what lies above it
	$(BIN)/lint-imports

test: $(DEV) ## Run the tests
	$(BIN)/pytest

proofs: $(DEV) ## Run the tests that take minutes: kills, faults, whole runs
	$(BIN)/pytest -m proof

check: lint types imports test ## Style, types, imports, tests

bench: $(DEV) ## Measure the receiver and the pass (minutes; not part of check)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

calibration: $(DEV) ## Judge what releases state in invented worlds (half an hour; not part of check)
	$(BIN)/python -m tests.calibration

simulation: $(DEV) ## Live through a million sends with faults of every kind (40 minutes; not part of check)
	$(BIN)/python -m tests.simulation --sends 1000000 --seed 1

chaos: $(DEV) ## Kill, cut, fill and lock everything under load (eight minutes a seed; not part of check)
	$(BIN)/python -m tests.chaos --seed 1

campaign-proof: $(DEV) ## Send 200,000 messages with workers that are killed (half an hour; not part of check)
	CAMPAIGN_RECIPIENTS=200000 $(BIN)/pytest -q -s -m proof --timeout=0 tests/test_campaign_kill.py

laws-proof: $(DEV) ## Try the laws in 1,000 invented orders of things (ten minutes; not part of check)
	STATE_MACHINE_EXAMPLES=1000 $(BIN)/pytest -q --timeout=0 tests/test_state_machine.py

mutants: $(DEV) ## Break each law by a small patch: the test that holds it must fail
	$(BIN)/python -m tests.mutants

docs: $(DEV) ## Write what documents take from the code, and build their site into build/site
	$(BIN)/python -m tests.settings_page
	$(BIN)/python -m tests.provider_pages
	$(BIN)/properdocs build --strict

docs-serve: $(DEV) ## Show the site of the documents while they are being written
	$(BIN)/properdocs serve

lock: ## Write constraints.txt and requirements.lock anew, from pyproject.toml
	python3 -m venv build/lock && build/lock/bin/pip install -q uv
	build/lock/bin/uv pip compile -q pyproject.toml --extra dev --extra bench --python-version 3.11 --universal \
	  --no-header --no-annotate -o constraints.txt
	echo 'hatchling>=1.27' | build/lock/bin/uv pip compile -q pyproject.toml - --extra aws --extra embedded --extra otel \
	  --python-version 3.11 --universal --generate-hashes --no-header --no-annotate -o requirements.lock

build: ## Build the source archive, and the wheel from it, into dist/
	python3 -m venv build/hatch && build/hatch/bin/pip install -q 'hatchling>=1.27'
	rm -rf dist
	build/hatch/bin/python -m hatchling build -t sdist -d dist
	build/hatch/bin/pip wheel -q --no-deps --no-build-isolation -w dist dist/*.tar.gz
