# make demo   trains a real model on this machine        make check   linters, types, import laws
# make test   the tests (make test-all: slow ones too)   make setup   only the environment
# Needs Linux x86_64, Python 3.11 with venv, make, git. Everything is installed into .venv and .venv-protos here.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
LOCKS := deploy/constraints
BIN := .venv/bin
# Compiled files halve the start of every process, and a run starts many.
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps
# torch with a local version tag is not on the public index of Python packages.
TORCH := $(shell grep '^torch==' $(LOCKS)/cpu.lock)
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# The contracts of the last release; `make release-protos` makes those of now the next.
RELEASED := protos/released.binpb
PROTOS := $(shell find protos/antiphon -name '*.proto')
DEMO_RUN := addition-$(shell date +%m%d-%H%M%S)

.DELETE_ON_ERROR:
.PHONY: help setup protos dev check test test-all demo clean release-protos

help:
	@head -3 Makefile | cut -c3-

setup: .venv/runtime.stamp protos

protos: protos/.generated.stamp

dev: setup .venv/dev.stamp

.venv/pip.stamp: $(LOCKS)/bootstrap.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and \
	    "make: the locks are for Python 3.11, got " + sys.version.split()[0] + "; call make PYTHON=/path/to/python3.11")'
	@echo "== .venv: Python environment"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

.venv/runtime.stamp: $(LOCKS)/cpu.lock pyproject.toml .venv/pip.stamp
	@echo "== .venv: torch"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCH) \
	    || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --index-url $(TORCH_INDEX) $(TORCH)
	@echo "== .venv: $(shell grep -vc '^#' $(LOCKS)/cpu.lock) packages of $(LOCKS)/cpu.lock"
	@$(INSTALL) --compile-bytecode -r $(LOCKS)/cpu.lock
	@$(INSTALL) --no-build-isolation -e .
	@touch $@

.venv/dev.stamp: $(LOCKS)/dev.lock .venv/runtime.stamp
	@echo "== .venv: tools of $(LOCKS)/dev.lock"
	@$(INSTALL) --compile-bytecode -r $(LOCKS)/dev.lock
	@touch $@

.venv/demo.stamp: $(LOCKS)/demo.lock .venv/runtime.stamp
	@echo "== .venv: model of $(LOCKS)/demo.lock"
	@$(INSTALL) -r $(LOCKS)/demo.lock
	@touch $@

.venv-protos/pip.stamp: $(LOCKS)/protos.lock .venv/pip.stamp
	@echo "== .venv-protos: proto compiler"
	@$(PYTHON) -m venv --without-pip .venv-protos
	@$(BIN)/uv pip install --quiet --python .venv-protos/bin/python --no-deps -r $<
	@touch $@

# Generated beside the sources and not committed. What an older tree left is removed first.
protos/.generated.stamp: $(PROTOS) .venv-protos/pip.stamp
	@find protos -name '*_pb2*.py' -delete -o -name '*_pb2*.pyi' -delete
	@cd protos && ../.venv-protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
	    $(PROTOS:protos/%=%)
	@touch $@

check: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(RELEASED)
	$(BIN)/pytest -q tests/unit/project

release-protos: dev
	$(BIN)/buf breaking --against $(RELEASED)
	$(BIN)/buf build --exclude-source-info -o $(RELEASED)

test: dev
	$(BIN)/pytest -m "not slow" -n 2 --durations=15

test-all: dev
	$(BIN)/pytest --durations=15

demo: setup .venv/demo.stamp
	$(BIN)/python recipes/demo/prepare_model.py
	$(BIN)/python recipes/demo/make_data.py
	$(BIN)/antiphon train recipes/demo/addition.yaml run.name=$(DEMO_RUN) \
	    model.dtype=$$($(BIN)/python recipes/demo/pick_dtype.py)
	@echo
	@$(BIN)/python recipes/demo/report.py runs/$(DEMO_RUN)

clean:
	rm -rf .venv .venv-protos protos/.generated.stamp runs models data
	find protos -name '*_pb2*.py' -delete -o -name '*_pb2*.pyi' -delete
