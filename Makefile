# make demo, make test: all that a fresh machine needs (git, make, python3 >= 3.11 with venv). Everything stays in the checkout and in the user's caches.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= $(shell ls /dev/nvidia[0-9]* /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1 || echo cpu)
ifeq ($(JAX_PLATFORMS),)
unexport JAX_PLATFORMS
endif

.PHONY: help demo test test-slow lint format peers bench compile-tpu lock clean
help:
	@echo "make demo         train REPPO beside PPO on four pendulums, with figures and a film (about six minutes on two cores)"
	@echo "make test         all tests but the slow ones"
	@echo "make test-slow    the tests that take minutes"
	@echo "make lint         ruff, format check, type check, layering"
	@echo "make peers        build the environments of the peers that benchmarks time us beside"
	@echo "make bench        time every built system beside its peers"
	@echo "make compile-tpu  compile every built system's paper-scale step for a v5e:16x16 pod, without a TPU"
	@echo "make lock         resolve requirements.lock anew"

$(BIN)/.ready: requirements.lock pyproject.toml setup.py
	@$(PYTHON) scripts/bootstrap.py $(VENV)
	@touch $@

demo: $(BIN)/.ready
	@$(BIN)/papyrax run reppo --preset cpu

test: $(BIN)/.ready
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(BIN)/.ready
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

lint: $(BIN)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python scripts/typecheck.py
	@$(BIN)/python -m pytest -q tests/test_layering.py

format: $(BIN)/.ready
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

peers: $(BIN)/.ready
	@for f in scripts/peers/*.txt; do $(PYTHON) scripts/bootstrap.py .peers/$$(basename $$f .txt) $$f || exit 1; done

bench: $(BIN)/.ready
	@for s in $$($(BIN)/python -m papyrax.scripts.built bench); do $(BIN)/papyrax bench $$s || exit 1; done

compile-tpu: $(BIN)/.ready
	@for s in $$($(BIN)/python -m papyrax.scripts.built compile_targets); do $(BIN)/papyrax compile $$s --topology v5e:16x16 || exit 1; done

lock:
	@$(PYTHON) scripts/bootstrap.py --lock

clean:
	rm -rf $(VENV) .peers .uv build *.egg-info
