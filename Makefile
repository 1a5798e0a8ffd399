# headrace: what a newcomer and CI run. Every target makes .venv first where it needs it.
# `make` alone lists the targets.

PYTHON ?= python3
MODEL  ?= demo
PORT   ?= 50051

BIN       := .venv/bin
INSTALLED := .venv/.installed
PYTEST    := $(BIN)/python -m pytest -q

export PYTHON
# As the core sets it for itself: tests that compute in their own process must not collapse beside a busy one.
export GOMP_SPINCOUNT ?= 1000

.PHONY: help setup demo test campaign-short campaign check protos contract-image bench up images clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

$(INSTALLED): pyproject.toml constraints.txt scripts/setup.sh
	@scripts/setup.sh

setup: $(INSTALLED) ## make .venv with everything that development needs

demo: $(INSTALLED) ## fetch the demo model, start both services, ask one question, stop them
	@$(BIN)/python scripts/demo.py

test: $(INSTALLED) ## all tests but the long ones
	$(PYTEST) -m "not campaign"

campaign-short: $(INSTALLED) ## fuzz, chaos, soak and image tests, short form (CI runs this)
	CAMPAIGN=short $(PYTEST) -m campaign

campaign: $(INSTALLED) ## the same, long form; results in .make/campaign.xml
	CAMPAIGN=long $(PYTEST) -m campaign --junit-xml .make/campaign.xml

check: $(INSTALLED) ## linters, types, contract, generated code, Dockerfiles, compose files
	@scripts/check.sh

protos: $(INSTALLED) ## generate the Python code of the protos
	@scripts/generate_protos.sh

contract-image: $(INSTALLED) ## write the image of a new contract version to protos/released
	@scripts/contract_image.sh

bench: $(INSTALLED) ## measure the host side, then both services under load
	@$(BIN)/python scripts/bench.py

up: $(INSTALLED) ## serve MODEL (demo) on PORT (50051) until Ctrl-C
	@$(BIN)/headrace up --model $(MODEL) --port $(PORT)

images: $(INSTALLED) ## build both container images
	@$(BIN)/python scripts/images.py

clean: ## remove .venv and everything generated that git ignores
	rm -rf .venv build dist src/headrace.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .make
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
