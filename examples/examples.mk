# examples.mk: the examples, the reference model and its kernels. The Makefile includes it.

GPT_MAINS := examples/gpt/main.c examples/gpt/demo.c
# The model's operations on a GPU; a build without CUDA has the stand-in that says so.
GPT_CUDA_SRC := $(wildcard examples/gpt/*_cuda.c)
GPT_NO_CUDA_SRC := $(wildcard examples/gpt/cuda_absent.c)
# Those of several processes; a build without MPI and NCCL has the stand-in for one.
GPT_MPI_SRC := examples/gpt/ranks_mpi.c
GPT_NCCL_SRC := examples/gpt/ranks_nccl.c
GPT_NO_MPI_SRC := examples/gpt/ranks_absent.c
GPT_SRC := $(filter-out $(GPT_MAINS) $(GPT_CUDA_SRC) $(GPT_NO_CUDA_SRC) $(GPT_MPI_SRC) $(GPT_NCCL_SRC) $(GPT_NO_MPI_SRC),$(wildcard examples/gpt/*.c))
KERNEL_SRC := $(wildcard kernels/*.cu)
GPT_OBJ := $(call objects,$(GPT_SRC))
GPT_CUDA_OBJ := $(call objects,$(GPT_CUDA_SRC))
GPT_NO_CUDA_OBJ := $(call objects,$(GPT_NO_CUDA_SRC))

GPT := $(BUILD)/examples/gpt/gpt
DEMO := $(BUILD)/examples/gpt/demo
MINIMAL := $(BUILD)/examples/minimal
EXAMPLES := $(addprefix $(BUILD)/examples/,mlp evaluate variable_length separable_cnn)
# As it was before it was wrapped.
MLP_BEFORE := $(BUILD)/examples/mlp-before
GUIDE := $(BUILD)/examples/guide/before $(BUILD)/examples/guide/train $(BUILD)/examples/guide/in_place
KERNEL_OBJ := $(patsubst %.cu,$(BUILD)/%.o,$(KERNEL_SRC))
KERNELS := $(BUILD)/libgpt_kernels.a
WRAP_EXISTING := $(BUILD)/examples/wrap_existing
WRAP_BUFFERS := $(BUILD)/examples/wrap_buffers
CUDA_EXAMPLES := $(addprefix $(BUILD)/examples/,separable_cnn-cuda cpp_raii curand_dropout)

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

# The arithmetic of the reference model: every contraction is written out, none is the compiler's.
$(BUILD)/examples/%.o: private FOLDER_CFLAGS := -Iexamples -O3 -ffp-contract=off

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

$(KERNELS): $(KERNEL_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(GPT_CUDA_OBJ): private FOLDER_CFLAGS := -Iexamples -Ikernels -isystem $(CUDA_HOME)/include

-include $(patsubst %.o,%.d,$(KERNEL_OBJ) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(call objects,$(GPT_MAINS) examples/minimal.c)) $(addsuffix .d,$(EXAMPLES) $(GUIDE))

# ---- what people run

DEVICE = host
demo: ## train under a cap that shrinks, and without one: the same bits (DEVICE=cuda)
	@scripts/install-deps build
	@if [ "$(DEVICE)" = cuda ] && [ ! -x "$(NVCC)" ]; then \
	    echo "demo: DEVICE=cuda needs nvcc of the CUDA toolkit; make demo runs on the CPU" >&2; exit 1; \
	fi
	$(SUBMAKE) $(if $(filter cuda,$(DEVICE)),$(DEMO)-cuda,$(DEMO))
	@$(if $(filter cuda,$(DEVICE)),LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH \
	    $(DEMO)-cuda --device cuda $(DEMO_FLAGS),$(DEMO) $(DEMO_FLAGS))

gpt-nccl: ## the reference model on several GPUs (NCCL_HOME)
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)-nccl
	@echo "built $(GPT)-nccl"

gpt-mpi: ## the reference model on the ranks that mpirun starts
	@scripts/install-deps build mpi
	$(SUBMAKE) $(GPT)-mpi
	@echo "built $(GPT)-mpi"

