# Everything a person types here. `make` alone lists the most used, `make help-all` the rest too.
#
# A finished step leaves a stamp whose name holds a digest of what went into it, so a step runs again
# when its input changed, and only then: a touched file or a switched branch costs nothing, a removed
# patch is noticed. The commands of tools/ are safe to repeat; the stamps save the time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Every step waits for the one before it, and two of them would write over each other's output.
.NOTPARALLEL:

# The environment comes from the lock alone; nothing calls home. Python keeps what it compiled:
# otherwise every process of vLLM compiles a thousand files again.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PYTHONDONTWRITEBYTECODE
export DO_NOT_TRACK := 1
export PRE_COMMIT_HOME := build/pre-commit

# The line: which series on which release; tools/common/pin.py says which is the default. Everything made of
# it lies in build/<line>. The tools run in .venv-tools, which is small. Every line has an environment of its
# own, .venv-<line>, locked by requirements/<line>/environment.txt. Each is made when it is first needed.
DEFAULT := $(shell sed -n 's/^DEFAULT_LINE = "\(.*\)"$$/\1/p' tools/common/pin.py 2>/dev/null)
ON ?= $(DEFAULT)
LINE := $(or $(strip $(ON)),$(DEFAULT))
LINES := $(patsubst patches/%/upstream.toml,%,$(wildcard patches/*/upstream.toml))
MADE := build/$(LINE)
# A value of the line's upstream.toml: $(call fact,TABLE,KEY).
fact = $(shell sed -n '/^\[$(1)\]/,/^\[/s/^$(2) = "\?\([^"]*\)"\?$$/\1/p' patches/$(LINE)/upstream.toml)

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3.12),$(shell command -v python3),python3)
VENV := .venv-$(LINE)
PY := $(VENV)/bin/python
UV := .venv-tools/bin/uv
TOOLS := .venv-tools/bin/python -m tools --on $(LINE)

# Free disk space, in GB, that a first run needs: .venv 6, the installer's cache of the same files 6
# (shared by hard links where both lie on one file system), source trees and wheels 1.
NEED_GB ?= 12

# Where records of a line go.
RECORDS := benchmarks/results/$(LINE)
# Which image `make image` builds, cuda or cpu, the name that it gives, and what builds it.
VARIANT ?= cuda
IMAGE ?= vllm-routed-experts:$(LINE)-$(VARIANT)
BUILD ?= docker build
# The base wheels that wheel-cuda and verify-cuda take: those of the line's pin.
CUDA ?= $(shell sed -n 's/^\[wheel\.\(cuda[a-z0-9-]*\)\]$$/\1/p' patches/$(LINE)/upstream.toml)

# The number of the release, where it goes, and the base wheels that it takes: no wheel for tests, which
# has a version of its own.
NUMBER := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
RELEASE := $(MADE)/release/re.$(NUMBER)
RELEASED = $(shell awk -F '[].[]' '/^\[/{if (v) print v; v = ""} /^\[wheel\./{v = $$3} /^version = /{v = ""} END {if (v) print v}' \
	patches/$(LINE)/upstream.toml)

digest = $(shell { $(1); } 2>/dev/null | sha256sum | cut -c 1-16)
files = find $(1) -type f -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum

# The place counts too: scripts in .venv hold its path. Comments of a lock do not.
lock_id = $(call digest,pwd; grep -hv '^ *\#' requirements/bootstrap.txt $(1))
# The environment's lock, with the two that it includes.
LOCKS := requirements/$(LINE)/environment.txt requirements/$(LINE)/cpu.txt requirements/tools.txt
LOCK_ID := $(call lock_id,$(LOCKS))
TOOLS_LOCKED := .venv-tools/.locked-$(call lock_id,requirements/tools.txt)
LOCKED := $(VENV)/.locked-$(LOCK_ID)
# What goes into a wheel, and the code that puts it there (tests/tools/test_digest.py): a change of
# anything else builds no wheel again. The tools check that the build tree is release plus series.
WRITERS := tools/series/series.py $(addprefix tools/wheel/,build.py plan.py)
INPUTS := $(WRITERS) patches/$(LINE)/upstream.toml
more = grep '^version = ' pyproject.toml; grep '^cyclonedx-python-lib==' requirements/tools.txt
PRISTINE_ID := $(call digest,$(call files,$(INPUTS)); $(more))
SERIES_ID := $(call digest,$(call files,$(INPUTS) patches/$(LINE)/series patches/$(LINE)/*.patch); $(more))
BUILT := $(MADE)/wheels/.built-$(SERIES_ID)
# Clients whose own code `make clients` runs, each in an environment of its own.
CLIENTS ?= megatron-core ms-swift skyrl trl verifiers verl
CLIENT_PYTHON = $(PYTHON)
# SkyRL wants this one.
PYTHON312 ?= $(or $(lastword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12)),python3.12)
client_venv = build/clients/$(1)/.locked-$(call lock_id,requirements/clients-$(1).txt)
CLIENT_VENVS = $(foreach client,$(CLIENTS),$(call client_venv,$(client)))
# A new lock removes what was installed.
INSTALLED := $(VENV)/.installed-$(SERIES_ID)-$(LOCK_ID)
PRISTINE := $(MADE)/pristine/.installed-$(PRISTINE_ID)

# A wheel built here goes in without its dependencies (the lock has them), and by copy: files shared
# with the installer's cache would change there when somebody edits them here.
INSTALL := $(UV) pip install --quiet --python $(PY) --no-deps --no-index --no-cache --link-mode copy

.PHONY: help help-all demo demo-corrupt demo-pristine replay train-demo test test-lines test-line test-long fuzz \
	clients client-venvs layouts mutants upstream-tests check check-patches lint format bench apply export \
	status line submit venv wheel install verify wheel-cuda verify-cuda release image image-test image-test-cuda \
	lock lock-tools lock-clients clean distclean

##@ See it work

# Targets with ## are listed by `make`, those with #> by `make help-all` too.
list = awk -F ':.*$(1) ' '/^\#\#@ /{title = substr($$0, 5)} \
	/^[a-z][a-z-]*:.*$(1) /{if (title) print "\n" title; title = ""; printf "  %-16s %s\n", $$1, $$2}' Makefile

help: #> List the targets used most
	@$(call list,##)
	@echo; echo "Another line of patches/: make ON=<line> TARGET"

help-all: ## List every target
	@$(call list,#[\#>])

demo: $(INSTALLED) ## Serve a small MoE model and compare every captured row with an oracle
	@exec $(PY) -m demos.rows --out $(MADE)/demo $(ARGS)

demo-corrupt: $(INSTALLED) #> The demo with one captured id flipped: must fail
	@exec $(PY) -m demos.rows --out $(MADE)/demo --corrupt $(ARGS)

demo-pristine: $(PRISTINE) #> The demo on vLLM without the series: must fail
	@exec env PYTHONPATH="$(CURDIR)/$(MADE)/pristine/site" $(PY) -m demos.rows --out $(MADE)/demo --pristine

replay: $(INSTALLED) #> Replay the server's routes in a trainer: how much nearer its log-probs are
	@exec $(PY) -m demos.replay

train-demo: $(INSTALLED) $(call client_venv,trl) #> Train with TRL, without and with replay: rows and log-probs at each step
	@exec $(PY) -m demos.train --out $(MADE)/train $(ARGS)

##@ Test

test: lint $(INSTALLED) ## Lint, then run the whole test suite, except what is marked slow
	@exec $(PY) -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-lines: #> The tests of every other line, less those that need no vLLM
	@for line in $(filter-out $(LINE),$(LINES)); do echo "$$line"; $(MAKE) --no-print-directory test-line ON=$$line; done

test-line: $(INSTALLED) #> The tests of one line that need its vLLM, without linting
	@exec $(PY) -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		tests/behaviour $(wildcard tests/$(subst .,_,$(LINE))) tests/unit tests/series tests/wheel

test-long: $(INSTALLED) $(PRISTINE) #> Run the tests marked slow
	@exec $(PY) -m pytest -m slow $(ARGS)

fuzz: $(INSTALLED) #> Send a server requests from its own schema, and hostile ones: it must survive them
	@exec $(PY) -m pytest -m slow tests/behaviour/fuzz $(wildcard tests/$(subst .,_,$(LINE))/test_*fuzz.py)

clients: $(INSTALLED) $(CLIENT_VENVS) #> Replay with the code of TRL, verl, ms-swift, SkyRL, verifiers and megatron-core
	@exec $(PY) -m pytest -m clients tests/clients
	@cp build/clients/clients.md $(RECORDS)/clients.md

client-venvs: $(CLIENT_VENVS) #> Make the clients' environments (CLIENTS='verl megatron-core': these alone)

layouts: $(LOCKED) #> Every parallel layout of GPUS=2, 4 or 8 on this host: rows against two oracles
	@exec $(PY) -m gpu.layouts --gpus $(or $(GPUS),2) --out build/layouts-$(or $(GPUS),2) $(ARGS)

mutants: $(INSTALLED) #> Break the scheduler-side code in named ways: the property test must notice each
	@exec $(PY) -m checks.mutants --on $(LINE) --out $(RECORDS)/mutants.md

upstream-tests: $(INSTALLED) #> vLLM's own tests with and without the series: only what it touches may differ
	@exec $(PY) -m tools --on $(LINE) upstream test --out $(RECORDS)/upstream-tests.md

check: lint apply ## Lint; check the series; check that exporting it changes nothing
	$(TOOLS) series check
	$(TOOLS) series export --check

check-patches: $(INSTALLED) #> Every patch at its own place (ARGS=--alone: on the release): imports, linters, types, tests
	@exec $(PY) -m tools --on $(LINE) upstream check-patches $(ARGS) $(if $(filter-out -%,$(ARGS)),,--out $(RECORDS)/check-patches$(findstring -alone,$(ARGS)).md)

lint: $(LOCKED) #> Run every linter on every committed file
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" exec $(PY) -m pre_commit run --all-files

format: $(LOCKED) #> Format the Python files and fix what the linter can fix
	@$(PY) -m ruff check --fix-only --quiet .
	@exec $(PY) -m ruff format .

##@ Measure

bench: $(INSTALLED) $(PRISTINE) ## What the flag costs, engines in turns; small without a GPU (ARGS=... chooses)
	@exec $(PY) -m benchmarks.overhead --out build/bench/overhead --build pristine=$(MADE)/pristine/site --build patched= \
		$(or $(ARGS),--engine pristine:off --engine patched:off --engine patched:opt-in)

##@ Work on the series

apply: $(TOOLS_LOCKED) ## Apply the series: build/<line>/vllm, one commit per patch
	$(TOOLS) series apply

export: $(TOOLS_LOCKED) ## Write the commits of the build tree back to patches/<line>/
	$(TOOLS) series export
	@$(TOOLS) series status --table >$(MADE)/patches.md && mv $(MADE)/patches.md patches/$(LINE)/README.md
	@cp $(MADE)/vllm/$(call fact,release,page) patches/$(LINE)/routed_experts.md

status: $(TOOLS_LOCKED) ## Pin, patches, what is applied, what drifted, the newest release
	@exec $(TOOLS) series status $(ARGS)

line: $(TOOLS_LOCKED) #> Begin a line from another one: make line FROM=v0.33.0 ON=v0.34.0 (ARGS=--dry-run)
	@[ -n "$(FROM)" ] || { echo "error: which line to begin with? make line FROM=v0.33.0 ON=$(LINE)" >&2; exit 1; }
	$(TOOLS) series line --from "$(FROM)" $(ARGS)

submit: $(TOOLS_LOCKED) #> A branch and a text for upstream, never pushed: make submit ARGS='PATCH --clone ...'
	$(TOOLS) upstream submit $(ARGS)

##@ Build and install

venv: $(LOCKED) #> Make .venv-<line>, exactly as requirements/<line>/environment.txt locks it

wheel: $(BUILT) #> Build the patched CPU wheel into build/<line>/wheels
	@ls $(MADE)/wheels/vllm-*.whl

install: $(INSTALLED) ## Install the patched CPU wheel into the environment
	@echo "In $(VENV): $$(cat $(INSTALLED))"

verify: $(INSTALLED) ## Prove that the built and the installed wheel are base plus series
	$(TOOLS) wheel verify $(MADE)/wheels/vllm-*.whl
	$(PY) -m tools --on $(LINE) wheel verify --installed

wheel-cuda: apply ## Build the patched CUDA wheels into build/<line>/wheels-cuda (CUDA=cuda: x86-64 alone)
	@echo "Base wheels that are not in build/downloads are downloaded there:"
	@for variant in $(CUDA); do sed -n "/^\[wheel.$$variant\]/,/^size/s/^size = \([0-9]*\)[0-9]\{6\}$$/    $$variant: \1 MB/p" \
		patches/$(LINE)/upstream.toml; done
	@rm -rf $(MADE)/wheels-cuda
	for variant in $(CUDA); do $(TOOLS) wheel build --variant $$variant --out $(MADE)/wheels-cuda; done

verify-cuda: $(LOCKED) #> Build the CUDA wheels twice: the same bytes, base plus series, fit for the compiled files
	@rm -rf $(MADE)/verify-cuda
	for place in one two; do \
		$(TOOLS) series apply --tree $(MADE)/verify-cuda/$$place/vllm; \
		for variant in $(CUDA); do \
			$(TOOLS) wheel build --variant $$variant --tree $(MADE)/verify-cuda/$$place/vllm \
				--out $(MADE)/verify-cuda/$$place/wheels; \
		done; \
	done
	diff -r $(MADE)/verify-cuda/one/wheels $(MADE)/verify-cuda/two/wheels
	$(TOOLS) wheel verify $(MADE)/verify-cuda/one/wheels/*.whl --tree $(MADE)/verify-cuda/one/vllm
	$(PY) -c 'from harness.checkpoint import make_checkpoint; make_checkpoint("$(MADE)/verify-cuda/checkpoint")'
	$(PY) -m tools --on $(LINE) wheel compiled $(MADE)/verify-cuda/one/wheels/*.whl \
		--checkpoint $(MADE)/verify-cuda/checkpoint
	@sha256sum $(MADE)/verify-cuda/one/wheels/*.whl && rm -rf $(MADE)/verify-cuda

release: apply #> Build the release of this commit into build/<line>/release: wheels, changes, checksums
	@changed=$$(git status --porcelain); [ -z "$$changed" ] || \
		{ echo "error: a release is made of a commit, and this is not committed:" >&2; echo "$$changed" >&2; exit 1; }
	@grep -qx '## re\.$(NUMBER), [0-9-]\{10\}' CHANGELOG.md || \
		{ echo "error: CHANGELOG.md has no section '## re.$(NUMBER), <date>': see CONTRIBUTING.md, Making a release" >&2; exit 1; }
	@tagged=$$(git rev-parse --verify --quiet 're.$(NUMBER)^{commit}' || git rev-parse HEAD); [ "$$tagged" = "$$(git rev-parse HEAD)" ] || \
		{ echo "error: re.$(NUMBER) is released already, as $$tagged: the next one has another version in pyproject.toml" >&2; exit 1; }
	@[ -n "$(RELEASED)" ] || { echo "error: the wheels of $(LINE) are for tests only: none may be released" >&2; exit 1; }
	$(TOOLS) series check
	$(TOOLS) series export --check
	@rm -rf $(RELEASE).new && mkdir -p $(RELEASE).new
	for variant in $(RELEASED); do $(TOOLS) wheel build --variant $$variant --out $(RELEASE).new; done
	$(TOOLS) wheel verify $(RELEASE).new/*.whl
	@awk '/^## /{wanted = index($$0, "## re.$(NUMBER), ") == 1} wanted' CHANGELOG.md >$(RELEASE).new/CHANGES.md
	@cd $(RELEASE).new && sums=$$(LC_ALL=C sha256sum *) && echo "$$sums" >SHA256SUMS
	@if [ -e $(RELEASE) ]; then diff -rq $(RELEASE) $(RELEASE).new || \
		{ echo "error: $(RELEASE) holds another release of this number; move it away" >&2; exit 1; }; fi
	@rm -rf $(RELEASE) && mv $(RELEASE).new $(RELEASE) && ls $(RELEASE)
	@echo "Nothing was tagged, pushed or published. Next: git tag --annotate re.$(NUMBER), sign it, publish it"

image: $(TOOLS_LOCKED) #> Build an image: make image VARIANT=cuda|cpu BASE_IMAGE=name@sha256:... (deploy/README.md)
	@deploy/pinned-image.sh "$(BASE_IMAGE)"
	$(BUILD) --tag $(IMAGE) --build-arg BASE_IMAGE="$(BASE_IMAGE)" --build-arg LINE=$(LINE) --build-arg VARIANT=$(VARIANT) \
		$$($(TOOLS) wheel identity --variant $(VARIANT) | sed 's/^/--build-arg /') \
		--build-arg REVISION="$$(git rev-parse HEAD)$$(git diff --quiet HEAD || echo -dirty)" .

image-test: $(INSTALLED) #> Build the cpu image on a stand-in base and check it from outside (buildah, debootstrap; root)

image-test-cuda: $(INSTALLED) #> The same for the cuda image, up to where it wants a GPU
image-test image-test-cuda:
	@for program in buildah debootstrap; do command -v $$program >/dev/null || \
		{ echo "error: there is no $$program; as root: apt-get install buildah debootstrap" >&2; exit 1; }; done
	@exec $(PY) -m pytest -m image -k $(if $(filter %-cuda,$@),cuda,cpu) tests/deploy/test_built_image.py
	@cp build/image/$@.md $(RECORDS)/

##@ Keep house

lock: apply #> Write requirements/<line>/*.txt again (ARGS=--upgrade for newer versions)
	@mkdir -p build/locks
	@mkdir -p build/locks/$(LINE)
	@# The images have the versions that the tests run with, where they can; then those of their last lock.
	@$(call lock,$(LINE)/environment,$(LOCKS),$(call compile,x86_64,2_35,3.11) $(OVERRIDES) $(ARGS))
	@$(call lock,$(LINE)/cpu,build/locks/$(LINE)/environment.txt,$(call compile,x86_64,2_35,3.11) $(OVERRIDES))
	@$(call lock,$(LINE)/cuda,build/locks/$(LINE)/environment.txt requirements/$(LINE)/cuda.txt,$(call compile,x86_64,2_35,3.12) $(OVERRIDES))
	@# One list for all machines that have a CUDA wheel.
	@for machine in $(filter-out x86_64,$(MACHINES)); do \
		cp build/locks/$(LINE)/cuda.txt build/locks/$(LINE)/$$machine.txt; \
		$(call compile,$$machine,2_35,3.12) $(OVERRIDES) --output-file build/locks/$(LINE)/$$machine.txt requirements/$(LINE)/cuda.in; \
		diff <(grep '==' build/locks/$(LINE)/cuda.txt) <(grep '==' build/locks/$(LINE)/$$machine.txt); \
	done
	@$(call trim,$(LINE)/cpu,2.35,3.11 3.12,x86_64)
	@$(call trim,$(LINE)/environment,2.35,3.11 3.12,x86_64) --include cpu.txt --include ../tools.txt
	@$(call trim,$(LINE)/cuda,2.35,3.12,$(MACHINES))
# Which packages may be older than vLLM asks for, and for which machines there is a CUDA wheel.
OVERRIDES = $(addprefix --override ,$(wildcard requirements/$(LINE)/overrides.in))
MACHINES = $(patsubst %-,%,$(subst cuda,x86_64,$(subst cuda-,,$(CUDA))))

lock-tools: $(TOOLS_LOCKED) #> Write requirements/tools.txt and bootstrap.txt again (ARGS=--upgrade for newer versions)
	@mkdir -p build/locks
	@grep '^uv==' requirements/$(LINE)/cpu.in | $(call compile,x86_64,2_28,3.11) --no-annotate --output-file build/locks/bootstrap.txt -
	@$(call lock,tools,requirements/tools.txt,$(call compile,x86_64,2_35,3.12) $(ARGS))
	@$(call trim,bootstrap,2.28,3.11,x86_64 aarch64)
	@$(call trim,tools,2.28,3.11 3.12,x86_64 aarch64)

lock-clients: $(TOOLS_LOCKED) #> Write requirements/clients-*.txt again (ARGS=--upgrade for newer versions)
	@mkdir -p build/locks
	@$(foreach client,$(CLIENTS),$(call lock_client,$(client),$(if $(filter skyrl,$(client)),3.12,3.11 3.12)); )
lock_client = $(call lock,clients-$(1),requirements/clients-$(1).txt,$(call compile,x86_64,2_28,$(firstword $(2))) --excludes requirements/clients-excludes.in $(ARGS)); \
	$(call trim,clients-$(1),2.28,$(2),x86_64)

# Each lock is made in two steps. `compile` writes every version and all digests into build/locks, for
# a machine, a glibc and a Python; `trim` leaves the digests that are installed. Neither names a package
# index: each machine has its own.
compile = UV_CUSTOM_COMPILE_COMMAND="make $@ ON=$(LINE)" $(UV) pip compile --quiet --generate-hashes \
	--no-emit-index-url --only-binary :all: --python-platform $(1)-manylinux_$(2) --python-version $(3)
# $(1) the lock, $(2) the locks whose versions it keeps, $(3) the command.
lock = sed -n 's/^\([a-z0-9][^ ]*\)==\([^ ]*\).*/\1==\2/p' $(2) 2>/dev/null | awk -F == '!seen[$$1]++' >build/locks/$(1).txt || true; \
	$(3) --output-file build/locks/$(1).txt requirements/$(1).in
# $(1) the lock, $(2) glibc, $(3) Pythons, $(4) machines.
trim = $(TOOLS) locks trim build/locks/$(1).txt --out requirements/$(1).txt --glibc $(2) \
	$(addprefix --python ,$(3)) $(addprefix --machine ,$(4))

clean: ## Remove everything made, except environments and downloads
	@if [ -d build ]; then find build -mindepth 1 -maxdepth 1 -not -name downloads -exec rm -rf {} +; fi
	@rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis

distclean: clean #> Remove environments and downloads as well
	@rm -rf build .venv-*

# --- the steps behind the stamps -----------------------------------------------------------------

# Refuse another system, and a Python ($(1)) that the condition ($(2)) does not hold for. $(3) says which it is for.
define check_python
	@system="$$(uname -sm)"; [ "$$system" = "Linux x86_64" ] || \
		{ echo "error: the locked environments are for Linux on x86_64; this is $$system" >&2; exit 1; }
	@"$(1)" -c 'import sys, venv; sys.exit(not ($(2)))' 2>/dev/null || \
		{ echo "error: $(@D) is for $(3), and '$(1)' is not that. Name one: make PYTHON=python3.11 ..." >&2; exit 1; }
endef

# One recipe for each large environment: $(1) its directory, $(2) its lock, $(3) all locks that count.
define make_venv
	$(call check_python,$(PYTHON),sys.version_info[:2] in ((3$(comma) 11)$(comma) (3$(comma) 12)),Python 3.11 or 3.12 with its venv module)
	@[ -f $(2) ] || { echo "error: the line $(LINE) has no locked environment: there is no $(2)" >&2; exit 1; }
	@rm -f $(1)/.locked-* $(1)/.installed-*
	@if ! grep -qsF "$(CURDIR)/$(1)" $(1)/pyvenv.cfg || ! $(1)/bin/python -c '' 2>/dev/null; then \
		rm -rf $(1); \
		free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); [ "$$free" -ge $(NEED_GB) ] || \
			{ echo "error: a first run needs $(NEED_GB) GB of free disk space; found $$free GB. To try all the same: make NEED_GB=$$free venv" >&2; exit 1; }; \
		echo "Making $(1) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv $(1); \
	fi
	@echo "Installing the $$(cat $(3) | grep '^[^ #]*==' | sort -u | wc -l) locked packages into $(1) (3 GB to download the first time, 6 GB on disk)"
	@$(UV) pip sync $$([ -t 2 ] || echo --quiet) --python $(1)/bin/python --no-build --require-hashes $(2)
	@touch $@
endef
comma := ,

# The tools, and the installer of everything else.
$(TOOLS_LOCKED):
	$(call check_python,$(PYTHON),sys.version_info >= (3$(comma) 11),Python 3.11 or newer with its venv module)
	@echo "Installing the $$(grep -c '^[^ #]*==' requirements/tools.txt) packages of the tools and uv into .venv-tools (21 MB to download)"
	@rm -rf .venv-tools
	@"$(PYTHON)" -m venv .venv-tools
	@.venv-tools/bin/python -m pip install --quiet --quiet --disable-pip-version-check --only-binary :all: \
		--require-hashes --requirement requirements/bootstrap.txt --requirement requirements/tools.txt
	@touch $@

$(LOCKED): | $(TOOLS_LOCKED)
	$(call make_venv,$(VENV),$(firstword $(LOCKS)),$(LOCKS))

build/clients/skyrl/.locked-%: CLIENT_PYTHON = $(PYTHON312)
build/clients/%: | $(TOOLS_LOCKED)
	@"$(CLIENT_PYTHON)" -c 'import sys; sys.exit("$(@D)" == "build/clients/skyrl" and sys.version_info < (3, 12))' 2>/dev/null || \
		{ echo "error: $(@D) wants Python 3.12, and '$(CLIENT_PYTHON)' is not that. Name one: make PYTHON312=... clients, or leave it out: make CLIENTS='...' clients" >&2; exit 1; }
	@echo "Installing the $$(grep -c '^[^ #]*==' requirements/clients-$(notdir $(@D)).txt) locked packages of $(notdir $(@D)) into $(@D)"
	@rm -rf $(@D)
	@"$(CLIENT_PYTHON)" -m venv --without-pip $(@D)
	@$(UV) pip sync --quiet --python $(@D)/bin/python --no-build --require-hashes requirements/clients-$(notdir $(@D)).txt
	@touch $@

$(BUILT): | $(TOOLS_LOCKED)
	@echo "Building the patched CPU wheel"
	$(TOOLS) series apply
	@rm -rf $(MADE)/wheels && mkdir -p $(MADE)/wheels
	$(TOOLS) wheel build --variant cpu --out $(MADE)/wheels
	@touch $@

$(INSTALLED): $(BUILT) | $(LOCKED)
	@rm -f $(VENV)/.installed-*
	@echo "Installing $$(cd $(MADE)/wheels && ls vllm-*.whl) into $(VENV)"
	@$(INSTALL) --reinstall $(MADE)/wheels/vllm-*.whl
	@(cd $(MADE)/wheels && ls vllm-*.whl) >$@

$(PRISTINE): | $(LOCKED)
	@rm -rf $(MADE)/pristine/vllm
	@echo "Building the CPU wheel of vLLM without the series, into $(MADE)/pristine"
	$(TOOLS) series apply --pristine --tree $(MADE)/pristine/vllm
	@rm -rf $(MADE)/pristine/wheels $(MADE)/pristine/site $(MADE)/pristine/.installed-*
	$(TOOLS) wheel build --variant cpu --tree $(MADE)/pristine/vllm --out $(MADE)/pristine/wheels
	@$(INSTALL) --target $(MADE)/pristine/site $(MADE)/pristine/wheels/vllm-*.whl
	@touch $@
