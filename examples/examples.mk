# examples.mk: the examples, but for the reference model in examples/gpt. The Makefile includes it.

MINIMAL := $(BUILD)/examples/minimal
EXAMPLES := $(addprefix $(BUILD)/examples/,mlp evaluate variable_length separable_cnn)
# As it was before it was wrapped.
MLP_BEFORE := $(BUILD)/examples/mlp-before
GUIDE := $(BUILD)/examples/guide/before $(BUILD)/examples/guide/train $(BUILD)/examples/guide/in_place
WRAP_EXISTING := $(BUILD)/examples/wrap_existing
WRAP_BUFFERS := $(BUILD)/examples/wrap_buffers
CUDA_EXAMPLES := $(addprefix $(BUILD)/examples/,separable_cnn-cuda cpp_raii curand_dropout)

# CUDA is looked for where a kernel is asked for, and nowhere else.
NVCC = $(or $(shell command -v nvcc),/usr/local/cuda/bin/nvcc)
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
CUDA_LIBS = -L$(CUDA_HOME)/lib64 -lcublasLt -lcudart -lstdc++
# GPU_ARCH=sm_90 builds for one GPU, which is faster; by default for all from sm_80 on.
GPU_ARCH =
# sm_90a: of Hopper with its wgmma, which only that one has; RBK_SM90A tells the launcher.
GPU_CODE = $(if $(GPU_ARCH),-arch=$(GPU_ARCH:sm_90=sm_90a),\
             -gencode arch=compute_80,code=[sm_80,compute_80] \
             -gencode arch=compute_90a,code=sm_90a) \
           $(if $(filter-out sm_90 sm_90a,$(GPU_ARCH)),,-DRBK_SM90A)

# Every contraction is written out, none is the compiler's.
$(BUILD)/examples/%.o: private FOLDER_CFLAGS := -Iexamples -O3 -ffp-contract=off

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

-include $(BUILD)/examples/minimal.d $(addsuffix .d,$(EXAMPLES) $(GUIDE))
