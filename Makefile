# kvcar: everything a person needs, on a machine with python3.11+ and make.
#   make demo [ARGS=--stay]   three emulated engines, kvcar and a real Envoy, with a workload; --stay leaves it up
#   make test [ARGS=...]      the whole suite, real Envoy and real ZMQ included
#   make lint                 ruff and mypy --strict
#   make audit                known vulnerabilities of what kvcar needs; fails where there is a fixed version
#   make faults               every fault through a real Envoy, some minutes; writes docs/reliability.md
#   make soak [SECONDS=1800]  churn, restarts, lost events and aborts at once; kvcar must hold no more at the end
#   make bench [ARGS=--check] benchmarks against peers; writes bench.json, bench.md, plots; --check: what got worse
SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
ARGS ?=

.PHONY: help demo test lint audit bench faults soak clean
help:
	@sed -n '2,8p' Makefile | sed 's/^# \{0,1\}//'

demo: $(VENV)/.demo
	@exec $(PY) -m examples.local.demo $(ARGS)

test: $(VENV)/.test
	@$(PY) -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.test
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

audit: $(VENV)/.audit
	@$(PY) -m tests.audit

bench: $(VENV)/.bench
	@$(PY) -m tests.bench $(ARGS)

faults: $(VENV)/.test # as root it adds the half-open network, the full file system and the memory limit
	@rm -f $(VENV)/.faults.run
	@KVCAR_FAULTS=$(VENV)/.faults.run $(PY) -m pytest tests/faults -m '' $(ARGS)
	@mv $(VENV)/.faults.run $(VENV)/.faults.jsonl
	@$(PY) -m tests.faults.page $(VENV)/.faults.jsonl $(VENV)/.soak.json docs/reliability.md

SECONDS := 1800
soak: $(VENV)/.test
	@rm -f $(VENV)/.soak.json
	@KVCAR_SOAK=$(VENV)/.soak.json KVCAR_SOAK_SECONDS=$(SECONDS) $(PY) -m pytest tests/soak $(ARGS)
	@[ ! -f $(VENV)/.faults.jsonl ] || $(PY) -m tests.faults.page $(VENV)/.faults.jsonl $(VENV)/.soak.json docs/reliability.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(PY):
	@[ -n "$(PYTHON)" ] || { echo "kvcar needs python 3.11 or newer; none was found on PATH (set PYTHON=/path/to/python)" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(MAKE) -s venv-package && $(PYTHON) -m venv $(VENV); }
	@touch $(PY)

.PHONY: venv-package
venv-package: # Debian and Ubuntu ship python3 without venv
	@if command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ]; then \
		echo "installing python3-venv"; apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; \
	else echo "python's venv module is missing; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; fi

$(VENV)/.demo $(VENV)/.test $(VENV)/.audit $(VENV)/.bench: $(VENV)/.%: pyproject.toml | $(PY)
	@echo "installing kvcar[$*] into $(VENV) (once; one to five minutes, without a word)"
	@$(PY) -m pip install -q --disable-pip-version-check --root-user-action=ignore --progress-bar off -e '.[$*]'
	@touch $@
