# Every target does its own set-up the first time and starts at once from then on. `make` alone shows them.
# What an environment contains: constraints/. How one is made: constraints/install.py.

# The Python that environments are made with: the first of these that runs and is 3.11 to 3.13; or PYTHON=/path/to/python.
ifdef PYTHON
PYTHONS := $(PYTHON)
else
PYTHONS := python3.11 python3.12 python3.13 python3
endif
VENV := .venv
PY := $(VENV)/bin/python
SUITABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# How many tests run at a time: three for two CPUs, because many tests wait.
WORKERS ?= $(or $(shell n=$$(nproc 2>/dev/null) && echo $$((n * 3 / 2))),logical)
ENV_FILES := pyproject.toml $(wildcard packages/*/pyproject.toml) constraints/install.py constraints/dev.txt

# Packages are installed without bytecode, which Python then writes for what is used. Where that is forbidden, each start
# would compile torch again (10 s instead of 4).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm test check format bench test-all nightly release lock clean rebuild

help:
	@echo 'make demo                          train an agent on this machine; ARGS="--seed 1" for options'
	@echo 'make demo-vllm                     the same with a real vLLM as the sampler (x86-64 Linux, 3.5 GB)'
	@echo 'make test                          the tests (under 5 minutes); ARGS="-k lifecycle -x" for pytest'
	@echo 'make check                         formatting, lint, types, the layer rule, the snippets in the docs'
	@echo 'make format                        put formatting and imports right'
	@echo 'make bench NAME=store              measure, against a peer where it can be installed; no NAME: list them'
	@echo 'make test-all GROUP=faults         a larger group of tests; no GROUP: every group this machine can run'
	@echo 'make nightly ARGS="--part 1/5"      every group, in parts of at most 70 minutes; no ARGS: what came of them'
	@echo 'make release                       build and check what a release publishes, in dist/; it publishes nothing'
	@echo 'make lock ENV=dev                  resolve an environment anew, writes constraints/dev.txt'
	@echo 'make clean                         delete the environments and the caches'
	@echo
	@echo 'Needs Python 3.11 to 3.13 and a package index. PYTHON=... chooses the Python.'

# $(call with_python,ARGUMENTS): run a script of constraints/ with the first suitable Python.
define with_python
@for python in $(PYTHONS); do \
	if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then exec "$$python" $(1); fi; \
done; \
echo 'No Python 3.11, 3.12 or 3.13 with venv and ensurepip among: $(PYTHONS). Try make PYTHON=/path/to/python3.11' >&2; \
exit 1
endef

# A stamp is written when its environment is complete, so it can be trusted as long as the environment is there.
ifeq ($(wildcard $(PY)),)
MISSING := rebuild
endif

$(VENV)/.installed-demo: constraints/demo.in $(ENV_FILES) $(MISSING)
	$(call with_python,constraints/install.py demo)

$(VENV)/.installed-dev: constraints/dev.in constraints/dev-optional.in $(ENV_FILES) $(MISSING)
	$(call with_python,constraints/install.py dev)

demo: $(VENV)/.installed-demo
	@$(VENV)/bin/leyden demo $(ARGS)

# Fewer steps and measured games than make demo, so that it ends within ten minutes on two CPUs.
demo-vllm: $(VENV)/.installed-demo
	$(call with_python,constraints/install.py vllm)
	@$(VENV)/bin/leyden demo --engine vllm --vllm-python .venvs/vllm/bin/python --steps 30 --games 200 $(ARGS)

test: $(VENV)/.installed-dev
	@$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

check: $(VENV)/.installed-dev
	@echo '1/4 formatting and lint'
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/ruff check
	@echo '2/4 types (a minute on an idle core)'
	@$(VENV)/bin/basedpyright --pythonpath $(PY)
	@echo '3/4 layers'
	@$(VENV)/bin/lint-imports
	@echo '4/4 programs and links of the docs (a minute on two idle cores)'
	@$(PY) -m pytest -q -n $(WORKERS) --dist worksteal tests/docs

format: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

bench: $(VENV)/.installed-dev
	@$(PY) -m benchmarks --prepare $(NAME) $(ARGS)

test-all: $(VENV)/.installed-dev
	@$(PY) tests/groups.py $(ARGS) $(GROUP)

nightly: $(VENV)/.installed-dev
	@$(PY) tests/nightly.py $(ARGS)

release:
	$(call with_python,constraints/install.py release)
	@.venvs/release/bin/python tools/release.py $(ARGS)

lock:
	$(call with_python,constraints/install.py --lock $(or $(ENV),dev))

clean:
	rm -rf $(VENV) .venvs build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
