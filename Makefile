# `make demo` and `make test` need only Python 3.11 or 3.12: they create a virtual environment on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LIGHT := .venv-light/.installed
LOWEST := .venv-lowest/.installed
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: demo test test-light test-lowest test-slow bench smoke dist lint audit docs clean

demo: $(INSTALLED)
	$(BIN)/lamella ask "When did the probe land on Titan?" --context examples/titan.txt --top-k 3
	$(BIN)/lamella ask "Who discovered Enceladus?" --context examples/titan.txt
	$(BIN)/lamella check demo:train demo:dev
	rm -rf runs/study
	$(BIN)/lamella sweep configs/study/heads.toml --out runs/study
	$(BIN)/lamella compare runs/study --baseline last
	$(BIN)/lamella report runs/study --out runs/study.html --overwrite

# Two workers with one thread each: most tensors in the tests are too small to benefit from threads. Bytecode is kept
# even where the environment turns it off: without it, each process compiles all tests and the package again.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

# The tests that need no torch, in an environment without it.
test-light: $(LIGHT)
	.venv-light/bin/python -m pytest -m "not slow" -n 2 --dist worksteal

# The tests with the lowest version of each dependency. Its own dependencies are today's, about which it may warn.
test-lowest: $(LOWEST)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= .venv-lowest/bin/python -m pytest -m "not slow" -n 2 --dist worksteal \
		-W ignore::DeprecationWarning

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

# All benchmarks, each beside its peer, and the page of their results; leave the machine idle meanwhile.
bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/bench.py --page docs/benchmarks.md

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Search the code for insecure calls, and the installed libraries for known vulnerabilities; the second needs a network.
audit: $(INSTALLED)
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml src
	$(BIN)/python .ci/audit

# A wheel and an sdist, in dist/.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m hatchling build

# Install the wheel without torch, and use it.
smoke: dist
	.ci/smoke dist/lamella-*.whl $(BIN)/python

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/picture.py
	-$(BIN)/python docs/page_picture.py
	$(BIN)/python docs/wild.py --page

clean:
	rm -rf $(VENV) .venv-light .venv-lowest runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Environments are updated when the dependencies change.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt -e ".[all,dev]"
	touch $@

$(LIGHT): pyproject.toml constraints.txt
	test -x .venv-light/bin/python || $(PYTHON) -m venv .venv-light
	.venv-light/bin/python $(PIP) -c constraints.txt -e ".[bundled,serve]" httpx2 hypothesis pytest pytest-xdist
	touch $@

$(LOWEST): pyproject.toml constraints-lowest.txt
	test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python $(PIP) -c constraints-lowest.txt -e ".[all,dev]"
	touch $@
