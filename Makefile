# Everything a contributor or CI needs. Each target prepares what it depends on.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
PIP := $(BIN)/python -m pip --quiet --no-input --disable-pip-version-check
UV_VERSION := 0.13.9

# The newest Python that runs, is recent enough and can make a virtual environment. A name on
# PATH proves nothing: version managers install stubs that fail when called.
PYTHONS := python3.13 python3.12 python3.11 python3
PYTHON_CHECK := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
.PHONY: help setup binaries cluster test lint format requirements clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' Makefile

setup: ## Create .venv with the locked dependencies and weightsync itself, editable
	@set -eu; \
	key=$$(cat requirements/dev.txt pyproject.toml | cksum); \
	if [ -f $(STAMP) ] && [ "$$(cat $(STAMP))" = "$$key" ] && $(BIN)/python -c '' 2>/dev/null; then exit 0; fi; \
	rm -f $(STAMP); \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		python=; \
		for name in $(PYTHONS); do \
			if $$name -c '$(PYTHON_CHECK)' >/dev/null 2>&1; then python=$$name; break; fi; \
		done; \
		[ -n "$$python" ] || { echo "setup: needs Python 3.11 or newer with venv, on PATH" >&2; exit 1; }; \
		echo "setup: creating $(VENV) with $$($$python --version)"; \
		$$python -m venv --clear $(VENV); \
	fi; \
	echo "setup: installing requirements/dev.txt"; \
	$(PIP) install --require-hashes --no-deps -r requirements/dev.txt; \
	echo "setup: installing weightsync, editable"; \
	$(PIP) install --no-deps --no-build-isolation -e .; \
	echo "$$key" > $(STAMP)

binaries: setup ## Find, download or build etcd and Kubernetes for the development cluster
	@$(BIN)/python -m devcluster binaries >/dev/null

cluster: setup ## Run a Kubernetes cluster on this machine until Ctrl-C; prints a KUBECONFIG
	@$(BIN)/python -m devcluster up

test: setup binaries ## Run the tests
	@set -eu; echo "test: pytest"; $(BIN)/python -m pytest -q -n 2

lint: setup ## Check style, formatting, types and import layers
	@set -eu; \
	echo "lint: ruff check"; $(BIN)/ruff check; \
	echo "lint: ruff format"; $(BIN)/ruff format --check; \
	echo "lint: mypy"; $(BIN)/mypy; \
	echo "lint: import layers"; $(BIN)/lint-imports

format: setup ## Apply the formatter and the safe fixes
	@set -eu; $(BIN)/ruff check --fix; $(BIN)/ruff format

# One lock serves every platform and Python version (markers tell them apart). uv is needed for
# nothing else, so it is installed only here.
requirements: setup ## Lock the dependencies of pyproject.toml again, each to its newest version
	@set -eu; \
	echo "requirements: locking with uv $(UV_VERSION)"; \
	$(PIP) install uv==$(UV_VERSION); \
	UV_CUSTOM_COMPILE_COMMAND="make requirements" $(BIN)/uv pip compile --quiet --upgrade \
		--generate-hashes --universal --python-version 3.11 pyproject.toml --extra dev \
		--no-emit-index-url --no-emit-find-links -o requirements/dev.txt

clean: ## Remove what was built; the cache of real checkpoints stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
