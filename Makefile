# Everything a person types here. `make` alone lists it.
#
# A finished step leaves a stamp whose name holds a digest of what went into it, so a step runs again
# when its input changed, and only then: a touched file or a switched branch costs nothing, a removed
# patch is noticed. The verbs of tools/ are safe to repeat; the stamps spare the time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Every step waits for the one before it, and two of them would write over each other's output.
.NOTPARALLEL:

# The environment comes from the lock alone; nothing calls home. What Python has compiled it keeps:
# else every process of vLLM compiles a thousand files again.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export DO_NOT_TRACK := 1
export PRE_COMMIT_HOME := build/pre-commit

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3),python3)
PY := .venv/bin/python
UV := .venv/bin/uv
TOOLS := $(PY) -m tools

# Free disk space, in GB, that a first run wants: .venv 6, the installer's cache of the same files 6
# (shared by hard links where both lie on one file system), source trees and wheels 1.
NEED_GB ?= 12

# Where pinned sources and base wheels come from: make WHEELHOUSE=DIR takes them from a directory,
# make OFFLINE=1 asks no index.
FROM = $(if $(WHEELHOUSE),--wheelhouse $(WHEELHOUSE)) $(if $(OFFLINE),--offline)
# The name that `make image` gives.
IMAGE ?= vllm-routed-experts
# The base wheels that wheel-cuda and verify-cuda take.
CUDA ?= cuda cuda-aarch64

digest = $(shell { $(1); } 2>/dev/null | sha256sum | cut -c 1-16)
files = find $(1) -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum

# The place counts too: scripts in .venv hold its path.
LOCK_ID := $(call digest,pwd; cat requirements/bootstrap.txt requirements/environment.txt)
LOCKED := .venv/.locked-$(LOCK_ID)
# What goes into a wheel, and the code that builds it (tests/tools/test_digest.py): nothing else makes
# a wheel be built again.
BUILDERS := $(addprefix tools/common/,errors.py files.py git.py pin.py) \
	$(addprefix tools/source/,archive.py download.py fetch.py index.py) \
	$(addprefix tools/series/,apply.py base.py patch.py series.py tree.py) \
	$(addprefix tools/wheel/,build.py metadata.py plan.py sbom.py)
PRISTINE_ID := $(call digest,$(call files,upstream.toml $(BUILDERS)); grep '^version = ' pyproject.toml)
SERIES_ID := $(call digest,$(call files,upstream.toml patches $(BUILDERS)); grep '^version = ' pyproject.toml)
BUILT := build/wheels/.built-$(SERIES_ID)
# A new lock removes what was installed.
INSTALLED := .venv/.installed-$(SERIES_ID)-$(LOCK_ID)
PRISTINE := build/pristine/.installed-$(PRISTINE_ID)

# A wheel built here goes in without its dependencies (the lock has them), and by copy: files shared
# with the installer's cache would change there when somebody edits them here.
INSTALL := $(UV) pip install --quiet --python $(PY) --no-deps --no-index --no-cache --link-mode copy

##@ See it work

.PHONY: help
help: ## List every target
	@awk -F ':.*## ' '/^##@ /{printf "\n%s\n", substr($$0, 5)} /^[a-z][a-z-]*:.*## /{printf "  %-14s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(INSTALLED) ## Serve a small MoE model and compare every captured row with an oracle
	@exec $(PY) -m examples.demo

.PHONY: demo-corrupt
demo-corrupt: $(INSTALLED) ## The demo with one captured id flipped: must fail
	@exec $(PY) -m examples.demo --corrupt

.PHONY: demo-pristine
demo-pristine: $(PRISTINE) ## The demo on vLLM without the series: must fail
	@exec env PYTHONPATH="$(CURDIR)/build/pristine/site" $(PY) -m examples.demo --pristine

.PHONY: replay
replay: $(INSTALLED) ## Replay the server's routes in a trainer: its log-probs with and without
	@exec $(PY) -m examples.trainer

.PHONY: disaggregated
disaggregated: $(INSTALLED) ## Prefill and decode in two engines: compare every row of the joined answers
	@exec $(PY) -m examples.disaggregated

##@ Test

.PHONY: test
test: $(INSTALLED) ## Run the whole test suite, less what is marked slow
	@exec $(PY) -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: test-long
test-long: $(INSTALLED) $(PRISTINE) ## Run the tests marked slow
	@exec $(PY) -m pytest -m slow

.PHONY: soak
soak: $(INSTALLED) ## Ten thousand requests with random aborts: nothing may be left of them
	@exec $(PY) -m pytest -m slow tests/behaviour/test_soak.py

.PHONY: fuzz
fuzz: $(INSTALLED) ## Send a server requests from its own schema, and hostile ones: no harm may come of them
	@exec $(PY) -m pytest -m slow tests/behaviour/test_fuzz.py

.PHONY: stress-eplb
stress-eplb: $(INSTALLED) ## Asynchronous EPLB in thousands of random schedules of real threads, without a GPU
	@exec $(PY) -m tests.eplb.stress

.PHONY: gpu-test
gpu-test: $(LOCKED) ## Run the tests that need a GPU, with the vLLM that is installed
	@exec $(PY) -m pytest tests/gpu

.PHONY: layouts
layouts: $(LOCKED) ## Every parallel layout of GPUS=2 or 4 on this host: rows against two oracles
	@exec $(PY) tests/gpu/layouts.py --gpus $(or $(GPUS),2) --out build/layouts-$(or $(GPUS),2) $(ARGS)

.PHONY: mutants
mutants: $(INSTALLED) ## Break the scheduler-side code in named ways: the property test must notice each
	@exec $(PY) -m tests.property.mutants

.PHONY: upstream-tests
upstream-tests: $(INSTALLED) $(PRISTINE) ## vLLM's own tests with and without the series: only what it touches may differ
	@exec $(TOOLS) upstream test --out benchmarks/results/upstream-tests.md

.PHONY: check
check: lint apply ## Lint; check the series; check that exporting it changes nothing
	$(TOOLS) series check
	$(TOOLS) series export --check

.PHONY: check-patches
check-patches: $(INSTALLED) ## Every patch at its own place: imports, linters, types, the tests it touches
	@exec $(TOOLS) series check-patches --out benchmarks/results/check-patches.md

.PHONY: lint
lint: $(LOCKED) ## Run every linter on every committed file
	@exec $(PY) -m pre_commit run --all-files

.PHONY: format
format: $(LOCKED) ## Format the Python files and mend what the linter can mend
	@$(PY) -m ruff check --fix-only --quiet .
	@exec $(PY) -m ruff format .

##@ Measure

.PHONY: bench
bench: $(INSTALLED) $(PRISTINE) ## What the flag costs, engines in turns; small without a GPU (ARGS=... chooses)
	@exec $(PY) benchmarks/overhead.py --out build/bench/overhead --build pristine=build/pristine/site --build patched= \
		$(or $(ARGS),--engine pristine:off --engine patched:off --engine patched:opt-in)

.PHONY: bench-latency
bench-latency: $(INSTALLED) $(PRISTINE) ## What rows cost streams over HTTP, servers in turns (ARGS=... chooses)
	@exec $(PY) benchmarks/latency.py --out build/bench/latency --build pristine=build/pristine/site --build patched= \
		$(or $(ARGS),--server pristine:off --server pristine:on --server patched:off --server patched:opt-in --kv-gib 0.5 --together)

##@ Work on the series

.PHONY: source
source: $(LOCKED) ## Get the pinned vLLM source
	$(TOOLS) source fetch $(FROM)

.PHONY: apply
apply: source ## Apply the series: build/vllm, one commit a patch
	$(TOOLS) series apply $(FROM)

.PHONY: export
export: $(LOCKED) ## Write the commits of build/vllm back to patches/
	$(TOOLS) series export

.PHONY: status
status: $(LOCKED) ## Pin, patches, what is applied, what drifted, the newest release
	@exec $(TOOLS) series status $(ARGS)

.PHONY: rebase
rebase: $(LOCKED) ## Move the series to another vLLM: make rebase ONTO=<version> (ARGS=--dry-run)
	@[ -n "$(ONTO)" ] || { echo "error: which release? make rebase ONTO=<version>" >&2; exit 1; }
	$(TOOLS) series rebase --onto "$(ONTO)" $(ARGS)

.PHONY: submit
submit: $(LOCKED) ## Branches and texts for upstream, never pushed: make submit ARGS='PATCH --clone ...'
	$(TOOLS) series submit $(ARGS)

.PHONY: list
list: $(LOCKED) ## List the series
	@exec $(TOOLS) series list

##@ Build and install

.PHONY: venv
venv: $(LOCKED) ## Make .venv, exactly as requirements/environment.txt locks it

.PHONY: wheel
wheel: $(BUILT) ## Build the patched CPU wheel into build/wheels
	@ls build/wheels/vllm-*.whl

.PHONY: install
install: $(INSTALLED) ## Install the patched CPU wheel into .venv
	@echo "In .venv: $$(cat $(INSTALLED))"

.PHONY: verify
verify: $(INSTALLED) ## Prove that the built and the installed wheel are base plus series
	$(TOOLS) wheel verify build/wheels/vllm-*.whl $(FROM)
	$(TOOLS) wheel verify --installed $(FROM)

.PHONY: wheel-cuda
wheel-cuda: apply ## Build the patched CUDA wheels into build/wheels-cuda (CUDA=cuda: x86-64 alone)
	@rm -rf build/wheels-cuda
	for variant in $(CUDA); do $(TOOLS) wheel build --variant $$variant --out build/wheels-cuda $(FROM); done

.PHONY: verify-cuda
verify-cuda: $(LOCKED) ## Build the CUDA wheels twice, in two directories: the same bytes, base plus series
	@rm -rf build/verify-cuda
	for place in one two; do \
		$(TOOLS) series apply --tree build/verify-cuda/$$place/vllm $(FROM); \
		for variant in $(CUDA); do \
			$(TOOLS) wheel build --variant $$variant --tree build/verify-cuda/$$place/vllm \
				--out build/verify-cuda/$$place/wheels $(FROM); \
		done; \
	done
	diff -r build/verify-cuda/one/wheels build/verify-cuda/two/wheels
	$(TOOLS) wheel verify build/verify-cuda/one/wheels/*.whl --tree build/verify-cuda/one/vllm $(FROM)
	@sha256sum build/verify-cuda/one/wheels/*.whl && rm -rf build/verify-cuda

.PHONY: release-prepare
release-prepare: apply ## Write number and changelog of the next release, for a person to read and commit
	$(TOOLS) release prepare $(FROM)

.PHONY: release
release: apply ## Build the prepared release into build/release: wheels, checksums, provenance
	$(TOOLS) release build $(FROM)

.PHONY: image
image: $(LOCKED) ## Build the image for GPU clusters: make image BASE_IMAGE=name@sha256:... (deploy/README.md)
	@deploy/pinned-image.sh "$(BASE_IMAGE)"
	docker build --tag $(IMAGE) --build-arg BASE_IMAGE="$(BASE_IMAGE)" \
		$$($(TOOLS) wheel identity --variant cuda | sed 's/^/--build-arg /') \
		--build-arg REVISION="$$(git rev-parse HEAD)$$(git diff --quiet HEAD || echo -dirty)" .

##@ Keep house

.PHONY: lock
lock: apply ## Write requirements/*.txt anew (ARGS=--upgrade for newer versions)
	grep '^uv==' requirements/environment.in | $(LOCK) --no-annotate --output-file requirements/bootstrap.txt -
	$(LOCK) $(ARGS) --output-file requirements/environment.txt requirements/environment.in
	@for name in cuda tools; do $(call prefer,requirements/$$name.txt); \
		$(LOCK_IMAGE) --output-file requirements/$$name.txt requirements/$$name.in; done
	@# One list for both machines: it holds the digests of every machine's wheels.
	@cp requirements/cuda.txt build/aarch64.txt
	$(subst x86_64,aarch64,$(LOCK_IMAGE)) --output-file build/aarch64.txt requirements/cuda.in
	diff <(grep '==' requirements/cuda.txt) <(grep '==' build/aarch64.txt)

# Names no index: where packages come from is the machine's business, what they are is the lock's.
LOCK = UV_CUSTOM_COMPILE_COMMAND="make lock" $(UV) pip compile --quiet --generate-hashes --no-emit-index-url \
	--only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_28
LOCK_IMAGE = $(subst 3.11,3.12,$(subst manylinux_2_28,manylinux_2_35,$(LOCK)))
# The installer keeps the versions that the output file has, where it can: those of the environment
# that the tests run in, and behind them its own of the last time.
prefer = sed -n 's/^\([a-z0-9][^ ]*\)==\([^ ]*\).*/\1==\2/p' requirements/environment.txt $(1) 2>/dev/null \
	| awk -F == '!seen[$$1]++' >$(1).new || true; mv $(1).new $(1)

.PHONY: clean
clean: ## Remove everything made, less .venv and downloads
	@if [ -d build ]; then find build -mindepth 1 -maxdepth 1 -not -name downloads -exec rm -rf {} +; fi
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis

.PHONY: distclean
distclean: clean ## Remove .venv and downloads as well
	@rm -rf build .venv

# --- the steps behind the stamps -----------------------------------------------------------------

$(LOCKED):
	@system="$$(uname -sm)"; [ "$$system" = "Linux x86_64" ] || \
		{ echo "error: the locked environment is for Linux on x86_64; this is $$system" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "error: Python 3.11 or newer is needed, and '$(PYTHON)' is not that. Name one: make PYTHON=python3.11 venv" >&2; exit 1; }
	@rm -f .venv/.locked-* .venv/.installed-*
	@if ! grep -qsF "$(CURDIR)/.venv" .venv/pyvenv.cfg || ! $(PY) -c '' 2>/dev/null; then \
		rm -rf .venv; \
		free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); [ "$$free" -ge $(NEED_GB) ] || \
			{ echo "error: a first run wants $(NEED_GB) GB of free disk space; found $$free GB. To try all the same: make NEED_GB=$$free venv" >&2; exit 1; }; \
		echo "Making .venv with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv .venv; \
	fi
	@$(PY) -m pip install --quiet --quiet --disable-pip-version-check --only-binary :all: --require-hashes \
		--requirement requirements/bootstrap.txt
	@echo "Installing the $$(grep -c '^[^ #]*==' requirements/environment.txt) locked packages into .venv (3 GB to download the first time, 6 GB on disk)"
	@$(UV) pip sync $$([ -t 2 ] || echo --quiet) --python $(PY) --no-build --require-hashes requirements/environment.txt
	@touch $@

$(BUILT): | $(LOCKED)
	@echo "Building the patched CPU wheel"
	$(TOOLS) source fetch $(FROM)
	$(TOOLS) series apply $(FROM)
	@rm -rf build/wheels && mkdir -p build/wheels
	$(TOOLS) wheel build --variant cpu --out build/wheels $(FROM)
	@touch $@

$(INSTALLED): $(BUILT) | $(LOCKED)
	@rm -f .venv/.installed-*
	@echo "Installing $$(cd build/wheels && ls vllm-*.whl) into .venv"
	@$(INSTALL) --reinstall build/wheels/vllm-*.whl
	@(cd build/wheels && ls vllm-*.whl) >$@

$(PRISTINE): | $(LOCKED)
	@rm -rf build/pristine/vllm
	@echo "Building the CPU wheel of vLLM without the series, into build/pristine"
	$(TOOLS) source fetch $(FROM)
	$(TOOLS) series apply --pristine --tree build/pristine/vllm $(FROM)
	@rm -rf build/pristine/wheels build/pristine/site build/pristine/.installed-*
	$(TOOLS) wheel build --variant cpu --tree build/pristine/vllm --out build/pristine/wheels $(FROM)
	@$(INSTALL) --target build/pristine/site build/pristine/wheels/vllm-*.whl
	@touch $@
