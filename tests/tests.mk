# tests.mk: the tests. The Makefile includes it.

TEST_SRC := $(wildcard tests/unit/*.c tests/integration/*.c tests/fault/*.c tests/fuzz/*.c)
GPU_TEST_SRC := $(wildcard tests/gpu/*.c)
TEST_CC_SRC := $(wildcard tests/integration/*.cc)
TEST_OBJ := $(call objects,$(TEST_SRC) $(INVARIANTS_SRC)) $(patsubst %.cc,$(BUILD)/%.o,$(TEST_CC_SRC))

TESTS := $(BUILD)/tests/run
STORM := $(BUILD)/tests/storm/storm
# The device that fails by a plan.
FAULT_OBJ := $(BUILD)/tests/fault/fault_device.o
STORM_OBJ := $(call objects,$(wildcard tests/storm/*.c)) $(FAULT_OBJ)
MPI_TEST := $(BUILD)/tests/mpi/ranks
NCCL_TEST := $(BUILD)/tests/nccl/ranks
DRAWN_OBJ := $(BUILD)/tests/drawn/drawn.o $(FAULT_OBJ)
RANKS := $(BUILD)/tests/ranks/ranks
RANKS_OBJ := $(BUILD)/tests/ranks/main.o $(BUILD)/tests/integration/rank_threads.o
GPU_TESTS := $(BUILD)/tests/gpu/run

# tests/cuda has a stand-in for CUDA's headers. Most tests compute little, and compile in half the time without optimization.
TEST_INCLUDES := -Isrc -Iexamples -Itests -I. -isystem tests/cuda
$(BUILD)/tests/%.o: private FOLDER_CFLAGS := $(TEST_INCLUDES)
$(BUILD)/tests/unit/%.o $(BUILD)/tests/integration/%.o $(BUILD)/tests/fault/%.o: private FOLDER_CFLAGS := -O0 $(TEST_INCLUDES)
$(BUILD)/tests/integration/check_rounding.o: private FOLDER_CFLAGS := $(TEST_INCLUDES)

# C++ of the tests, which is what headers are to bear, needs nothing of its library but exceptions.
$(BUILD)/tests/integration/wrap_throw.o: private EXCEPTIONS := -fexceptions
$(BUILD)/tests/%.o: tests/%.cc $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(SHOW) $(CXX) -std=c++17 $(or $(EXCEPTIONS),-fno-exceptions) -fno-rtti -pthread -fPIC -Wall -Wextra -Wpedantic -Wshadow \
	    -Iinclude -isystem tests/cuda $(CFLAGS) $(SANITIZE_CXX) -MMD -MP -c -o $@ $<

# A test may stop the library's clock (tests/unit/clock.c).
TEST_WRAPS := -Wl,--wrap=rbi_now_ns -Wl,--wrap=setsockopt

# What of the preloaded library takes no function of others is tested within the program.
$(TESTS): $(TEST_OBJ) $(addprefix $(BUILD)/preload/,holdings.o record.o summary.o) $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANITIZE) $(TEST_WRAPS) -o $@ $^ -lcriterion $(LIBS) -lmd -lstdc++

$(RANKS): $(RANKS_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

# MPI is looked for where it is asked for, and nowhere else.
$(call objects,$(GPT_MPI_SRC)): private FOLDER_CFLAGS = \
    -Iexamples $(shell mpicc -showme:compile | sed 's/-I/-isystem /g')
$(BUILD)/tests/mpi/ranks.o: private FOLDER_CFLAGS = \
    -Itests $(shell mpicc -showme:compile | sed 's/-I/-isystem /g')
$(BUILD)/bench/vote_mpi.o: bench/vote.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) -DVOTE_MPI -Isrc $(shell mpicc -showme:compile | sed 's/-I/-isystem /g') -MMD -MP -c -o $@ $<
$(MPI_TEST): $(DRAWN_OBJ)
$(MPI_TEST) $(BUILD)/bench/vote_mpi: %: %.o $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(STATIC) $(LIBS) $(shell mpicc -showme:link)

# So is NCCL. The same sources are built twice: for NCCL, and for the stand-in of tests/nccl.
NCCL_OBJ := $(call objects,$(GPT_NCCL_SRC)) $(addprefix $(BUILD)/,tests/nccl/ranks.o bench/nccl.o)
$(NCCL_OBJ): private FOLDER_CFLAGS = -Iexamples -Itests -isystem $(CUDA_HOME)/include -isystem $(NCCL_HOME)/include
$(NCCL_TEST): $(DRAWN_OBJ)
$(NCCL_TEST) $(BUILD)/bench/nccl: %: %.o $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(STATIC) $(CUDA_LIBS) $(NCCL_LIBS) $(LIBS) -ldl
NCCL_STANDIN := $(BUILD)/tests/nccl/standin
$(NCCL_STANDIN)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(SHOW) $(CC) $(ALL_CFLAGS) -Iexamples -Itests -isystem tests/cuda -MMD -MP -c -o $@ $<
$(NCCL_STANDIN)/ranks: $(NCCL_STANDIN)/tests/nccl/ranks.o $(BUILD)/tests/nccl/standin.o $(DRAWN_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)
$(NCCL_STANDIN)/gpt-nccl: $(NCCL_STANDIN)/examples/gpt/ranks_nccl.o $(BUILD)/tests/nccl/standin.o \
    $(BUILD)/examples/gpt/main.o $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lmd

$(STORM): $(STORM_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

# Stand-ins for CUDA's driver, under its name. As in CUDA's, their functions are not taken by others
# of the same names.
TEST_DRIVERS := $(patsubst %,$(BUILD)/tests/drivers/%/libcuda.so.1,old whole gpu told leaky)
# One whose functions are.
$(BUILD)/tests/drivers/leaky/libcuda.so.1: private SYMBOLIC :=
$(TESTS): | $(TEST_DRIVERS)
SYMBOLIC := -Wl,-Bsymbolic
$(patsubst %,$(BUILD)/tests/drivers/%/libcuda.so.1,whole gpu told leaky): tests/drivers/calls.c src/device/cuda_driver.h
DRIVER_CC = $(Q)$(CC) -std=c17 -fPIC $(WARNINGS) -Isrc -Iinclude -shared $(SYMBOLIC) \
    -Wl,-soname,$(@F) -o $@ $(filter %.c,$^) -ldl
$(BUILD)/tests/drivers/leaky/libcuda.so.1: tests/drivers/gpu.c
	@mkdir -p $(@D)
	$(DRIVER_CC)
$(BUILD)/tests/drivers/%/libcuda.so.1: tests/drivers/%.c
	@mkdir -p $(@D)
	$(DRIVER_CC)

# Programs and libraries as people have them, for tests of what is preloaded into them.
PRELOAD_TESTS := $(addprefix $(BUILD)/tests/preload/,program linked wrapped session session-static names \
    libdeep.so libouter.so libinner.so libhook.so)
# Trainers as people have them, before and after rebatch, over a stand-in for CUDA's runtime.
WRAP_TESTS := $(foreach name,llm_fp32 llm_bf16 darknet,$(BUILD)/tests/wrap/$(name) $(BUILD)/tests/wrap/$(name)-before)
WRAP_CC = $(Q)$(CXX) -std=c++17 -O2 -ffp-contract=off -fno-exceptions -fno-rtti -pthread -Wall -Wextra -Wshadow -Wno-unused-parameter \
    -Iinclude -Itests/wrap -isystem tests/cuda -o $@ $(filter %.cc %.o %.a,$^)
$(BUILD)/tests/wrap/%-before: tests/wrap/%.cc tests/wrap/llm.h tests/wrap/darknet.h $(wildcard tests/cuda/*.h) $(BUILD)/tests/wrap/runtime.o
	$(WRAP_CC) -Wno-unused -ldl
$(BUILD)/tests/wrap/%: tests/wrap/%.cc tests/wrap/llm.h tests/wrap/darknet.h $(wildcard tests/cuda/*.h) $(BUILD)/tests/wrap/runtime.o $(PUBLIC_HEADERS) $(STATIC)
	$(WRAP_CC) -DREBATCH -Wno-unused $(LIBS) -ldl
PRELOAD_CC = @mkdir -p $(@D) && $(CC) -std=c17 -fPIC -pthread $(WARNINGS) $(CFLAGS) -Iinclude -o $@
$(BUILD)/tests/preload/program: tests/preload/program.c tests/preload/ways.c tests/preload/ways.h
	$(PRELOAD_CC) $(filter %.c,$^) -ldl
$(BUILD)/tests/preload/linked: tests/preload/program.c tests/preload/ways.h $(BUILD)/tests/drivers/gpu/libcuda.so.1
	$(PRELOAD_CC) -DLINKED $(filter %.c %.1,$^)
# By linking the library instead of preloading it.
$(BUILD)/tests/preload/wrapped: tests/preload/program.c tests/preload/ways.c tests/preload/ways.h $(PRELOAD)
	$(PRELOAD_CC) $(filter %.c,$^) -L$(BUILD) -Wl,--no-as-needed -lrebatch_wrap -Wl,-rpath,'$$ORIGIN/../..' -ldl
$(BUILD)/tests/preload/session: tests/preload/program.c tests/preload/ways.c tests/preload/ways.h $(SHARED)
	$(PRELOAD_CC) -DSESSION $(filter %.c,$^) -L$(BUILD) -lrebatch -Wl,-rpath,'$$ORIGIN/../..' -ldl
$(BUILD)/tests/preload/session-static: tests/preload/program.c tests/preload/ways.c tests/preload/ways.h $(STATIC)
	$(PRELOAD_CC) -DSESSION $(filter %.c %.a,$^) $(LIBS) -ldl
$(BUILD)/tests/preload/names: tests/preload/names.c tests/preload/ways.h $(BUILD)/tests/preload/libouter.so $(BUILD)/tests/preload/libinner.so
	$(PRELOAD_CC) $< -L$(@D) -Wl,--no-as-needed -louter -linner -Wl,-rpath,'$$ORIGIN' -ldl
$(BUILD)/tests/preload/libdeep.so: tests/preload/ways.c tests/preload/ways.h
	$(PRELOAD_CC) -shared $< -ldl
$(BUILD)/tests/preload/libhook.so: tests/preload/hook.c
	$(PRELOAD_CC) -shared -DVERSION='"$(if $(filter aarch64%,$(shell uname -m)),GLIBC_2.17,GLIBC_2.2.5)"' $< -ldl
$(BUILD)/tests/preload/lib%.so: tests/preload/%.c
	$(PRELOAD_CC) -shared $< -ldl

# A plain CUDA program with each form of the runtime, and a wrapped one.
PRELOAD_GPU_TESTS := $(addprefix $(BUILD)/tests/gpu/preload_,blocks_static blocks_shared blocks_thread \
    session_static session_shared)
$(BUILD)/tests/gpu/preload_%_static: private CUDART := -cudart static
$(BUILD)/tests/gpu/preload_%_shared: private CUDART := -cudart shared
$(BUILD)/tests/gpu/preload_%_thread: private CUDART := -cudart static --default-stream per-thread
PRELOAD_CU = $(Q)$(NVCC) -std=c++17 -O2 -arch=$(or $(GPU_ARCH),sm_80) -Xcompiler -Wall,-Wextra,-pthread $(CUDART) -Iinclude -o $@ $< \
    -Xlinker -rpath=$(CUDA_HOME)/lib64
$(BUILD)/tests/gpu/preload_blocks_%: tests/gpu/preload_blocks.cu $(BUILD)/kernels/flags
	@mkdir -p $(@D)
	$(PRELOAD_CU)
$(BUILD)/tests/gpu/preload_session_%: tests/gpu/preload_session.cu tests/gpu/preload_helper.h $(PUBLIC_HEADERS) \
    $(BUILD)/kernels/flags $(SHARED)
	@mkdir -p $(@D)
	$(PRELOAD_CU) -L$(BUILD) -lrebatch -Xlinker -rpath=$(abspath $(BUILD))

$(BUILD)/tests/gpu/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples -Itests -Ikernels \
    -isystem $(CUDA_HOME)/include

$(GPU_TESTS): $(call objects,$(GPU_TEST_SRC) $(INVARIANTS_SRC) tests/integration/gpt_reference.c tests/integration/gpt_run.c) $(FAULT_OBJ) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ -lcriterion $(CUDA_LIBS) $(LIBS) -lmd

-include $(patsubst %.o,%.d,$(call objects,$(GPU_TEST_SRC)) $(TEST_OBJ) $(STORM_OBJ) $(RANKS_OBJ) $(DRAWN_OBJ) $(NCCL_OBJ)) \
    $(BUILD)/tests/mpi/ranks.d $(BUILD)/tests/nccl/standin.d $(NCCL_STANDIN)/tests/nccl/ranks.d $(NCCL_STANDIN)/examples/gpt/ranks_nccl.d

# ---- what people run

# Programs that tests run as a user would.
TESTED_PROGRAMS := $(COMMAND) $(REPLAY) $(GPT) $(DEMO) $(MINIMAL) $(EXAMPLES) $(MLP_BEFORE) $(GUIDE) $(PRELOAD) $(if $(SAN),,$(PRELOAD_TESTS) $(WRAP_TESTS))
TEST_VARIABLES := $(if $(SAN),,REBATCH_PRELOAD=$(BUILD)/tests/preload) REBATCH_COMMAND=$(COMMAND) REBATCH_REPLAY=$(REPLAY) REBATCH_GPT=$(GPT) REBATCH_EXAMPLES=$(BUILD)/examples \
    REBATCH_LOG_LEVEL=quiet

# But the programs of others' shape, a third of its time.
TRAINER_SUITES := wrap_darknet|wrap_llm
TEST_FLAGS = --filter '!($(TRAINER_SUITES))/*'
STRIDE = $(if $(SAN)$(CHECK),11,5)
test: ## the tests of the library (SAN=address,undefined for sanitizers, CHECK=1 for the pool's state)
	@scripts/install-deps build test
	$(SUBMAKE) $(TESTS) $(TESTED_PROGRAMS)
	@scripts/arrows $(BUILD)
	$(if $(SAN),@scripts/test-run-checked $(CC) $(SANITIZE))
	@$(TEST_VARIABLES) REBATCH_TEST_STRIDE=$(STRIDE) scripts/show-tests $(BUILD)/tests.log \
	    $(if $(SAN),scripts/run-checked sanitizers) $(TESTS) $(TEST_FLAGS)

test-trainers: ## trainers of the shape of llm.c and darknet, before and after rebatch
	@$(MAKE) -s --no-print-directory test TEST_FLAGS="--filter '@($(TRAINER_SUITES))/*'"

# What the tests run, and with which variables, for scripts/mutants.
test-programs: $(TESTS) $(TESTED_PROGRAMS)
test-variables:
	@echo $(TEST_VARIABLES)

# Without ASan, whose heap aligns more than is asked for, and by clang, which knows of casts.
test-undefined: ## every test under clang's UBSan
	@scripts/install-deps clang
	@$(MAKE) -s --no-print-directory test SAN=undefined,float-cast-overflow STRIDE=40 \
	    CC=clang CXX=clang++

SEEDS = 100000
STORM_FLAGS =
test-storm: ## random trainings under every kind of trouble (SEEDS, STORM_FLAGS="--seed 7 --verbose")
	@scripts/install-deps build
	$(SUBMAKE) $(STORM)
	@$(STORM) --seeds $(SEEDS) $(STORM_FLAGS)

SEED = 1
test-model: ## the votes of several ranks, model-checked by Spin
	@scripts/install-deps model
	@scripts/test-model

MPI_SEEDS = 1000
test-mpi: ## trainings of several processes through MPI, with OOMs, failures and deaths (MPI_SEEDS)
	@scripts/install-deps build mpi
	$(SUBMAKE) $(MPI_TEST) $(GPT) $(GPT)-mpi
	@scripts/test-mpi $(MPI_TEST) $(MPI_SEEDS) $(GPT)

NCCL_SEEDS = 100
test-nccl: ## the same through NCCL's calls, over a stand-in for NCCL and CUDA (NCCL_SEEDS)
	@scripts/install-deps build
	$(SUBMAKE) $(NCCL_STANDIN)/ranks $(GPT) $(NCCL_STANDIN)/gpt-nccl
	@scripts/test-nccl $(NCCL_STANDIN)/ranks $(NCCL_SEEDS)
	@scripts/test-nccl-gpt host $(GPT) $(NCCL_STANDIN)/gpt-nccl

test-ranks-gpu: ## two ranks with NCCL, in Python and C (needs two GPUs; NCCL_HOME, NCCL_SEEDS)
	@scripts/install-deps build
	$(SUBMAKE) $(NCCL_TEST) $(GPT)-nccl
	@export LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH; \
	    scripts/test-nccl $(NCCL_TEST) $(NCCL_SEEDS) && scripts/test-nccl-gpt cuda $(GPT)-nccl $(GPT)-nccl
	@PYTHON=$(PYTHON) FLAGS='$(PYTEST_FLAGS)' scripts/test-ranks-gpu build/python-gpu

test-ranks: ## trainings of 1,024 ranks, and of 64 in lockstep, as threads, with OOMs, failures and deaths (SEED)
	@scripts/install-deps build
	$(SUBMAKE) $(RANKS)
	@$(RANKS) $(SEED)
	@$(RANKS) $(SEED) 64 lockstep

test-threads: ## the pool in several threads, under ThreadSanitizer
	@scripts/install-deps build
	@mkdir -p build
	$(Q)for test in pool_threads pool_beside; do \
	    $(CC) -std=c17 -D_GNU_SOURCE -O1 -g -fsanitize=thread -pthread -Iinclude -Isrc -Itests \
	        -o build/$$test tests/threads/$$test.c $(INVARIANTS_SRC) $(wildcard src/base/*.c src/device/*.c \
	        src/pool/*.c src/pool/*/*.c src/inspect/*.c) -lm -ldl && build/$$test || exit 1; \
	done
	@echo "test-threads: ok"

kernels: ## CUDA kernels and their tests, compiled (needs nvcc; GPU_ARCH=sm_90)
	@scripts/install-deps build test
	$(SUBMAKE) $(GPU_TESTS) $(DEMO)-cuda $(GPT)-cuda $(WRAP_EXISTING) $(WRAP_EXISTING)-before $(WRAP_BUFFERS) $(WRAP_BUFFERS)-before $(CUDA_EXAMPLES) $(PRELOAD) $(PRELOAD_GPU_TESTS) $(if $(HAS_NCCL),$(NCCL_PROGRAMS))

test-gpu: kernels ## the tests that need a GPU
	@REBATCH_LOG_LEVEL=quiet LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH $(GPU_TESTS) -j1 $(TEST_FLAGS)
	$(RUN_WRAP_EXISTING)
	$(RUN_EXAMPLES_GPU)

RUN_WRAP_EXISTING = @export LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH; \
    scripts/test-wrap-existing $(WRAP_EXISTING)-before $(WRAP_EXISTING) && \
    scripts/test-wrap-existing $(WRAP_BUFFERS)-before $(WRAP_BUFFERS)
test-wrap-existing: ## CUDA trainers before and after nine lines of rebatch (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(WRAP_EXISTING) $(WRAP_EXISTING)-before $(WRAP_BUFFERS) $(WRAP_BUFFERS)-before
	$(RUN_WRAP_EXISTING)

RUN_EXAMPLES_GPU = @LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH scripts/test-examples-gpu $(CUDA_EXAMPLES)
test-examples-gpu: ## other CUDA examples with and without a limit: the same bits (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(CUDA_EXAMPLES)
	$(RUN_EXAMPLES_GPU)

test-preload-gpu: ## CUDA programs, PyTorch and compute-sanitizer under librebatch_wrap.so (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(PRELOAD) $(COMMAND) $(REPLAY) $(PRELOAD_GPU_TESTS)
	@scripts/test-preload-gpu $(BUILD)

test-gpu-large: ## GPT-2 124M on a GPU: the same bits for every cut and at every level of lighten
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)-cuda
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH scripts/test-gpu-large $(GPT)-cuda

SANITIZER_TOOLS =
test-sanitizer: kernels ## the kernel tests under compute-sanitizer (SANITIZER_TOOLS, PART=1/3)
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH scripts/run-sanitizer $(GPU_TESTS) \
	    $(SANITIZER_TOOLS)

PYTHON = python3
TORCH =
PYTEST_FLAGS =
# With PyTorch's build of another index, such as one without CUDA, those that need CUDA have another environment.
PYTHON_ENV := build/python
CUDA_ENV := $(PYTHON_ENV)$(if $(TORCH_INDEX_URL),-cuda)
# python_tests WHICH FOLDER [VARIABLE...]
define python_tests
@PYTHON=$(PYTHON) scripts/install-deps python
@PYTHON=$(PYTHON) $(3) scripts/python-env $(2) $(TORCH)
@FLAGS='$(PYTEST_FLAGS)' scripts/test-python --$(1) $(2)
endef
test-python: ## the Python package without CUDA (TORCH=2.15.0; TORCH_INDEX_URL: of PyTorch without CUDA)
	$(call python_tests,short,$(PYTHON_ENV))
	$(SUBMAKE) test-libtorch

test-python-night: ## its longer tests without CUDA
	$(call python_tests,night,$(CUDA_ENV),TORCH_INDEX_URL=)

test-python-standin: ## its tests of CUDA, with PyTorch on a stand-in for CUDA
	$(call python_tests,standin,$(CUDA_ENV),TORCH_INDEX_URL=)

# LibTorch is that of the package, and looked for where it is asked for.
LIBTORCH = $(shell build/python/venv/bin/python -c 'import torch; print(*torch.__path__)' 2>/dev/null)
LIBTORCH_TEST := $(BUILD)/tests/libtorch/backward
$(LIBTORCH_TEST): tests/libtorch/backward.cc $(PUBLIC_HEADERS) $(STATIC)
	@mkdir -p $(@D)
	$(Q)root=$(LIBTORCH) && $(CXX) -std=c++20 -O0 -pthread -Wall -Wextra -Wpedantic -Wshadow -Iinclude \
	    -isystem $$root/include -isystem $$root/include/torch/csrc/api/include -o $@ $< $(STATIC) \
	    -L$$root/lib -Wl,-rpath,$$root/lib -ltorch -ltorch_cpu -lc10 $(LIBS)
test-libtorch: ## rebatch/libtorch.h, with the LibTorch of build/python/venv
	@[ -n "$(LIBTORCH)" ] || { echo "test-libtorch: no LibTorch: make test-python makes build/python/venv with it"; exit 1; }
	$(SUBMAKE) $(LIBTORCH_TEST)
	@$(LIBTORCH_TEST)

test-python-gpu: ## the same on a GPU, with the PyTorch and pytest of this machine's python3
	@scripts/install-deps build
	@PYTHON=$(PYTHON) FLAGS='$(PYTEST_FLAGS)' scripts/test-python --gpu build/python-gpu

test-valgrind: ## every test under valgrind
	@scripts/install-deps build test valgrind
	$(SUBMAKE) $(TESTS) $(TESTED_PROGRAMS)
	@$(TEST_VARIABLES) REBATCH_TEST_STRIDE=40 \
	    scripts/run-checked valgrind $(TESTS) $(TEST_FLAGS)

test-change: ## what a change needs: lint, test, trainers, test-python, the tests under sanitizers
	@.ci/run change

test-night: ## the rest that needs no GPU; .ci/run runs what a change needs and a part of it
	@.ci/run night

test-install: ## install into a temporary folder and build examples/minimal.c against that
	@scripts/install-deps build install
	$(SUBMAKE) all
	@scripts/test-install

