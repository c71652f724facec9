# rebatch: `make help` says what there is to make.

# ---- what was asked for ------------------------------------------------------------------------
CC = cc
CXX = c++
SAN =
CHECK =
prefix = /usr/local
DESTDIR =
CFLAGS = -O2 -g

VARIANT := $(if $(CHECK),check,$(if $(SAN),debug-$(SAN),release))
BUILD := build/$(VARIANT)

# ---- flags -------------------------------------------------------------------------------------
WARNINGS := -Wall -Wextra -Werror=incompatible-pointer-types -Wpedantic -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
            -Wcast-qual -Wvla -Wundef -Wformat=2
# gcc's UBSan, where it is shared and beside ASan, does not write where its options say.
SANITIZE := $(if $(SAN),-fsanitize=$(SAN) -fno-sanitize-recover=all -fno-omit-frame-pointer \
              $(if $(findstring clang,$(CC)),,-static-libubsan))
ALL_CFLAGS := -std=c17 -D_GNU_SOURCE -pthread -fPIC -fvisibility=hidden $(WARNINGS) \
              -Iinclude $(CFLAGS) $(SANITIZE) $(if $(CHECK)$(SAN),-DRBI_ASSERTS) $(if $(CHECK),-DRBI_CHECK)
# What clang's check of a call's type asks for is in C++'s library, which no test links.
SANITIZE_CXX := $(SANITIZE) $(if $(SAN),$(if $(findstring clang,$(CXX)),-fno-sanitize=function))
LIBS := -lconfig -lm -pthread

version_of = $(shell sed -n 's/^\#define REBATCH_VERSION_$(1) //p' include/rebatch/version.h)
MAJOR := $(call version_of,MAJOR)
VERSION := $(MAJOR).$(call version_of,MINOR).$(call version_of,PATCH)

# ---- what there is -----------------------------------------------------------------------------
# The walkers that check the pool's equations.
INVARIANTS_SRC := $(wildcard tests/invariants/*.c)
# The stand-ins for settings_file.c and store.c are for a build without libconfig (python/native.py).
LIB_SRC := $(filter-out src/config/settings_file_absent.c src/probe/store_absent.c, \
    $(wildcard src/base/*.c src/device/*.c src/pool/*.c src/pool/*/*.c src/inspect/*.c src/recover/*.c \
               src/check/*.c src/probe/*.c src/config/*.c src/launch/*.c)) \
    $(if $(CHECK),$(INVARIANTS_SRC))
CLI_SRC := $(wildcard src/cli/*.c)
PRELOAD_SRC := $(wildcard preload/*.c)
# Recorded allocations against a pool.
REPLAY_OBJ := $(patsubst %.c,$(BUILD)/%.o,$(wildcard bench/replay/*.c))
REPLAY := $(BUILD)/bench/replay/replay
GPT_MAINS := examples/gpt/main.c examples/gpt/demo.c
# The model's operations on a GPU; a build without CUDA has the stand-in that says so.
GPT_CUDA_SRC := $(wildcard examples/gpt/*_cuda.c)
GPT_NO_CUDA_SRC := $(wildcard examples/gpt/cuda_absent.c)
# Those of several processes; a build without MPI and NCCL has the stand-in for one.
GPT_MPI_SRC := examples/gpt/ranks_mpi.c
GPT_NCCL_SRC := examples/gpt/ranks_nccl.c
GPT_NO_MPI_SRC := examples/gpt/ranks_absent.c
GPT_SRC := $(filter-out $(GPT_MAINS) $(GPT_CUDA_SRC) $(GPT_NO_CUDA_SRC) $(GPT_MPI_SRC) $(GPT_NCCL_SRC) $(GPT_NO_MPI_SRC),$(wildcard examples/gpt/*.c))
TEST_SRC := $(wildcard tests/unit/*.c tests/integration/*.c tests/fault/*.c tests/fuzz/*.c)

KERNEL_SRC := $(wildcard kernels/*.cu)
GPU_TEST_SRC := $(wildcard tests/gpu/*.c)

objects = $(patsubst %.c,$(BUILD)/%.o,$(1))
LIB_OBJ := $(call objects,$(LIB_SRC))
CLI_OBJ := $(call objects,$(CLI_SRC))
PRELOAD_OBJ := $(call objects,$(PRELOAD_SRC))
GPT_OBJ := $(call objects,$(GPT_SRC))
GPT_CUDA_OBJ := $(call objects,$(GPT_CUDA_SRC))
GPT_NO_CUDA_OBJ := $(call objects,$(GPT_NO_CUDA_SRC))
TEST_CC_SRC := $(wildcard tests/integration/*.cc)
TEST_OBJ := $(call objects,$(TEST_SRC) $(INVARIANTS_SRC)) $(patsubst %.cc,$(BUILD)/%.o,$(TEST_CC_SRC))

STATIC := $(BUILD)/librebatch.a
# Before 1.0 a new minor version may change structs, so it is another library.
SONAME := librebatch.so.$(if $(filter 0,$(MAJOR)),0.$(call version_of,MINOR),$(MAJOR))
SHARED := $(BUILD)/librebatch.so.$(VERSION)
# A sanitizer's runtime must be the first library of a program, so there nothing can be preloaded.
PRELOAD := $(if $(SAN),$(PRELOAD_OBJ),$(BUILD)/librebatch_wrap.so)
COMMAND := $(BUILD)/rebatch
GPT := $(BUILD)/examples/gpt/gpt
DEMO := $(BUILD)/examples/gpt/demo
MINIMAL := $(BUILD)/examples/minimal
EXAMPLES := $(addprefix $(BUILD)/examples/,mlp evaluate variable_length separable_cnn)
# As it was before it was wrapped.
MLP_BEFORE := $(BUILD)/examples/mlp-before
GUIDE := $(BUILD)/examples/guide/before $(BUILD)/examples/guide/train
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
KERNEL_OBJ := $(patsubst %.cu,$(BUILD)/%.o,$(KERNEL_SRC))
KERNELS := $(BUILD)/libgpt_kernels.a
GPU_TESTS := $(BUILD)/tests/gpu/run
WRAP_EXISTING := $(BUILD)/examples/wrap_existing
WRAP_BUFFERS := $(BUILD)/examples/wrap_buffers
CUDA_EXAMPLES := $(addprefix $(BUILD)/examples/,separable_cnn-cuda cpp_raii curand_dropout)
PUBLIC_HEADERS := $(wildcard include/rebatch/*.h)
MAN_PAGES := build/man/man1/rebatch.1 build/man/man3/rebatch.3 \
    $(patsubst include/rebatch/%.h,build/man/man3/rebatch_%.3, \
        $(filter-out %/rebatch.h,$(PUBLIC_HEADERS)))

# CUDA is looked for where a kernel is asked for, and nowhere else.
NVCC = $(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc)
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_LIBS = -L$(CUDA_HOME)/lib64 -lcublasLt -lcudart -lstdc++
# NCCL has its headers and library in folders of this one: those of the toolkit, or of PyTorch's
# package nvidia-nccl, which has no libnccl.so.
NCCL_HOME = $(CUDA_HOME)
HAS_NCCL = $(wildcard $(NCCL_HOME)/include/nccl.h)
NCCL_LIBS = $(firstword $(wildcard $(NCCL_HOME)/lib/libnccl.so.2 $(NCCL_HOME)/lib64/libnccl.so.2)) \
    -Wl,-rpath,$(NCCL_HOME)/lib
NCCL_PROGRAMS = $(GPT)-nccl $(NCCL_TEST) $(BUILD)/bench/nccl
# GPU_ARCH=sm_90 builds for one GPU, which is faster; by default for all from sm_80 on.
GPU_ARCH =
# sm_90a: of Hopper with its wgmma, which only that one has; RBK_SM90A tells the launcher.
GPU_CODE = $(if $(GPU_ARCH),-arch=$(GPU_ARCH:sm_90=sm_90a),\
             -gencode arch=compute_80,code=[sm_80,compute_80] \
             -gencode arch=compute_90a,code=sm_90a) \
           $(if $(filter-out sm_90 sm_90a,$(GPU_ARCH)),,-DRBK_SM90A)

.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.SECONDARY:

all: $(STATIC) $(SHARED) $(PRELOAD) $(COMMAND) $(GPT) $(MINIMAL) $(EXAMPLES) $(MLP_BEFORE) $(GUIDE) $(MAN_PAGES)

# ---- how it is made ----------------------------------------------------------------------------
$(BUILD)/src/%.o: private FOLDER_CFLAGS := -Isrc
$(BUILD)/preload/%.o: private FOLDER_CFLAGS := -Isrc -I.
# What the command prints is looked after as in the examples (output.h).
$(BUILD)/src/cli/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples
# Pairs of stores to a struct are faster one by one.
$(BUILD)/src/pool/%.o: private FOLDER_CFLAGS := -Isrc -fno-tree-slp-vectorize
# tests/cuda has a stand-in for CUDA's headers. Most tests compute little, and compile in half the time without optimization.
TEST_INCLUDES := -Isrc -Iexamples -Itests -I. -isystem tests/cuda
$(BUILD)/tests/%.o: private FOLDER_CFLAGS := $(TEST_INCLUDES)
$(BUILD)/tests/unit/%.o $(BUILD)/tests/integration/%.o $(BUILD)/tests/fault/%.o: private FOLDER_CFLAGS := -O0 $(TEST_INCLUDES)
$(BUILD)/tests/integration/check_rounding.o: private FOLDER_CFLAGS := $(TEST_INCLUDES)
$(BUILD)/bench/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples
# The arithmetic of the reference model: every contraction is written out, none is the compiler's.
$(BUILD)/examples/%.o: private FOLDER_CFLAGS := -Iexamples -O3 -ffp-contract=off

$(BUILD)/%.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) $(FOLDER_CFLAGS) -MMD -MP -c -o $@ $<

# C++ of the tests, which is what headers are to bear, needs nothing of its library but exceptions.
$(BUILD)/tests/integration/wrap_throw.o: private EXCEPTIONS := -fexceptions
$(BUILD)/tests/%.o: tests/%.cc $(BUILD)/flags
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=c++17 $(or $(EXCEPTIONS),-fno-exceptions) -fno-rtti -pthread -fPIC -Wall -Wextra -Wpedantic -Wshadow \
	    -Iinclude -isystem tests/cuda $(CFLAGS) $(SANITIZE_CXX) -MMD -MP -c -o $@ $<

# Changed when the flags are, so that everything is built again.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(ALL_CFLAGS)' | cmp -s - $@ || { scripts/show-found; \
	    echo '$(CC) $(ALL_CFLAGS)' > $@; }

$(STATIC): $(LIB_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

# A sanitizer's runtime is in the program, not in the library.
$(SHARED): $(LIB_OBJ)
	$(Q)$(CC) $(SANITIZE) -shared -Wl,-soname,$(SONAME) $(if $(SAN),,-Wl,--no-undefined) -o $@ $^ $(LIBS)
	@ln -sf $(@F) $(BUILD)/$(SONAME)
	@ln -sf $(SONAME) $(BUILD)/librebatch.so

# The session is that of the shared library; of the static one come the library's private parts,
# which stay inside. It shows the driver's names and dlsym alone.
$(BUILD)/librebatch_wrap.so: $(PRELOAD_OBJ) $(SHARED) $(STATIC)
	$(Q)$(CC) -shared -Wl,-soname,$(@F) -Wl,--no-undefined -Wl,--exclude-libs,ALL -Wl,-rpath,'$$ORIGIN' \
	    -o $@ $(PRELOAD_OBJ) -L$(BUILD) -lrebatch $(STATIC) $(LIBS) -ldl

$(COMMAND): $(CLI_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

$(GPT) $(GPT)-cuda: $(call objects,$(GPT_NO_MPI_SRC))
$(GPT): $(BUILD)/examples/gpt/main.o
$(DEMO): $(BUILD)/examples/gpt/demo.o
$(GPT) $(DEMO): $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LIBS) -lmd

$(GPT)-cuda: $(BUILD)/examples/gpt/main.o
$(DEMO)-cuda: $(BUILD)/examples/gpt/demo.o
$(GPT)-cuda $(DEMO)-cuda: $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(CUDA_LIBS) $(LIBS) -lmd

$(GPT)-mpi: $(BUILD)/examples/gpt/main.o $(call objects,$(GPT_MPI_SRC)) $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lmd $(shell mpicc -showme:link)

$(GPT)-nccl: $(BUILD)/examples/gpt/main.o $(call objects,$(GPT_NCCL_SRC)) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(NCCL_LIBS) $(LIBS) -lmd

$(MINIMAL): $(BUILD)/examples/minimal.o $(SHARED)
	$(Q)$(CC) $(SANITIZE) -o $@ $< -L$(BUILD) -lrebatch -Wl,-rpath,'$$ORIGIN/..' $(LIBS)

$(BUILD)/examples/mlp.o: private FOLDER_CFLAGS := -O3 -ffp-contract=off -DREBATCH
$(MLP_BEFORE): examples/mlp.c $(BUILD)/flags
	$(Q)$(CC) $(ALL_CFLAGS) -O3 -ffp-contract=off -o $@ $< -lm
$(EXAMPLES) $(GUIDE): %: %.o $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

# What of the preloaded library takes no function of others is tested within the program.
$(TESTS): $(TEST_OBJ) $(addprefix $(BUILD)/preload/,holdings.o record.o sentence.o) $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ -lcriterion $(LIBS) -lmd -lstdc++

$(RANKS): $(RANKS_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

# MPI is looked for where it is asked for, and nowhere else.
$(BUILD)/tests/mpi/ranks.o $(BUILD)/bench/vote_mpi.o $(call objects,$(GPT_MPI_SRC)): private FOLDER_CFLAGS = \
    -Iexamples $(shell mpicc -showme:compile | sed 's/-I/-isystem /g')
$(BUILD)/tests/mpi/ranks.o: private FOLDER_CFLAGS = \
    -Itests $(shell mpicc -showme:compile | sed 's/-I/-isystem /g')
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
	$(Q)$(CC) $(ALL_CFLAGS) -Iexamples -Itests -isystem tests/cuda -MMD -MP -c -o $@ $<
$(NCCL_STANDIN)/ranks: $(NCCL_STANDIN)/tests/nccl/ranks.o $(BUILD)/tests/nccl/standin.o $(DRAWN_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)
$(NCCL_STANDIN)/gpt-nccl: $(NCCL_STANDIN)/examples/gpt/ranks_nccl.o $(BUILD)/tests/nccl/standin.o \
    $(BUILD)/examples/gpt/main.o $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lmd

$(STORM): $(STORM_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS)

# Stand-ins for CUDA's driver, under its name. As in CUDA's, their functions are not taken by others
# of the same names.
TEST_DRIVERS := $(patsubst %,$(BUILD)/tests/drivers/%/libcuda.so.1,old whole gpu leaky)
# One whose functions are.
$(BUILD)/tests/drivers/leaky/libcuda.so.1: private SYMBOLIC :=
$(TESTS): | $(TEST_DRIVERS)
SYMBOLIC := -Wl,-Bsymbolic
$(patsubst %,$(BUILD)/tests/drivers/%/libcuda.so.1,whole gpu leaky): tests/drivers/calls.c src/device/cuda_driver.h
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

$(BUILD)/bench/%: $(BUILD)/bench/%.o $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lz -ldl

$(BUILD)/bench/events: $(addprefix $(BUILD)/bench/replay/,trace.o ids.o)
$(REPLAY): $(REPLAY_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lz

$(BUILD)/kernels/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(GPU_CODE)' | cmp -s - $@ || echo '$(GPU_CODE)' > $@

$(BUILD)/kernels/%.o: kernels/%.cu $(BUILD)/kernels/flags
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O3 $(GPU_CODE) -Xcompiler -fPIC,-Wall,-Wextra -MMD -MP \
	    -MF $(@:.o=.d) -c -o $@ $<

# The same programs twice: as they were, and wrapped.
WRAP_CU = $(Q)$(NVCC) -std=c++17 -O3 $(GPU_CODE) -Xcompiler -Wall,-Wextra -Iinclude -cudart shared -o $@ $<
$(WRAP_EXISTING)-before $(WRAP_BUFFERS)-before: $(BUILD)/%-before: %.cu $(BUILD)/kernels/flags
	@mkdir -p $(@D)
	$(WRAP_CU)
$(WRAP_EXISTING) $(WRAP_BUFFERS): $(BUILD)/%: %.cu $(wildcard include/rebatch/*.h) $(BUILD)/kernels/flags $(STATIC)
	@mkdir -p $(@D)
	$(WRAP_CU) -DREBATCH $(STATIC) $(LIBS:-pthread=-Xcompiler -pthread)

$(BUILD)/examples/separable_cnn-cuda: examples/separable_cnn.cu $(wildcard examples/separable_*.h) examples/output.h
$(BUILD)/examples/cpp_raii: examples/cpp_raii.cu
$(BUILD)/examples/curand_dropout: examples/curand_dropout.cu
$(BUILD)/examples/curand_dropout: private CUDA_LIBS := -lcurand
$(CUDA_EXAMPLES): $(PUBLIC_HEADERS) $(BUILD)/kernels/flags $(STATIC)
	@mkdir -p $(@D)
	$(Q)$(NVCC) -std=c++17 -O3 $(GPU_CODE) -Xcompiler -Wall,-Wextra -Iinclude -cudart shared -o $@ \
	    $(filter %.cu,$^) $(STATIC) $(CUDA_LIBS) $(LIBS:-pthread=-Xcompiler -pthread)

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

# The manual: one page for the command, and one for each public header from its comments.
MAN_DATE = $(shell date -u -d @$${SOURCE_DATE_EPOCH:-$$(stat -c %Y $<)} +%F)
build/man/man1/%.1: docs/man/%.1 include/rebatch/version.h
	@mkdir -p $(@D)
	$(Q)sed -e 's/@date@/$(MAN_DATE)/' -e 's/@version@/$(VERSION)/' $< > $@

HEADER_PAGE = @mkdir -p $(@D) && scripts/expand-lists $< | \
    scripts/man-page -v version=$(VERSION) -v date=$(MAN_DATE) > $@
build/man/man3/rebatch.3: include/rebatch/rebatch.h
	$(HEADER_PAGE)
build/man/man3/rebatch_%.3: include/rebatch/%.h
	$(HEADER_PAGE)
$(filter %.3,$(MAN_PAGES)): include/rebatch/version.h scripts/expand-lists scripts/man-page

$(KERNELS): $(KERNEL_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(BUILD)/tests/gpu/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples -Itests -Ikernels \
    -isystem $(CUDA_HOME)/include

$(GPT_CUDA_OBJ): private FOLDER_CFLAGS := -Iexamples -Ikernels -isystem $(CUDA_HOME)/include

$(BUILD)/bench/kernels.o: private FOLDER_CFLAGS := -Ikernels -isystem $(CUDA_HOME)/include

$(BUILD)/bench/kernels: $(BUILD)/bench/kernels.o $(KERNELS)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(LIBS)

$(BUILD)/bench/gpt_budget.o: private FOLDER_CFLAGS := -Iexamples -Ikernels \
    -isystem $(CUDA_HOME)/include

$(BUILD)/bench/gpt_search: $(BUILD)/bench/gpt_search.o $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LIBS) -lmd

$(BUILD)/bench/gpt_recovery: $(BUILD)/bench/gpt_recovery.o $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(LIBS) -lmd

$(BUILD)/bench/gpt: $(BUILD)/bench/gpt.o $(BUILD)/bench/gpt_budget.o $(GPT_OBJ) $(GPT_CUDA_OBJ) \
    $(KERNELS) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(LIBS) -lmd

$(GPU_TESTS): $(call objects,$(GPU_TEST_SRC) $(INVARIANTS_SRC) tests/integration/gpt_reference.c tests/integration/gpt_run.c) $(FAULT_OBJ) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	@mkdir -p $(@D)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ -lcriterion $(CUDA_LIBS) $(LIBS) -lmd

-include $(patsubst %.o,%.d,$(KERNEL_OBJ) $(call objects,$(GPU_TEST_SRC)))
-include $(BUILD)/tests/mpi/ranks.d $(DRAWN_OBJ:.o=.d) $(NCCL_OBJ:.o=.d) $(BUILD)/tests/nccl/standin.d \
         $(NCCL_STANDIN)/tests/nccl/ranks.d $(NCCL_STANDIN)/examples/gpt/ranks_nccl.d
-include $(patsubst %.o,%.d,$(LIB_OBJ) $(CLI_OBJ) $(PRELOAD_OBJ) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(TEST_OBJ) $(STORM_OBJ) $(RANKS_OBJ))
-include $(patsubst %.c,$(BUILD)/%.d,$(GPT_MAINS) examples/minimal.c $(wildcard bench/*.c bench/replay/*.c)) \
         $(addsuffix .d,$(EXAMPLES) $(GUIDE))

# ---- what people run ---------------------------------------------------------------------------
# Several jobs at once, as many as processors, without the user having to say so.
PARALLEL := $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || echo 1))
SUBMAKE = @$(MAKE) -s --no-print-directory $(PARALLEL)

build: ## the library, the command and the examples; what make alone does
	@scripts/install-deps build
	$(SUBMAKE) all
	@echo "built in $(BUILD): librebatch.so, librebatch.a, librebatch_wrap.so, rebatch, examples/"

DEVICE = host
demo: ## train under a cap that shrinks, and without one: the same bits (DEVICE=cuda)
	@scripts/install-deps build
	@if [ "$(DEVICE)" = cuda ] && [ ! -x "$(NVCC)" ]; then \
	    echo "demo: DEVICE=cuda needs nvcc of the CUDA toolkit; make demo runs on the CPU" >&2; exit 1; \
	fi
	$(SUBMAKE) $(if $(filter cuda,$(DEVICE)),$(DEMO)-cuda,$(DEMO))
	@$(if $(filter cuda,$(DEVICE)),LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH \
	    $(DEMO)-cuda --device cuda $(DEMO_FLAGS),$(DEMO) $(DEMO_FLAGS))

# Programs that tests run as a user would.
TESTED_PROGRAMS := $(COMMAND) $(REPLAY) $(GPT) $(DEMO) $(MINIMAL) $(EXAMPLES) $(MLP_BEFORE) $(GUIDE) $(PRELOAD) $(if $(SAN),,$(PRELOAD_TESTS) $(WRAP_TESTS))
TEST_VARIABLES := $(if $(SAN),,REBATCH_PRELOAD=$(BUILD)/tests/preload) REBATCH_COMMAND=$(COMMAND) REBATCH_REPLAY=$(REPLAY) REBATCH_GPT=$(GPT) REBATCH_EXAMPLES=$(BUILD)/examples \
    REBATCH_LOG_LEVEL=quiet

TEST_FLAGS =
STRIDE = $(if $(SAN)$(CHECK),8,1)
test: ## every test (SAN=address,undefined for sanitizers, CHECK=1 for the pool's state)
	@scripts/install-deps build test
	$(SUBMAKE) $(TESTS) $(TESTED_PROGRAMS)
	@scripts/arrows $(BUILD)
	$(if $(SAN),@scripts/test-run-checked $(CC) $(SANITIZE))
	@$(TEST_VARIABLES) REBATCH_TEST_STRIDE=$(STRIDE) scripts/show-tests $(BUILD)/tests.log \
	    $(if $(SAN),scripts/run-checked sanitizers) $(TESTS) $(TEST_FLAGS)

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

gpt-nccl: ## the reference model on several GPUs (NCCL_HOME)
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)-nccl
	@echo "built $(GPT)-nccl"

gpt-mpi: ## the reference model on the ranks that mpirun starts
	@scripts/install-deps build mpi
	$(SUBMAKE) $(GPT)-mpi
	@echo "built $(GPT)-mpi"

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
test-wrap-existing: ## CUDA trainers before and after ten lines of rebatch (needs a GPU)
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
test-python: ## the Python package, with PyTorch on a stand-in for CUDA (TORCH=2.15.0)
	@PYTHON=$(PYTHON) scripts/install-deps python
	@PYTHON=$(PYTHON) scripts/python-env build/python $(TORCH)
	@FLAGS='$(PYTEST_FLAGS)' scripts/test-python build/python

test-python-gpu: ## the same on a GPU, with the PyTorch and pytest of this machine's python3
	@scripts/install-deps build
	@PYTHON=$(PYTHON) FLAGS='$(PYTEST_FLAGS)' scripts/test-python --gpu build/python-gpu

FRONTS =
wheel: ## the Python package as one file in build/wheel (a release: FRONTS=all)
	@PYTHON=$(PYTHON) scripts/install-deps python
	@PYTHON=$(PYTHON) scripts/wheel build/wheel $(FRONTS)

test-valgrind: ## every test under valgrind
	@scripts/install-deps build test valgrind
	$(SUBMAKE) $(TESTS) $(TESTED_PROGRAMS)
	@$(TEST_VARIABLES) REBATCH_TEST_STRIDE=40 \
	    scripts/run-checked valgrind $(TESTS) $(TEST_FLAGS)

lint: ## format, banned calls, include order, headers alone, what the contract names
	@PYTHON=$(PYTHON) scripts/install-deps build lint python
	@PYTHON=$(PYTHON) scripts/python-env build/python $(TORCH)
	@scripts/lint

docs: ## API reference in build/docs/html; checks it and the man pages
	@scripts/install-deps build docs
	$(SUBMAKE) $(MAN_PAGES)
	@mkdir -p build/docs
	@VERSION=$(VERSION) doxygen docs/Doxyfile
	@scripts/check-man $(MAN_PAGES)

promises: ## which tests hold which promise of the contract: build/promises.md
	@mkdir -p build
	@scripts/promises >build/promises.md
	@echo build/promises.md

bench-step: ## what the wrap costs a micro-batch when nothing goes wrong
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/step
	@$(BUILD)/bench/step

bench-vote: ## what the votes of several ranks cost a step beyond their all-reduces
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/vote
	@$(BUILD)/bench/vote

bench-vote-mpi: ## what a vote of two processes costs beyond MPI_Allreduce
	@scripts/install-deps build mpi
	$(SUBMAKE) $(BUILD)/bench/vote_mpi
	@mpirun --allow-run-as-root --oversubscribe -n 2 $(BUILD)/bench/vote_mpi

bench-nccl: ## what a vote of two GPUs costs beyond NCCL's all-reduce, and what NCCL holds of a GPU
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/nccl
	@NCCL_NVLS_ENABLE=0 LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH $(BUILD)/bench/nccl

bench-pool: ## what an allocation costs, beside glibc's and mimalloc's
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/pool
	@mkdir -p build/bench
	@$(BUILD)/bench/pool

REPLAY_FLAGS = bench/traces/*.trace.gz
bench-replay: ## recorded allocations in the pool: memory held, device calls, time (REPLAY_FLAGS="--smallest x.trace")
	@scripts/install-deps build test
	$(SUBMAKE) $(REPLAY)
	@$(REPLAY) $(REPLAY_FLAGS)

bench-short: ## what a training step costs in the driver where memory is short (SHORT_FLAGS="500": a GPU that is behind)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/short
	@$(BUILD)/bench/short $(SHORT_FLAGS)

bench-events: ## how often a pool asks how far streams have come, by how far they lag
	@scripts/install-deps build test
	$(SUBMAKE) $(BUILD)/bench/events
	@$(BUILD)/bench/events bench/traces/two-streams.trace.gz

PROBE_FLAGS =
bench-probe: ## how well the probe finds, beside others (PROBE_FLAGS="--seed 7")
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/probe
	@$(BUILD)/bench/probe $(PROBE_FLAGS)

bench-cotenant: ## a co-tenant that comes and goes; draws docs/cotenant.svg (needs matplotlib)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/cotenant
	@$(BUILD)/bench/cotenant $(BUILD)/bench/cotenant.csv
	@$(PYTHON) bench/cotenant.py $(BUILD)/bench/cotenant.csv docs/cotenant.svg

bench-cost: ## micro-batches of variable lengths, cut by cost and by count
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/cost
	@$(BUILD)/bench/cost

bench-kernels: ## how fast each GPU operation of the reference model runs (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/kernels
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH $(BUILD)/bench/kernels

bench-gpt: ## how fast GPT-2 trains, beside PyTorch (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/gpt
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH scripts/bench-gpt $(BUILD)/bench/gpt

bench-budget: ## where the time of such a step goes, operation by operation
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/gpt
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH $(BUILD)/bench/gpt --budget

bench-search: ## the host's part of finding GPT-2's micro-batch, by a probe and by learning
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/gpt_search
	@$(BUILD)/bench/gpt_search

bench-recovery: ## what an OOM costs GPT-2, and finding the size, beside others (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/gpt_recovery $(BUILD)/bench/gpt_tenant
	@LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH scripts/bench-recovery $(BUILD)/bench

MAN := $(DESTDIR)$(prefix)/share/man
DOC := $(DESTDIR)$(prefix)/share/doc/rebatch
install: build ## into DESTDIR/prefix: libraries, headers, command, man pages, documents, examples
	@install -d $(DESTDIR)$(prefix)/include/rebatch $(DESTDIR)$(prefix)/lib/pkgconfig \
	    $(DESTDIR)$(prefix)/bin $(MAN)/man1 $(MAN)/man3 $(DOC)/docs $(DOC)/examples/guide
	@install -m 644 $(PUBLIC_HEADERS) $(DESTDIR)$(prefix)/include/rebatch
	@install -m 644 $(STATIC) $(DESTDIR)$(prefix)/lib
	@install -m 755 $(SHARED) $(filter %.so,$(PRELOAD)) $(DESTDIR)$(prefix)/lib
	@ln -sf $(notdir $(SHARED)) $(DESTDIR)$(prefix)/lib/$(SONAME)
	@ln -sf $(SONAME) $(DESTDIR)$(prefix)/lib/librebatch.so
	@install -m 755 $(COMMAND) $(DESTDIR)$(prefix)/bin
	@sed -e 's|@prefix@|$(prefix)|' -e 's|@version@|$(VERSION)|' scripts/rebatch.pc.in \
	    > $(DESTDIR)$(prefix)/lib/pkgconfig/rebatch.pc
	@install -m 644 $(filter %.1,$(MAN_PAGES)) $(MAN)/man1
	@install -m 644 $(filter %.3,$(MAN_PAGES)) $(MAN)/man3
	@install -m 644 README.md LICENSE CHANGELOG.md $(DOC)
	@install -m 644 $(wildcard docs/*.md docs/*.svg) $(DOC)/docs
	@install -m 644 $(wildcard examples/*.*) examples/Makefile $(DOC)/examples
	@install -m 644 $(wildcard examples/guide/*) $(DOC)/examples/guide
	@# Each function has a page that leads to that of its header.
	@cd $(MAN)/man3 && for page in $(notdir $(filter %.3,$(MAN_PAGES))); do \
	    for name in $$(sed -n 's/^\.SS \(rebatch_[a-z_]*\)()$$/\1/p' $$page); do \
	        [ $$name.3 = $$page ] || { echo ".so man3/$$page" > $$name.3; chmod 644 $$name.3; }; \
	    done; \
	done
	@echo "installed in $(DESTDIR)$(prefix)"
	@$(if $(DESTDIR),:,echo "run 'sudo ldconfig' so that programs find librebatch.so, or set LD_LIBRARY_PATH=$(prefix)/lib")

uninstall: ## removes from DESTDIR/prefix what install put there
	@rm -rf $(DESTDIR)$(prefix)/include/rebatch $(DOC)
	@rm -f $(DESTDIR)$(prefix)/lib/librebatch.* $(DESTDIR)$(prefix)/lib/librebatch_wrap.so $(DESTDIR)$(prefix)/bin/rebatch \
	    $(DESTDIR)$(prefix)/lib/pkgconfig/rebatch.pc $(MAN)/man1/rebatch.1 $(MAN)/man3/rebatch.3 \
	    $(MAN)/man3/rebatch_*.3
	@echo "removed from $(DESTDIR)$(prefix)"

test-install: ## install into a temporary folder and build examples/minimal.c against that
	@scripts/install-deps build install
	$(SUBMAKE) all
	@scripts/test-install

clean: ## remove build/
	rm -rf build

help: ## this list
	@echo "make WHAT, where WHAT is"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 22
	@echo "variables: CC CFLAGS SAN prefix DESTDIR; V=1 shows every command"

Q := $(if $(V),,@)
FORCE:
.PHONY: all demo test test-programs test-variables test-storm test-ranks test-model test-mpi test-nccl test-ranks-gpu gpt-mpi gpt-nccl test-undefined test-threads kernels test-gpu test-wrap-existing test-examples-gpu test-preload-gpu test-gpu-large \
    test-sanitizer test-python test-python-gpu wheel test-valgrind lint docs promises bench-step bench-vote bench-vote-mpi bench-nccl bench-pool bench-replay bench-short bench-events bench-probe bench-cost \
    bench-cotenant bench-kernels bench-gpt bench-budget bench-search bench-recovery \
    build install uninstall test-install clean help FORCE
