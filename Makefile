# SPDX-License-Identifier: Apache-2.0
# Everything starts here: `make demo` and `make test` set up what they need on a fresh machine
# (Python 3.10+, a C++17 compiler, make) and do nothing twice.

PYTHON ?= python3
# The newest PyTorch that the package allows, with which all numbers in the documents were measured.
# Another one: make test TORCH=2.11.0 VENV=.venv-2.11
TORCH  ?= 2.13.0
VENV   := .venv
BIN    := $(VENV)/bin

CPP_FILES := $(shell find src include -name '*.cc' -o -name '*.h')
# What the shared libraries are made of; a change builds them again.
CPP_INPUTS := $(CPP_FILES) CMakeLists.txt $(wildcard cmake/*)

# Stamps lie inside what they vouch for, so that deleting it also makes them untrue.
CREATED   := $(VENV)/.created
INSTALLED := $(VENV)/.installed
PACKAGED  := $(VENV)/.packaged
BUILT     := python/amp_ir/lib/.built

# Tests start some hundred Pythons; each would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-ddp test test-isa test-versions gpu-test fuzz sanitize wheel site setup format clean

help:
	@echo "make demo    compile and train bert1 in float32 and mixed precision, side by side"
	@echo "make demo-ddp  train on two processes, beside DistributedDataParallel"
	@echo "make test    format, lint, types, tests, tutorials"
	@echo "make test-isa the tests of numbers as on lesser CPUs, and without oneDNN; CI runs both"
	@echo "make test-versions PYTHON=python3.13 TORCH=2.12.0 VENV=.venv-3.13  what depends on these versions"
	@echo "make gpu-test the tests that need a GPU; GPU_PYTHON=python3 names a Python with CUDA's PyTorch"
	@echo "make fuzz MINUTES=30 SEED=0  random training steps against PyTorch, failures made small"
	@echo "make sanitize the tests of the native libraries, built with AddressSanitizer and UBSan; or SANITIZE=thread"
	@echo "make wheel   a wheel and a source distribution in dist/"
	@echo "make site    the documents as a site, in build/site"
	@echo "make setup   only the environment and the native libraries"
	@echo "make format  rewrite the sources as make test wants them"
	@echo "make clean   remove what was built; $(VENV) stays"

demo: setup
	$(BIN)/amp-ir demo bert1

demo-ddp: setup
	$(BIN)/python -m benchmarks.distributed mlp

# A worker for each core, at most four, for each takes up to 1.5 GiB; one that is done takes over from
# those that are not. Workers share the cores, so a thread that waits for the others of its kernel has
# to sleep: awake, it would keep their cores from them.
IN_PARALLEL := -n auto --maxprocesses 4 --dist worksteal

test: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(IN_PARALLEL)

# The tests of numbers as on lesser machines: PyTorch, oneDNN and our own kernels without AVX-512,
# without bfloat16 instructions, and without oneDNN. A cap at what the machine has would repeat `test`.
NUMERIC := $(addprefix tests/, \
	amp/test_autocast_workloads.py amp/test_kernels_of_ops.py dialect/test_dialect_gradients.py \
	dialect/test_dialect_kernels.py dispatch/test_cpu_flash_attention.py \
	dispatch/test_recurrence_call.py end_to_end/test_layers.py end_to_end/test_models.py \
	end_to_end/test_models_in_low_precision.py end_to_end/test_random_steps.py \
	end_to_end/test_rounding.py end_to_end/test_special_values.py end_to_end/test_user_programs.py \
	loops/test_accumulate_rows.py loops/test_held_rows.py loops/test_kernel_floats.py \
	loops/test_long_sums.py loops/test_loops_math.py loops/test_loss_kernels.py \
	loops/test_relax_lowerings.py loops/test_rows_at_indices.py loops/test_scatter_rows.py \
	loops/test_scattered_reads.py loops/test_sort_kernels.py loops/test_sums_over_few_rows.py \
	loss_scaling/test_loss_scale_training.py \
	memory/test_memory_report.py memory/test_onednn_workspace.py native/test_native*.py \
	vm/test_whole_vectors.py)
AS_AVX2   := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 AMP_IR_LLVM_CPU=x86-64-v3
AS_AVX512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE AMP_IR_LLVM_CPU=skylake-avx512
BEYOND_AVX512 := avx512_bf16|avx512_fp16|amx_tile
# Here oneDNN decides nothing: the interpreter, our kernels alone, the calls of PyTorch's library, or
# oneDNN's own, which are skipped without it.
NOT_BY_ONEDNN := $(addprefix tests/, \
	amp/test_autocast_workloads.py dialect/test_dialect_gradients.py dialect/test_dialect_kernels.py \
	dispatch/test_recurrence_call.py loops/test_held_rows.py loops/test_kernel_floats.py \
	loops/test_loops_math.py loops/test_loss_kernels.py loops/test_relax_lowerings.py \
	loops/test_rows_at_indices.py loops/test_scatter_rows.py loops/test_scattered_reads.py \
	loops/test_sort_kernels.py loops/test_sums_over_few_rows.py \
	memory/test_onednn_workspace.py native/test_native*.py vm/test_whole_vectors.py)
OF_OPTIMIZERS := tests/end_to_end/test_models.py::test_optimizers_follow_eager_while_hyper_parameters_change
# No ISA decides what these look at: nodes, and casts that the interpreter runs without.
OF_NO_ISA := $(addprefix --deselect tests/amp/test_autocast_workloads.py::, \
	test_erasing_the_casts_gives_the_captured_step_bit_for_bit \
	test_a_step_without_its_casts_is_the_captured_one_node_for_node)
NUMERIC_TESTS := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(IN_PARALLEL) -q -m 'not emulator' \
	$(OF_NO_ISA)

test-isa: setup
	if grep -qw avx512bw /proc/cpuinfo; then $(AS_AVX2) $(NUMERIC_TESTS) $(NUMERIC); fi
	if grep -qwE '$(BEYOND_AVX512)' /proc/cpuinfo; then $(AS_AVX512) $(NUMERIC_TESTS) $(NUMERIC); fi
	AMP_IR_DISABLE=onednn $(NUMERIC_TESTS) --deselect $(OF_OPTIMIZERS) \
	  $(filter-out $(NOT_BY_ONEDNN),$(NUMERIC))

# Where Python or PyTorch may differ between versions: bytecode, frames and guards, what capture
# patches, calls and checkpoints, other packages' loops, an installed wheel. VENV is a new one for
# each, as in `make test-versions PYTHON=python3.13 TORCH=2.12.0 VENV=.venv-3.13`.
VERSIONED := $(addprefix tests/, \
	capture/test_autocast_regions.py capture/test_call_structure.py capture/test_code_reads.py \
	capture/test_failure_advice.py capture/test_functional.py capture/test_guards.py \
	capture/test_modules_made_in_forward.py capture/test_number_arguments.py \
	capture/test_refusals_together.py capture/test_threads.py capture/test_torch_functions.py \
	capture/test_trace_arguments.py capture/test_trace_diagnostics.py \
	capture/test_trace_optimizers.py capture/test_trace_unchanged.py \
	capture/test_values_in_python.py capture/test_watch.py compile_cache/test_cached_steps.py \
	compile_cache/test_key.py dialect/test_dialect_types.py host integrations \
	runtime/test_checkpoint.py runtime/test_jit_calls.py runtime/test_jit_variants.py \
	test_import.py test_wheel.py)
test-versions: setup
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(IN_PARALLEL) -q $(VERSIONED)

# The environment above has PyTorch for CPUs. On a machine with a GPU, GPU_PYTHON is a Python whose
# PyTorch has CUDA, with what requirements-dev.txt names: the libraries are built for it, in place.
GPU_PYTHON ?= $(BIN)/python
# What is missing for CPUs is warned of, and a warning fails a test.
NO_ONEDNN := -W 'ignore:some native libraries of amp_ir are missing:RuntimeWarning'
gpu-test:
	$(GPU_PYTHON) setup.py -q build_ext --inplace
	PYTHONPATH=python:$(PYTHONPATH) $(GPU_PYTHON) -m pytest -m gpu -p no:cacheprovider $(NO_ONEDNN)

# Writes programs for MINUTES, the first from SEED, and prints those that fail, made small.
MINUTES ?= 30
SEED    ?= 0
fuzz: setup
	PYTHONPATH=tests/support OMP_WAIT_POLICY=passive $(BIN)/python -m fuzz --minutes $(MINUTES) --seed $(SEED)

# Native libraries that check themselves, and the tests of these. They lie apart, beside links to the
# Python files of the package, which finds its libraries next to itself. Python is not instrumented:
# the checks are loaded before it, with the C++ library whose exceptions they watch, and leaks are
# not looked for, since Python and PyTorch keep much until the end.
#
# SANITIZE=thread watches threads of Python that share a library, and OpenMP's teams. What oneDNN and
# PyTorch read and write themselves is not seen.
SANITIZE := address,undefined
SANITIZED := build/sanitize/python/amp_ir
SANITIZED_TESTS := tests/host/test_native.py $(wildcard tests/native/test_native*.py)
SANITIZED_TESTS += tests/native/test_cublaslt.py
SANITIZED_TESTS += $(addprefix tests/memory/test_, memory_plan.py min_cut.py onednn_workspace.py)
RUNTIMES := $(if $(findstring thread,$(SANITIZE)),libtsan.so,libasan.so libubsan.so) libstdc++.so.6
PRELOADED = $(foreach one,$(RUNTIMES),$(shell $(CXX) -print-file-name=$(one)))
OPENMP_ORDER := $(if $(findstring thread,$(SANITIZE)),$(CURDIR)/build/sanitize/libopenmp_order.so)
SANITIZE_OPTIONS := ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
SANITIZE_OPTIONS += TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1
SANITIZE_OPTIONS += OMP_NUM_THREADS=2
sanitize: $(INSTALLED)
	mkdir -p $(SANITIZED)
	ln -sfn $(filter-out %/lib,$(wildcard $(CURDIR)/python/amp_ir/*)) $(SANITIZED)
	AMP_IR_SANITIZE=$(SANITIZE) $(BIN)/python setup.py --quiet build_ext --inplace
	$(if $(OPENMP_ORDER),$(CXX) -O1 -fPIC -shared tests/support/openmp_order.cc -ltsan -lgomp -o $(OPENMP_ORDER))
	$(SANITIZE_OPTIONS) OMP_WAIT_POLICY=passive LD_PRELOAD="$(PRELOADED) $(OPENMP_ORDER)" \
	  PYTHONPATH=build/sanitize/python $(BIN)/python -m pytest -p no:cacheprovider $(SANITIZED_TESTS)

# auditwheel tags the wheel by the oldest glibc and libstdc++ that run it. The libraries that it
# leaves out come with other wheels, and a process must hold one copy of each (host/native.py).
FROM_OTHER_WHEELS := --exclude libtvm_ffi.so --exclude libdnnl.so.3 --exclude libgomp.so.1
wheel: $(INSTALLED)
	rm -rf build/dist dist
	$(BIN)/python -m build --outdir build/dist
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair $(FROM_OTHER_WHEELS) -w dist build/dist/*.whl
	mv build/dist/*.tar.gz dist

# -W: a link that leads nowhere, or a page without a place in the contents, is an error.
SITE := build/site
site: setup
	$(BIN)/python docs/site/write_pages.py $(SITE)-pages
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site $(SITE)-pages $(SITE)
	@echo "open $(SITE)/index.html"

setup: $(BUILT)

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

$(CREATED):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "amp_ir needs Python 3.10 or newer, and $(PYTHON) is older: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(INSTALLED): requirements-dev.txt $(CREATED)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt torch==$(TORCH)
	touch $@

# Installing the package editable also builds the libraries. Without isolation, so that they are
# compiled against the tvm-ffi and oneDNN that run them; without dependencies: they are pinned above.
$(PACKAGED): setup.py pyproject.toml $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@

$(BUILT): $(PACKAGED) $(CPP_INPUTS)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

clean:
	rm -rf build dist python/amp_ir/lib python/*.egg-info $(PACKAGED)
