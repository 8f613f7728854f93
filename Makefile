# Two commands: `make demo` shows what trakdask does, `make test` checks it. Both make .venv first.

PYTHON ?= python3
# Of tests, notebooks and pages that run at once: as many as there are cores, up to four. nproc would
# say OMP_NUM_THREADS.
JOBS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
HYPOTHESIS_PROFILE ?= dev

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCUMENTERS := $(VENV)/.installed-docs
# Twice quiet: pip's notes about its own settings drown its errors.
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
BENCHMARKS := $(filter-out tests/benchmarks/test_%,$(wildcard tests/benchmarks/[a-z]*.py))

# Where benchmarks write what they print, and how the names of the files begin.
RESULTS ?= tests/benchmarks/results/$(shell date +%F)

# One thread per BLAS or OpenMP pool: tests and workers are already as many as the cores.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MPLBACKEND := Agg
export HYPOTHESIS_PROFILE
# Hundreds of processes import the package and the tests: they compile them once.
unexport PYTHONDONTWRITEBYTECODE

# Continuous integration sets CI, and shows the lines that no test reaches where Python counts them
# itself, from 3.12 on: before, the tracer nearly doubles the time of the tests.
COVERAGE = $(if $(CI),$(shell $(PY) -c 'import sys; print("--cov --cov-report=term:skip-covered" * (sys.version_info >= (3, 12)))'))
export COVERAGE_CORE ?= sysmon

heading = @printf '\n== %s\n' '$(1)'

.PHONY: help install demo test test-faults benchmarks docs pictures lint format types imports wheel notebooks unit unit-portable unit-fakegpu unit-dask-array unit-query-planning clean

help:
	@echo 'make demo        attribute a digits classifier, and grade its scores'
	@echo 'make test        everything below that checks something'
	@echo 'make lint | types | imports | wheel | docs | notebooks | unit'
	@echo 'make unit-portable  some tests as on a processor without AVX-512'
	@echo 'make unit-fakegpu   tests of devices on one that stands for a GPU'
	@echo 'make unit-dask-array | unit-query-planning  some tests with other arrays than those of Dask'
	@echo 'make test-faults the long tests that make test leaves out: kills at many moments: minutes'
	@echo 'make format      let ruff fix what it can'
	@echo 'make benchmarks  measure everything, also traker, into files $(RESULTS)-...: hours'
	@echo 'make docs        build the documentation in docs/_build/html, and run the code on its pages'
	@echo 'make pictures    draw the pictures of README and pages again, by an installed Chromium'
	@echo 'make clean       remove what the other targets made, except .venv'

install: $(INSTALLED)

demo: $(INSTALLED)
	@$(PY) docs/demo.py

# Cheap checks first; the unit tests last, so that their summary closes the output. The pages take one
# core, and the longest: what else takes one core runs beside them, and then the notebooks.
test: $(DOCUMENTERS)
	@$(MAKE) --no-print-directory lint imports
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target docs types wheel notebooks
	@$(MAKE) --no-print-directory unit

lint: $(INSTALLED)
	$(call heading,style: ruff)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet .
	@echo clean

format: $(INSTALLED)
	@$(PY) -m ruff check --fix --quiet .
	@$(PY) -m ruff format .

types: $(INSTALLED)
	$(call heading,types: mypy)
	@$(PY) -m mypy

imports: $(INSTALLED)
	$(call heading,import layers: import-linter$(comma) and how far calls walk)
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) docs/walks.py --check

wheel: $(INSTALLED)
	$(call heading,wheel: build$(comma) install beside the environment$(comma) read every kernel file)
	@$(PY) -m pytest --quiet tests/test_packaging.py

notebooks: $(INSTALLED)
ifneq ($(NOTEBOOKS),)
	$(call heading,notebooks: nbmake)
	@$(PY) -m pytest --quiet -n $(JOBS) --nbmake --nbmake-timeout=1800 $(NOTEBOOKS)
endif

# What computes gradients and projections, as on an older processor: the kernels of torch, oneDNN, MKL
# and numba differ there, and with them the last bits of a gradient.
unit-portable: $(INSTALLED)
	$(call heading,gradients and projections without AVX-512: pytest)
	@ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 NUMBA_CPU_NAME=generic \
		$(PY) -m pytest --quiet -n $(JOBS) tests/models/test_gradients.py tests/models/test_hooks.py \
		tests/featurization tests/projection/test_words.py

# A device of host memory that is as strict as a GPU: tests/fakegpu.
unit-fakegpu: $(INSTALLED)
	$(call heading,gradients$(comma) fits and scores on a device that stands for a GPU: pytest)
	@TESTS_WITH=fakegpu $(PY) -m pytest --quiet -n $(JOBS) --dist loadfile tests/devices

unit: $(INSTALLED)
	$(call heading,unit$(comma) property$(comma) doctest and process-cluster tests: pytest)
	@$(PY) -m pytest --quiet -n $(JOBS) --dist loadfile --no-loadscope-reorder -m 'not faults' --ignore=tests/test_packaging.py $(COVERAGE)

# The package dask-array in the place of Dask's arrays, as xarray lets it; make unit tries less of it.
unit-dask-array: $(INSTALLED)
	$(call heading,queries and stores with dask-array: pytest)
	@TESTS_WITH=dask-array $(PY) -m pytest --quiet -n $(JOBS) -m 'not faults' tests/test_end_to_end.py tests/test_export.py \
		tests/attribution tests/storage/test_saving.py tests/storage/test_appending.py tests/storage/test_dropping.py

# Dask's own arrays of expressions are refused, as long as they lack functions.
unit-query-planning: $(INSTALLED)
	$(call heading,Dask with array.query-planning on: pytest)
	@$(PY) -m pytest --quiet tests/test_dask_expressions.py -k query_planning

test-faults: $(INSTALLED)
	$(call heading,faults at many moments: pytest)
	@HYPOTHESIS_PROFILE=nightly $(PY) -m pytest --quiet -n $(JOBS) -m faults tests

# What has its file is not measured again, so that the hours need not be in one piece.
benchmarks: $(patsubst tests/benchmarks/%.py,$(RESULTS)-%.txt,$(BENCHMARKS))

$(RESULTS)-%.txt: | $(INSTALLED)
	@mkdir -p $(@D)
	$(call heading,$@)
	@$(PY) tests/benchmarks/_machine.py tests/benchmarks/$*.py > $@.part
	@mv $@.part $@
	@cat $@

# In one process: kernels that run the pages now and then lose their sockets where it was forked.
docs: $(DOCUMENTERS)
	$(call heading,documentation: sphinx$(comma) which runs the code on its pages)
	@$(PY) -m sphinx -W --keep-going --nitpicky -q -b html docs docs/_build/html
	@echo docs/_build/html/index.html

# The stories are drawn from the outputs of notebooks, the explorer from what the demo has written.
pictures: demo docs
	@for drawn in house leaderboard stories explorer dashboard; do $(PY) docs/draw_$$drawn.py || exit; done

clean:
	rm -rf docs/_build docs/jupyter_execute docs/notebooks docs/reference/generated
	rm -rf build dist demo-output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find trakdask tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} +

# --------------------------------------------------------------------------------- the environment

comma := ,

# The build tools first, by the same pins: the isolated builds that pip would make otherwise follow none.
$(INSTALLED): pyproject.toml constraints.txt
	$(call heading,environment: $(VENV) (minutes$(comma) the first time))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); trakdask needs Python 3.11 or newer;" \
			"try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) hatchling editables setuptools
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev,demo]'
	@touch $@

$(DOCUMENTERS): $(INSTALLED)
	@$(PIP_INSTALL) --editable '.[dev,demo,docs]'
	@touch $@
