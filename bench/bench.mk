# bench.mk: what is measured. The Makefile includes it.

# Recorded allocations against a pool.
REPLAY_OBJ := $(patsubst %.c,$(BUILD)/%.o,$(wildcard bench/replay/*.c))
REPLAY := $(BUILD)/bench/replay/replay

$(BUILD)/bench/%.o: private FOLDER_CFLAGS := -Isrc -Iexamples

$(BUILD)/bench/%: $(BUILD)/bench/%.o $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lz -ldl

$(REPLAY): $(REPLAY_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(LIBS) -lz

$(BUILD)/bench/kernels.o: private FOLDER_CFLAGS := -Ikernels -isystem $(CUDA_HOME)/include

$(BUILD)/bench/kernels: $(BUILD)/bench/kernels.o $(KERNELS)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(LIBS)

$(BUILD)/bench/gpt_graph.o: private FOLDER_CFLAGS := -Iexamples -Ikernels \
    -isystem $(CUDA_HOME)/include

$(BUILD)/bench/gpt_search: $(BUILD)/bench/gpt_search.o $(GPT_OBJ) $(GPT_NO_CUDA_OBJ) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $(filter %.o,$^) $(filter %.a,$^) $(LIBS) -lmd

$(addprefix $(BUILD)/bench/,gpt gpt_graph gpt_recovery): %: %.o $(GPT_OBJ) $(GPT_CUDA_OBJ) $(KERNELS) $(STATIC)
	$(Q)$(CC) $(SANITIZE) -o $@ $^ $(CUDA_LIBS) $(LIBS) -lmd

-include $(patsubst %.c,$(BUILD)/%.d,$(wildcard bench/*.c bench/replay/*.c)) $(BUILD)/bench/vote_mpi.d

# build_bench PROGRAM [DEPENDENCIES]
define build_bench
@scripts/install-deps build $(2)
$(SUBMAKE) $(BUILD)/bench/$(1)
endef
ON_GPU = LD_LIBRARY_PATH=$(CUDA_HOME)/lib64:$$LD_LIBRARY_PATH

bench-step: ## what the wrap costs a micro-batch when nothing goes wrong
	$(call build_bench,step)
	@$(BUILD)/bench/step

bench-vote: ## what a vote of one rank costs a step
	$(call build_bench,vote)
	@$(BUILD)/bench/vote

bench-vote-mpi: ## what a vote of two processes costs beyond MPI_Allreduce
	$(call build_bench,vote_mpi,mpi)
	@mpirun --allow-run-as-root --oversubscribe -n 2 $(BUILD)/bench/vote_mpi

bench-nccl: ## what a vote of two GPUs costs beyond NCCL's all-reduce, and what NCCL holds of a GPU
	$(call build_bench,nccl)
	@NCCL_NVLS_ENABLE=0 $(ON_GPU) $(BUILD)/bench/nccl

bench-pool: ## what an allocation costs, beside glibc's and mimalloc's
	$(call build_bench,pool)
	@mkdir -p build/bench
	@$(BUILD)/bench/pool

REPLAY_FLAGS = bench/traces/*.trace.gz
bench-replay: ## recorded allocations in the pool: memory held, device calls, time (REPLAY_FLAGS="--smallest x.trace")
	@scripts/install-deps build test
	$(SUBMAKE) $(REPLAY)
	@$(REPLAY) $(REPLAY_FLAGS)

bench-traces: ## writes those of our own in bench/traces again: they come out the same everywhere
	$(call build_bench,make_traces,test)
	@$(BUILD)/bench/make_traces bench/traces

bench-sleep: ## what sleep and wake of a pool cost for each GiB (SLEEP_FLAGS=16: GiB in use; on a GPU where there is one)
	$(call build_bench,sleep)
	@$(BUILD)/bench/sleep $(SLEEP_FLAGS)

bench-short: ## what a training step costs in the driver where memory is short (SHORT_FLAGS="500": a GPU that is behind)
	$(call build_bench,short)
	@$(BUILD)/bench/short $(SHORT_FLAGS)

PROBE_FLAGS =
bench-probe: ## how well the probe finds, beside others (PROBE_FLAGS="--seed 7")
	$(call build_bench,probe)
	@$(BUILD)/bench/probe $(PROBE_FLAGS)

bench-cotenant: ## a co-tenant that comes and goes
	$(call build_bench,cotenant)
	@$(BUILD)/bench/cotenant

bench-cost: ## micro-batches of variable lengths, cut by cost and by count
	$(call build_bench,cost)
	@$(BUILD)/bench/cost

bench-kernels: ## how fast the reference model's products run on a GPU
	$(call build_bench,kernels)
	@$(ON_GPU) $(BUILD)/bench/kernels

bench-gpt: ## how fast GPT-2 trains, beside PyTorch (needs a GPU)
	$(call build_bench,gpt)
	@$(ON_GPU) scripts/bench-gpt $(BUILD)/bench/gpt

bench-gpt-graph: ## what the replay of a CUDA graph saves a micro-batch of GPT-2 (needs a GPU)
	$(call build_bench,gpt_graph)
	@$(ON_GPU) $(BUILD)/bench/gpt_graph

bench-search: ## the host's part of finding GPT-2's micro-batch, by a probe and by learning
	$(call build_bench,gpt_search)
	@$(BUILD)/bench/gpt_search

bench-recovery: ## what an OOM costs GPT-2, and finding the size, beside others (needs a GPU)
	@scripts/install-deps build
	$(SUBMAKE) $(BUILD)/bench/gpt_recovery $(BUILD)/bench/gpt_tenant
	@$(ON_GPU) scripts/bench-recovery $(BUILD)/bench


FIGURES_FLAGS =
FIGURES_PYTHON = $(or $(wildcard build/python/venv/bin/python),$(PYTHON))
figures: ## what README.md and docs/benchmarks.md show, into OUT/figures.json (OUT=out FIGURES_FLAGS="small oom", --help)
	@[ -n "$(OUT)" ] || { echo "make figures: OUT is missing: make figures OUT=out"; exit 1; }
	@scripts/install-deps build
	@$(FIGURES_PYTHON) python/native.py build/figures
	@PYTHONPATH=$(CURDIR)/build/figures $(FIGURES_PYTHON) bench/figures.py $(OUT) $(FIGURES_FLAGS)
