# What a developer runs. Needs Python >= 3.11, make and the system's package manager; everything
# else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

# Half of the tests' time is waiting, so they are more at once than there may be processors; files
# in their order, in which a long one comes first.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

# What make test-matrix is for; a Python that is not here is left out.
POSTGRESQL ?= 14 15 16 17 18
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test lint types pgtap pytest test-pgbouncer test-metrics test-long test-matrix coverage faults bench bench-full migration check-migration clean

help: ## this list
	@echo "pgsched: make ..."
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' Makefile

demo: .venv/demo.done ## real work on a private PostgreSQL, for some seconds
	@exec $(BIN)/pgsched demo

test: .venv/pgtap/pgtap.sql .venv/dev.done lint types check-migration pgtap pytest ## everything that has to pass
	@tests=$$(sed -n 's/.*<testsuite .* tests="\([0-9]*\)".*/\1/p' .venv/pytest.xml); \
	skipped=$$(sed -n 's/.*<testsuite .* skipped="\([0-9]*\)".*/\1/p' .venv/pytest.xml); \
	[ "$$skipped" = 0 ] && skips= || skips=" ($$skipped skipped)"; \
	echo "All tests passed: $$(cat .venv/pgtap.txt)," \
	  "$$((tests - skipped)) pytest tests$$skips, lint and types clean."

lint: .venv/dev.done ## ruff's rules and format
	@echo "Linting (ruff)"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/dev.done ## mypy --strict
	@echo "Checking types (mypy)"
	@$(BIN)/mypy

pgtap: .venv/dev.done .venv/pgtap/pgtap.sql ## the SQL tests, on a private PostgreSQL
	@echo "Running the SQL tests (pg_prove)"
	@$(BIN)/python tests/run_pgtap.py --summary .venv/pgtap.txt

pytest: .venv/dev.done .venv/pgtap/pgtap.sql ## the Python tests, on a private PostgreSQL
	@echo "Running the Python tests (pytest)"
	@$(BIN)/python -m pytest $(PARALLEL) --junitxml .venv/pytest.xml

test-pgbouncer: .venv/dev.done .venv/pgbouncer/pgbouncer ## the tests through a transaction-mode pooler
	@echo "Running the tests through PgBouncer (pytest)"
	@$(BIN)/python -m pytest -m "pgbouncer and not long"

test-metrics: .venv/dev.done .venv/promtool/promtool ## the metrics, as Prometheus' promtool sees them
	@echo "Checking the metrics (promtool)"
	@$(BIN)/python -m pytest -m promtool

test-long: .venv/dev.done .venv/pgtap/pgtap.sql .venv/pgbouncer/pgbouncer ## the tests that take long
	@echo "Running the long tests (pytest)"
	@$(BIN)/python -m pytest -m long $(PARALLEL)

test-matrix: .venv/dev.done .venv/pgtap/pgtap.sql $(POSTGRESQL:%=.venv/postgresql/%/done) ## the tests on several versions of PostgreSQL and of Python
	@$(BIN)/python tests/run_matrix.py --postgresql $(POSTGRESQL:%=.venv/postgresql/%) \
	  --pythons $(PYTHONS) -- $(PARALLEL)

coverage: .venv/dev.done .venv/pgtap/pgtap.sql .venv/plpgsql_check/done ## the tests on a server with plpgsql_check, and what code they run
	@PGSCHED_PG_BIN=$(CURDIR)/.venv/plpgsql_check/bin $(BIN)/python tests/run_coverage.py $(PARALLEL)

faults: .venv/dev.done .venv/pgbouncer/pgbouncer ## half an hour of work under faults, every task accounted for
	@$(BIN)/python tests/faults/run.py $(FAULTS)

bench: .venv/dev.done .venv/peers/done ## how fast it is, beside yardsticks and other task queues, in ten minutes
	@$(BIN)/python bench/bench.py --out .venv/bench.json

bench-full: .venv/dev.done .venv/peers/done .venv/pgbouncer/pgbouncer ## the same with all sizes and rounds, in an hour or two
	@$(BIN)/python bench/bench.py --full --out .venv/bench.json

migration: .venv/venv.done ## what changed in sql/schema/, into the newest migration
	@echo "Writing the newest of sql/migrations/"
	@$(BIN)/python sql/make_migration.py

check-migration: .venv/venv.done
	@echo "Comparing sql/migrations/ with sql/schema/"
	@$(BIN)/python sql/make_migration.py --check

clean: ## remove .venv and everything else that was built
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache
	find pgsched tests -name __pycache__ -exec rm -rf {} +

# Runs $(1) with its output in a log, which is shown only when it fails.
quietly = { $(1); } > .venv/setup.log 2>&1 || { cat .venv/setup.log >&2; exit 1; }

# A Debian python3 comes without ensurepip; python3.N-venv has it.
.venv/venv.done:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pgsched needs Python 3.11 or newer as $(PYTHON); try make PYTHON=python3.13" >&2; exit 1; }
	@mkdir -p .venv
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "$(PYTHON) cannot make a virtual environment: install $$package" >&2; exit 1; fi; \
	  echo "Installing $$package (apt-get)"; \
	  export DEBIAN_FRONTEND=noninteractive; \
	  $(call quietly,apt-get install -y --no-install-recommends $$package || \
	    { apt-get update && apt-get install -y --no-install-recommends $$package; }); }
	@echo "Creating .venv"
	@$(call quietly,$(PYTHON) -m venv .venv)
	@touch $@

.venv/%.done: .venv/venv.done pyproject.toml
	@echo "Installing pgsched[$*] and what it needs into .venv (pip)"
	@$(call quietly,$(BIN)/python -m pip install --disable-pip-version-check -e '.[$*]')
	@touch $@

.venv/pgtap/pgtap.sql: pgtap/install.sh | .venv/venv.done
	@echo "Fetching pgTAP into .venv/pgtap"
	@sh pgtap/install.sh .venv/pgtap
	@touch $@

.venv/postgresql/%/done: tests/install_postgresql.sh | .venv/venv.done
	@echo "Fetching PostgreSQL $* into .venv/postgresql/$*"
	@PYTHON=$(BIN)/python sh tests/install_postgresql.sh .venv/postgresql/$* $*
	@touch $@

.venv/peers/done: bench/install_peers.sh | .venv/venv.done
	@PYTHON=$(BIN)/python sh bench/install_peers.sh .venv/peers
	@touch $@

.venv/plpgsql_check/done: tests/install_plpgsql_check.sh tests/install_postgresql.sh | .venv/venv.done
	@echo "Fetching PostgreSQL with plpgsql_check into .venv/plpgsql_check"
	@PYTHON=$(BIN)/python sh tests/install_plpgsql_check.sh .venv/plpgsql_check
	@touch $@

.venv/pgbouncer/pgbouncer: tests/install_pgbouncer.sh | .venv/venv.done
	@echo "Fetching PgBouncer into .venv/pgbouncer"
	@sh tests/install_pgbouncer.sh .venv/pgbouncer
	@touch $@

.venv/promtool/promtool: tests/install_promtool.sh | .venv/venv.done
	@echo "Fetching promtool into .venv/promtool"
	@sh tests/install_promtool.sh .venv/promtool
	@touch $@
