# Every job a person or CI runs. `make help` lists them.
# Fresh machine: `make demo` (sees it work) and `make test` (every test CI runs).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GATEWAY_SOURCES := $(shell find gateway proto -name '*.rs' -o -name '*.c' -o -name '*.toml' -o -name '*.proto' -o -path '*/assets/*' 2>/dev/null) Cargo.toml Cargo.lock
GENERATED := worker/m3stack/worker/v1

.PHONY: help setup build demo serve test test-rust test-python lint proto soak chaos bench release clean

help: ## list the jobs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.packages ## install what is missing: system tools, then a virtual environment

$(VENV)/.system:
	@scripts/install-system.sh
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.packages: pyproject.toml scripts/pins.txt | $(VENV)/.system
	@echo "==> Python packages into $(VENV) (torch is about 3 GB)"
	@$(BIN)/python scripts/install_packages.py pyproject.toml scripts/pins.txt test lint
	@touch $@

build: $(VENV)/.built ## compile the gateway and install m3stack into the virtual environment

$(VENV)/.built: $(VENV)/.packages $(GATEWAY_SOURCES)
	@echo "==> compiling the gateway (a few minutes the first time)"
	@cargo build --locked -p gateway-server --bins
	@env -u CONDA_PREFIX VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/maturin develop --locked --skip-install --quiet
	@$(BIN)/python scripts/link_package.py
	@touch $@

demo: build ## start everything, send a text, a picture and a clip, print the answers, stop
	@$(BIN)/python examples/demo.py

serve: build ## gateway and worker on the built-in model; stays up until Ctrl-C
	@$(BIN)/m3stack up

test: lint test-rust test-python ## every test CI runs

test-rust: build ## unit, property and HTTP tests of the gateway
	@cargo test --locked --workspace --exclude gateway-python --quiet

$(VENV)/.node: tests/node/package-lock.json $(VENV)/.packages
	@$(BIN)/python tests/node/install.py
	@touch $@

test-python: build $(VENV)/.node ## the worker, parity with transformers, and the whole system end to end
	@OMP_NUM_THREADS=1 $(BIN)/pytest

lint: build ## formatting, lints, types, dependencies, line budget, generated code, images
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	@$(BIN)/ruff format --check worker tests examples scripts
	@$(BIN)/ruff check worker tests examples scripts
	@$(BIN)/pyright
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/buf lint
	@$(BIN)/python scripts/check_tree.py
	@$(BIN)/python scripts/supply.py check
	@$(BIN)/python scripts/make_dashboard.py --check
	@$(BIN)/hadolint --config deploy/hadolint.yaml deploy/Dockerfile.*

proto: $(VENV)/.packages ## regenerate the Python side of the proto
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=worker --pyi_out=worker \
	  --grpc_python_out=worker proto/m3stack/worker/v1/worker.proto

soak: build ## the long tests: load, chaos, fuzzing
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m soak --timeout 1800

SECONDS_OF_FAULTS ?= 1800
chaos: build ## faults against a fleet in network namespaces (root); figures into docs/bench/chaos.json
	@unshare --net --mount $(BIN)/python -m tests.chaos.run --seconds $(SECONDS_OF_FAULTS) \
	  --report docs/bench/chaos.json

bench: build ## the gateway in release, against a scripted worker
	@cargo build --locked --release -p gateway-server --bin m3stack-gateway --examples
	@$(BIN)/m3stack bench gateway

# zig brings the C library of old systems along: the wheel runs wherever glibc is 2.28 or newer
release: $(VENV)/.packages ## an optimised wheel and its bill of materials in dist/, the gateway in target/release/
	@$(BIN)/python scripts/install_packages.py pyproject.toml scripts/pins.txt release
	@rm -rf dist
	@cargo build --locked --release -p gateway-server --bin m3stack-gateway
	@PATH="$(abspath $(BIN)):$$PATH" maturin build --locked --release --zig \
	  --compatibility manylinux_2_28 --out dist
	@$(BIN)/python scripts/wheel.py check dist/*.whl
	@$(BIN)/python scripts/wheel.py try dist/*.whl
	@$(BIN)/python scripts/supply.py sbom dist/m3stack.cdx.json

clean: ## remove what was built
	@rm -rf target dist $(VENV)
