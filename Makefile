# make demo    trains a language model with jaxsoft, then prints this machine's speed. Sets everything up first.
# make test    the whole test suite, after the linter and the type checker.
# make wheel   a wheel with the CUDA kernels for every supported GPU, in dist/.
# make cuda    that the CUDA kernels compile, where there is an nvcc and no GPU to run them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Which GPUs to build for: those that are here, and without one none, as nothing could run what takes minutes to compile.
# `make wheel` and a plain `pip install` build for all. CUDA=cuda12 takes JAX for CUDA 12.
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
JAXSOFT_CUDA ?= $(if $(HAS_GPU),AUTO,OFF)
JAXSOFT_CUDA_ARCHITECTURES ?= native
FOR_THIS_MACHINE = JAXSOFT_CUDA="$(JAXSOFT_CUDA)" JAXSOFT_CUDA_ARCHITECTURES="$(JAXSOFT_CUDA_ARCHITECTURES)"

SOURCES := pyproject.toml $(shell find ffi jaxsoft pallas_kernels triton_kernels -type f -not -name '*.pyc')
CUDA ?= cuda13
comma := ,
EXTRAS := examples,test$(if $(HAS_GPU),$(comma)$(CUDA))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: all demo test bench cuda wheel clean
all: $(VENV)/installed

$(VENV)/installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "jaxsoft needs Python 3.12 or newer; say which with make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(FOR_THIS_MACHINE) $(BIN)/python -m pip install -q ".[$(EXTRAS)]"
	touch $@

demo: all
	$(BIN)/python -P -m jaxsoft
	$(BIN)/python -P examples/language_model.py
	$(BIN)/python -P benchmarks/speed.py --quick

test: all
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -P -m pytest -n auto

bench: all
	$(BIN)/python -P benchmarks/speed.py

cuda: all
	JAXSOFT_CUDA=ON JAXSOFT_CUDA_ARCHITECTURES=90a-virtual $(BIN)/python -m pip wheel -q --no-deps -w build .

wheel: all
	$(BIN)/python -m pip wheel -q --no-deps -w dist .

clean:
	rm -rf $(VENV) build dist out
