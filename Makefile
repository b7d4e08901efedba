# Each target does its own set-up: all it needs is Python 3.11 and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.ready
JOBS ?= auto
PYTEST := $(BIN)/python -m pytest
EVERSTEP := $(BIN)/python -P -m everstep

# A job is many processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo check lint types test fast split sim seeds computed processes integration chaos e2e hosts engines extended late torment fuzz mutants mutants-new branches bench recovery-times plan-tables docs dist matrix clean

help:
	@echo "make demo    kill workers while they train, and compare the bits with an undisturbed run"
	@echo "make check   lint, types and the fast tests (unit, property, traces, tidy)"
	@echo "make test    check and simulator, beside real processes, faults and the command line"
	@echo "make chaos   only the tests that inject faults into real processes"
	@echo "make extended  more seeds and all tests that take longer, in parts: what has passed is not run again"
	@echo "make late    fast tests with threads, messages and wakeups that come late: LATE_SEED for others"
	@echo "make torment SEEDS=0:500  random harm from outside to real jobs, seed by seed: what has passed is not run again"
	@echo "make fuzz    changed inputs for every parser, FUZZ_SECONDS (60) for each; goes on where it was"
	@echo "make mutants   plant bugs one by one, and show which test notices each; IDS=S2,S3 for some"
	@echo "make mutants-new SEED=1 COUNT=200 PATHS=protocol  plant bugs drawn from a seed, which nobody wrote"
	@echo "make branches  branches of the rules in protocol/ that no seed of the simulator takes"
	@echo "make bench   the benchmarks, JSON into bench/out"
	@echo "make recovery-times  bench/out/recovery.json, of a quiet run, into the package"
	@echo "make plan-tables  plans beside published figures, misses included"
	@echo "make docs    the site of all documents into build/docs/html: warnings are errors, marked blocks are executed"
	@echo "make dist    wheel and sdist into dist, the same bytes for the same commit"
	@echo "make matrix  digests of reference jobs with other versions of torch and Python, where they can be had"
	@echo "make clean   remove what was built and run, the environment included"

setup: $(STAMP)

# What a job needs. torch first and by itself: it decides which build the rest sees.
$(RUNS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e .
	touch $(RUNS)

# And what tests need.
$(STAMP): $(RUNS)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

demo: $(RUNS)
	$(EVERSTEP) demo

check: lint types fast

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

fast: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile tests/unit tests/property tests/traces tests/tidy

# Every cut of the models against the whole, in one process.
split: $(STAMP)
	$(PYTEST) -n $(JOBS) tests/split

# The tiers that compute beside `processes`; what has passed on the same tree is not run again, unless CI=true.
test: $(STAMP)
	$(BIN)/python tests/all_tiers.py

# fast, split and sim in one, those that take long first. Files end unevenly: one process more than there are processors.
computed: $(STAMP)
	$(PYTEST) -n $(or $(filter-out auto,$(JOBS)),$(shell expr $$(nproc) + 1)) --dist loadfile --no-loadscope-reorder \
	  tests/sim tests/split tests/property tests/unit/train tests/unit tests/traces tests/tidy

# How often savers and uploaders are killed; the test of the latter belongs to integration, too.
KILLS = 200

# Ceph RGW for the tests of object stores, where it can be had; else they use moto.
$(VENV)/.object-server: tests/install_object_server.sh $(STAMP)
	tests/install_object_server.sh
	touch $@

integration chaos e2e processes extended test: $(VENV)/.object-server

# etcd for the tests of jobs that another host takes over, where it can be had; else they are skipped.
$(VENV)/.etcd: tests/install_etcd.sh
	tests/install_etcd.sh
	touch $@

integration hosts processes extended test: $(VENV)/.etcd

# Chromium for the tests of the dashboard, where it can be had; else they are skipped.
$(VENV)/.browser: tests/install_browser.sh $(STAMP)
	tests/install_browser.sh
	touch $@

e2e processes extended test: $(VENV)/.browser

# Prometheus for the tests of the metrics, where it can be had; else they are skipped.
$(VENV)/.prometheus: tests/install_prometheus.sh $(STAMP)
	tests/install_prometheus.sh $(CURDIR)/$(VENV)/prometheus
	touch $@

# Grafana's schema package for the test of its dashboard, where npm can get it; else it is skipped.
$(VENV)/.grafana: tests/install_grafana_schema.sh $(STAMP)
	tests/install_grafana_schema.sh $(CURDIR)/$(VENV)/grafana
	touch $@

integration processes test: $(VENV)/.prometheus $(VENV)/.grafana
e2e: $(VENV)/.prometheus

# Real processes wait for each other and for clocks most of the time: more files at a time than there are processors.
PROCESSES ?= 4
processes: $(STAMP)
	EVERSTEP_TEST_KILLS=$(KILLS) $(PYTEST) -n $(PROCESSES) --dist loadfile \
	  tests/integration tests/chaos tests/e2e tests/engines

integration e2e: $(STAMP)
	$(PYTEST) -n $(JOBS) --dist loadfile tests/$@

# Three hosts that are network namespaces; skipped with the reason where there can be none.
hosts: $(STAMP)
	$(PYTEST) -n 0 tests/hosts

# Engines and launchers of others, where they can be had; else their tests are skipped. Most of them run in `extended`.
$(VENV)/.engines: tests/install_engines.sh $(STAMP)
	tests/install_engines.sh $(CURDIR)/$(VENV)/engines
	touch $@

extended: $(VENV)/.engines $(VENV)/.docs

engines: $(STAMP)
	$(PYTEST) -n 0 tests/engines

chaos: $(STAMP)
	EVERSTEP_TEST_KILLS=$(KILLS) $(PYTEST) -n $(JOBS) --dist loadfile tests/$@ tests/integration/test_object_kills.py

# Fixed seeds, and a few that nobody has seen before; one that fails says how it is replayed.
SEED ?= $(shell date +%s)
sim: $(STAMP)
	$(PYTEST) -n $(JOBS) tests/$@
	@$(MAKE) --no-print-directory seeds

seeds: $(STAMP)
	@echo "fresh seeds from $(SEED); the same again: make sim SEED=$(SEED)"
	$(EVERSTEP) sim --seeds 60 --start $(SEED)
	$(EVERSTEP) sim --seeds 30 --start $(SEED) --split
	$(EVERSTEP) sim --seeds 30 --start $(SEED) --leased
	$(EVERSTEP) sim --seeds 30 --start $(SEED) --operated
	$(EVERSTEP) sim --seeds 30 --start $(SEED) --sharded

# What takes longer, in parts.
extended: $(STAMP)
	$(BIN)/python tests/extended.py

# What takes an order for granted that nothing holds.
LATE_SEED ?= 1
late: $(STAMP)
	for what in threads wakes processes; do \
	  LATE=$$what LATE_SEED=$(LATE_SEED) PYTHONPATH=tests $(PYTEST) -p late -n $(JOBS) tests/unit || exit 1; done
	for what in messages words inbox looks; do \
	  LATE=$$what LATE_SEED=$(LATE_SEED) PYTHONPATH=tests $(PYTEST) -p late -n $(JOBS) tests/unit/runtime || exit 1; done

# Kills, stops, signals and commands by a process that is no part of the job; a line of JSON per seed.
SEEDS = 0:500
torment: $(STAMP)
	@$(BIN)/python tests/torment.py $(SEEDS)

# Inputs that others may have prepared, for longer; one parser by FUZZ=NAME.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	PYTHONPATH=tests $(BIN)/python tests/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ)

# Bugs that are planted one by one, in copies of the tree: which test notices each?
mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(IDS)

# Bugs that nobody wrote, COUNT of them drawn from SEED, in PATHS below src/everstep: which test or seed notices each?
mutants-new: SEED = 1
mutants-new: $(STAMP)
	$(BIN)/python tests/new_mutants.py --seed $(SEED) --count $(or $(COUNT),200) --paths "$(PATHS)" --tests "$(TESTS)"

# Branches of protocol/ that no seed of the simulator takes: those that are not listed with a reason.
SEEDS_OF_EACH ?= 1000
branches: $(STAMP)
	$(BIN)/python tests/sim_branches.py --seeds $(SEEDS_OF_EACH)

bench: $(STAMP)
	mkdir -p bench/out
	for name in recovery overhead cost memory control_plane pipeline observe; do $(BIN)/python bench/$$name.py > bench/out/$$name.json || exit 1; done

# What a quiet run of bench/recovery.py measured, into the package; plans read it there.
recovery-times: $(RUNS)
	@$(BIN)/python bench/keep_recovery.py

# Plans beside published figures; docs/planning.md holds the same.
plan-tables: $(RUNS)
	@$(BIN)/python bench/plan_tables.py

# The site of all documents.
$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

docs: $(VENV)/.docs
	$(BIN)/python docs/site/make_site.py

# Times of files come from the commit, so the same commit gives the same bytes.
dist: $(VENV)/.docs
	$(BIN)/python deploy/make_dist.py

# Reference jobs with each torch and Python that can be had.
matrix: $(RUNS)
	$(BIN)/python tests/matrix.py

clean:
	rm -rf $(VENV) build dist runs bench/out src/everstep.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
