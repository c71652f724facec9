# gpt.mk: the reference model, its CUDA kernels and the demo, of which `make` alone builds none. The
# Makefile includes it.

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
KERNEL_OBJ := $(patsubst %.cu,$(BUILD)/%.o,$(KERNEL_SRC))
KERNELS := $(BUILD)/libgpt_kernels.a

# NCCL has its headers and library in folders of this one: those of the toolkit, or of PyTorch's
# package nvidia-nccl, which has no libnccl.so.
NCCL_HOME = $(CUDA_HOME)
HAS_NCCL = $(wildcard $(NCCL_HOME)/include/nccl.h)
NCCL_LIBS = $(firstword $(wildcard $(NCCL_HOME)/lib/libnccl.so.2 $(NCCL_HOME)/lib64/libnccl.so.2)) \
    -Wl,-rpath,$(NCCL_HOME)/lib
NCCL_PROGRAMS = $(GPT)-nccl $(NCCL_TEST) $(BUILD)/bench/nccl

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

$(BUILD)/kernels/%.o: kernels/%.cu $(BUILD)/kernels/flags
	@mkdir -p $(@D)
	$(Q)$(SHOW) $(NVCC) -std=c++17 -O3 $(GPU_CODE) -Xcompiler -fPIC,-Wall,-Wextra -MMD -MP \
	    -MF $(@:.o=.d) -c -o $@ $<

$(KERNELS): $(KERNEL_OBJ)
	@rm -f $@
	$(Q)$(AR) rcs $@ $^

$(GPT_CUDA_OBJ): private FOLDER_CFLAGS := -Iexamples -Ikernels -isystem $(CUDA_HOME)/include

-include $(patsubst %.o,%.d,$(KERNEL_OBJ) $(GPT_OBJ) $(GPT_CUDA_OBJ) $(call objects,$(GPT_MAINS)))

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

pictures: ## runs the demo, records it in docs/demo.csv, and draws the pictures of docs/pictures.py
	@scripts/install-deps build
	$(SUBMAKE) $(DEMO)
	@$(DEMO) --csv docs/demo.csv
	@$(PYTHON) docs/pictures.py

gpt: ## the reference model, on the CPU
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)
	@echo "built $(GPT)"

gpt-cuda: ## the reference model on a GPU (needs nvcc)
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)-cuda
	@echo "built $(GPT)-cuda"

gpt-nccl: ## the reference model on several GPUs (NCCL_HOME)
	@scripts/install-deps build
	$(SUBMAKE) $(GPT)-nccl
	@echo "built $(GPT)-nccl"

gpt-mpi: ## the reference model on the ranks that mpirun starts
	@scripts/install-deps build mpi
	$(SUBMAKE) $(GPT)-mpi
	@echo "built $(GPT)-mpi"

