"""The parts of bench/figures.py: what each runs, and the rows that it makes of it: the table, the
name, and a text for each column. Columns and goals are those of the pages. Rows of the table
`figures` are README's."""

from figures_run import Part, median_of, number

PARTS = {}
GIB = 1 << 30


def part(paths, **options):
    def add(function):
        PARTS[function.__name__.replace("_", "-")] = Part(function, paths.split(), **options)
        return function

    return add


def show(value, unit=""):
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def ratio(value):
    return f"{value:.2f}"


def by(lines, key):
    return {line[key]: line for line in lines if key in line}


def line_named(lines, name):
    return next(line for line in lines if line.get("line") == name)


def words_of(lines, *first):
    """Lines of words that begin with these, without them."""
    every = (line.get("words", []) for line in lines)
    return [words[len(first) :] for words in every if words and tuple(words[: len(first)]) == first]


# ---- one GPU, PyTorch ----

TORCH = " python/rebatch src"
WAYS = {
    "native": "plain loop",
    "expandable": "expandable segments",
    "native+Step": "Step",
    "install": "install()",
    "install+Step": "Step, install()",
    "halving": "halving",
}
TRAININGS = {
    "mlp": "MLP, 256 samples",
    "resnet18": "ResNet-18, 128 samples",
    "gpt": "GPT, 32 samples",
    "bert": "BERT base, 16 samples",
    "unet": "UNet, 32 samples",
    "lstm": "LSTM, 64 samples",
    "gpt2": "GPT-2 124M, 16 samples",
}
MICROS = {1: "", 4: ", in four", 8: ", in eight", 16: ", in sixteen"}
SMALL = {"plain": "plain loop", "step": "Step", "graphs": "graphs=True", "hand": "by hand"}


def training_of(line):
    return TRAININGS.get(line["training"], line["training"]) + MICROS[line["micros"]]


def scenario(run, name, flags="", times=1):
    """The lines of the scenario, by column."""
    found = run.python(f"pytorch.py {name} {flags}", f"{name} --small", times=times)
    return {WAYS[line["way"]]: line for line in found}


def share_of(found, key, base):
    """Of each way: its figure ÷ another, or ÷ that of the plain loop."""
    return {way: ratio(line[key] / (base[key] if isinstance(base, dict) else line[base]))
            for way, line in found.items()}  # fmt: skip


def for_readme(row, plain, ours, graphs=""):
    cells = {"plain or others": plain, "rebatch": ours, "with `graphs=True`": graphs}
    return "figures", row, {column: text for column, text in cells.items() if text}


@part("bench/pytorch.py" + TORCH, gpus=1)
def speed(run):
    found = scenario(run, "speed", times=2)
    plain = found["plain loop"]
    for line in found.values():
        line["first"] = line["first_ms"][0]
    cells = share_of(found, "tokens_per_s_behind", plain)
    yield "GPT-2 124M", "speed ÷ plain loop's", cells
    yield for_readme("GPT-2 124M, speed of a Step ÷ plain loop's", "1", cells["Step"])
    cells = share_of(found, "tokens_per_s", plain)
    yield "GPT-2 124M", "speed ÷ plain loop's, each step waits", cells
    cells = share_of(found, "reserved", "allocated")
    yield "GPT-2 124M", "memory reserved ÷ in use", cells
    row = "GPT-2 124M, memory reserved ÷ in use, after `install()`"
    yield for_readme(row, cells["plain loop"], cells["Step, install()"])
    cells = share_of(found, "first", plain)
    yield "GPT-2 124M", "first step ÷ plain loop's", cells
    yield for_readme("GPT-2 124M, time of the first step ÷ plain loop's", "1", cells["Step"])


@part("bench/pytorch.py" + TORCH, gpus=1)
def lengths(run):
    found = scenario(run, "lengths")
    cells = {
        way: f"{share}, {show(found[way]['tokens_per_s'] / 1000)}"
        for way, share in share_of(found, "reserved", "allocated").items()
    }
    row = "lengths at random: memory reserved ÷ in use, thousand tokens a second"
    yield "GPT-2 124M", row, cells


@part("bench/pytorch.py" + TORCH, gpus=1)
def taken(run):
    found = scenario(run, "taken", times=2)
    cells = {}
    for way, line in found.items():
        times = line["struck_ms"], *line["next_ms"]
        cells[way] = ", ".join(ratio(ms / line["before_ms"]) for ms in times)
    row = "memory is taken: that step, the next, the third ÷ those before"
    yield "GPT-2 124M", row, cells


@part("bench/pytorch.py" + TORCH, gpus=1)
def learn(run):
    found = scenario(run, "learn")
    sizes = {way: f"{show(line['micro'])}, {show(line['ooms'])}" for way, line in found.items()}
    yield "GPT-2 124M", "`learn`, 20 GiB: size found, OOMs", sizes
    shares = {way: show(line["ratio"]) for way, line in found.items()}
    yield "GPT-2 124M", "`learn`, 20 GiB: first step ÷ a later one", shares


@part("bench/pytorch.py" + TORCH, gpus=1)
def oom(run):
    found = {begun: scenario(run, "oom", f"--batch 64 --begun {begun}", 3) for begun in (64, 32)}
    told = {"Step": [], "Step, install()": []}
    for pool, first, told_ms in (
        ("cold", "first_ms", "lost_ms"),
        ("warm", "warm_ms", "warm_lost_ms"),
    ):
        for begun, ways in found.items():
            lost = {way: line[first] - line["clean_ms"] for way, line in ways.items()}
            cells = {way: show(ms, "ms") for way, ms in lost.items()}
            yield "GPT-2 124M", f"time of a first OOM, {pool} pool, begun with {begun}", cells
            for way, shares in told.items():
                shares.append(ways[way][told_ms] / lost[way])
            if (pool, begun) == ("cold", 64):
                row = "GPT-2 124M, a first OOM: time beyond a clean step"
                yield for_readme(row, f"halve and redo {cells['halving']}", cells["Step"])
    furthest = {way: max(shares, key=lambda share: abs(share - 1)) for way, shares in told.items()}
    cells = {way: ratio(share) for way, share in furthest.items()}
    yield "GPT-2 124M", "`lost_ms` of a report ÷ that time, the furthest off", cells


def small_row(line, suffix=""):
    name, times = training_of(line) + suffix, line["behind"]
    cells = {title: show(times[way], "ms") for way, title in SMALL.items() if way in times}
    for way in ("step", "graphs"):
        if way in times:
            cells[f"{SMALL[way]} ÷ plain"] = ratio(times[f"{way}/plain"])
    return "small models", name, cells


def small_rows(run, trainings, flags="", suffix=""):
    for training in trainings:
        for line in run.python(f"small.py {training} {flags}", f"mlp --micros 1 {flags}"):
            table, name, cells = small_row(line, suffix)
            yield table, name, cells
            if (
                not suffix
                and name in (TRAININGS["mlp"], TRAININGS["bert"])
                and "graphs=True" in cells
            ):
                ours = cells["Step"], cells["graphs=True"]
                yield for_readme(f"{name}: time of a step", cells["plain loop"], *ours)


@part("bench/small.py" + TORCH, gpus=1, seconds=250)
def small(run):
    yield from small_rows(run, list(TRAININGS)[:6])


@part("bench/small.py" + TORCH, gpus=1, seconds=150)
def gpt2(run):
    """In ever smaller micro-batches."""
    lines = run.python("small.py gpt2 --micros 1 4 8 16", "mlp --micros 1 4")
    whole = lines[0]["behind"]["plain"]
    for line in lines:
        times = {title: line["behind"].get(way, 0) for way, title in SMALL.items()}
        row, table = training_of(line), "small micro-batches"
        if line["micros"] == 1:
            cells = {way: show(ms, "ms") for way, ms in times.items()}
            yield table, f"{row}: time of a step", cells
        else:
            shares = {way: ratio(ms / whole) for way, ms in times.items()}
            yield table, f"{row}: ÷ plain loop, whole", shares


@part("bench/small.py" + TORCH, gpus=1, seconds=130)
def installed(run):
    yield from small_rows(run, list(TRAININGS)[:4], "--install", ", `install()`")


RESERVED = "bert gpt resnet18 gpt2 --micros 4 --reserved"


@part("bench/small.py" + TORCH, gpus=1, seconds=260)
def small_memory(run):
    row = "memory that PyTorch reserves in four, the worst of four models: ÷ Step's"
    for suffix, flag in (("", ""), (", `install()`", " --install")):
        lines = run.python(f"small.py {RESERVED}{flag}", f"mlp --micros 4 --reserved{flag}")
        worst = ratio(max(line["MiB"]["ratio"] for line in lines))
        yield "small micro-batches", row + suffix, {"Step": "1", "graphs=True": worst}


@part("bench/trainers.py bench/pytorch.py" + TORCH, gpus=1)
def trainers(run):
    """With a cap of half of what the plain loop takes."""
    ways = {"plain": "plain loop", "Backward": "Backward", "install": "Backward, install()"}
    ways["hand"] = "by hand, 16"
    for trainer, title in (("nanogpt", "nanoGPT, GPT-2 124M"), ("llama", "Accelerate, Llama 134M")):
        [line] = run.python(f"trainers.py {trainer} plain")
        whole, cap = line["samples_per_s"], line["reserved"] / 2
        for memory, flags in (("all memory", ""), ("half of it", f"--cap {cap:.2f}")):
            found = {"plain loop": {} if flags else line}
            for way in ways if flags else ("Backward", "install"):
                ends = " || echo '{}'" * (way in ("plain", "hand"))  # without memory
                found[ways[way]] = run.python(f"trainers.py {trainer} {way} {flags}{ends}")[-1]
            cells = {
                way: show(each["samples_per_s"]) if each else "ends" for way, each in found.items()
            }
            yield "trainers, samples a second", f"{title}, {memory}", cells
        if trainer == "llama" and found["by hand, 16"]:
            speeds = [found[way]["samples_per_s"] for way in ("by hand, 16", "Backward, install()")]
            row = "half of the plain loop's memory: speed ÷ plain loop's with all"
            hand, ours = (ratio(speed / whole) for speed in speeds)
            yield for_readme(f"{title}, {row}", f"by hand {hand}", ours)


# ---- one GPU: sleep, requests, losses over a batch, budgets ----

HOST, LENGTHS = "the host's part", "budgets and lengths"


@part("bench/sleep.c src/pool src/device", gpus=1, seconds=60)
def sleep(run):
    lines = run.make("bench-sleep", 3)
    [copied], [dropped] = (words_of(lines, way, "copy") for way in ("with", "without"))
    row = "sleep and wake"
    yield HOST, f"{row} with copy, the first", {"rebatch": show(copied[0], "ms a GiB")}
    yield HOST, f"{row} with copy, later", {"rebatch": show(copied[1], "ms a GiB")}
    yield HOST, f"{row} without copy, later", {"rebatch": show(dropped[1], "ms a GiB")}
    yield HOST, f"{row}: memory that sleep frees", {"rebatch": show(copied[2], "%")}


@part("bench/yield.py bench/pytorch.py" + TORCH, gpus=1, seconds=200)
def yielding(run):
    [half] = run.python("yield.py half --seconds 10", "half --small --seconds 2")
    row = "GPT-2 124M asked for half of its memory"
    cells = {"rebatch": f"{show(half['ms'], 'ms')}, {show(half['lost'])}"}
    yield HOST, f"{row}: until it is free, updates lost", cells
    cells = {"rebatch": ratio(half["part_of_choice"]), "others": "begun at that limit: 1"}
    yield HOST, f"{row}: speed afterwards", cells
    [three] = run.python("yield.py three --seconds 10", "three --small --seconds 2")
    others = f"one alone: 1; three plain loops: {ratio(three['plain'])}"
    cells = {"rebatch": ratio(three["parts"][1]), "others": others}
    yield HOST, "three trainings on one card, the others give memory: speed of all", cells


@part("bench/sleeping.py bench/pytorch.py" + TORCH, gpus=1, seconds=150)
def sleeping(run):
    [slept] = run.python("sleeping.py cycles", "cycles --small --steps 10")
    row = f"a training that sleeps {slept['cycles']} times"
    bits = "the same" if slept["same_bits"] else "others"
    cells = {"rebatch": f"{ratio(slept['ratio'])}, {bits}"}
    yield HOST, f"{row}: memory reserved ÷ in use, its bits beside those without a sleep", cells
    [less] = run.python("sleeping.py less", "less --small")
    row = f"wake with {less['missing_bytes'] / GIB:.0f} GiB less"
    row += ": updates lost, micro-batch before, then, and once they are back"
    sizes = " -> ".join(map(str, less["micro"]))
    yield HOST, row, {"rebatch": f"{show(less['lost'])}, {sizes}"}


def contrastive_rows(run, flags="", suffix=""):
    lines = run.python("contrastive.py" + flags, "--small")
    [step] = [line for line in lines if line.get("way") == "step"]
    [share] = [line["step_to_by_hand"] for line in lines if "step_to_by_hand" in line]
    hand = min(line["ms"] for line in lines if line.get("way") == "by hand")
    row = f"contrastive loss over 4,096 samples where 512 fit{suffix}"
    cells = {"rebatch": show(step["ms"], "ms"), "fixed count": show(hand, "ms")}
    yield LENGTHS, f"{row}: time of a step", cells
    yield LENGTHS, f"{row}: ÷ the best by hand", {"rebatch": ratio(share)}


@part("bench/contrastive.py" + TORCH, gpus=1, seconds=260)
def contrastive(run):
    yield from contrastive_rows(run)


@part("bench/contrastive.py" + TORCH, gpus=1, seconds=260)
def contrastive_installed(run):
    yield from contrastive_rows(run, " --install", ", `install()`")


@part("bench/speech.py" + TORCH, gpus=1, seconds=140)
def speech(run):
    found = by(run.python("speech.py", "--cpu"), "way")
    for name, key in (("samples a second", "samples/s"), ("OOMs", "OOMs")):
        cells = {"rebatch": show(found["budget by length"][key])}
        cells["fixed count"] = show(found["fixed count"][key])
        yield LENGTHS, f"speech, Whisper-tiny's shape, 8 GiB: {name}", cells


@part("bench/budget.py examples/python/token_budget.py" + TORCH, gpus=1, seconds=220)
def budget(run):
    for limit in (16, 8, 5):
        flags = f"budget.py --limit {limit}GiB --updates"
        found = by(run.python(f"{flags} 5", "--width 64 --updates 2"), "way")
        columns = {"rebatch": "cost, learn", "sampler": "Budget", "fixed count": "fixed count"}
        cells = {column: show(found[way]["tokens/s"]) for column, way in columns.items()}
        row = f"GPT of 86M, answers up to 1,024 tokens, {limit} GiB: tokens a second"
        yield LENGTHS, row, cells
        if limit == 8:
            yield for_readme(row, f"fixed count {cells['fixed count']}", cells["rebatch"])


# ---- one GPU: fit, and GPT-2 in C ----


@part("bench/fit.py bench/fit_parts python/rebatch/fit", gpus=1)
def fit(run):
    """Three models: all of them take longer than a part may."""
    models, files = "gpt2,llama,bert", ["build/figures-truth.json", "build/figures-fit.json"]
    run.lines(f"rm -f {' '.join(files)}")
    limits = "--seconds 300 --confirm 0"
    run.python(f"fit.py truth --models {models} {limits} --output {files[0]}")
    run.python(f"fit.py answers {files[0]} --output {files[1]}")
    yield "fit", models.replace(",", ", "), compared(run, files)


def compared(run, files):
    """The cells of the two ways together."""
    [words] = words_of(
        run.python(f"fit.py compare {' '.join(files)}", has_words=True), "|", "fit,", "both", "|"
    )
    columns = ("rows", "exact", "within 3 %", "above the truth")
    return dict(zip(columns, (f"{word:g}" for word in words[::2])))


@part("bench/fit.py bench/fit_parts bench/foreign python/rebatch/fit", gpus=1)
def fit_foreign(run):
    """Programs that were written before fit was tried on them."""
    truth, answers = files = ["build/figures-foreign.json", "build/figures-foreign-fit.json"]
    run.lines(f"rm -f {' '.join(files)}")
    run.python(f"fit.py foreign predict --output {answers}")
    run.python(f"fit.py foreign truth --near {answers} --output {truth}")
    yield "fit", "8 foreign programs, 6 and 20 GiB", compared(run, files)


@part("bench/gpt.c bench/gpt_torch.py kernels examples/gpt src", gpus=1)
def gpt(run):
    line = line_named(run.make("bench-gpt"), "gpt")
    ways = {"exact": "exact", "inexact": "`--exact off`"}
    ways |= {"pytorch": "PyTorch", "compiled": "`torch.compile`"}
    for at, micro in enumerate((16, 64)):
        cells = {title: line[way].split("/")[at].removesuffix("k") for way, title in ways.items()}
        yield "GPT-2 in C, thousand tokens a second", f"micro-batches of {micro}", cells


@part("bench/gpt_graph.c kernels examples/gpt src", gpus=1)
def gpt_graph(run):
    found = {}
    for line in run.make("bench-gpt-graph"):
        if line["samples"] > 1:
            continue
        exact = "exact" if line["exact"] else "`--exact off`"
        cells = found.setdefault(f"{line['model']}, {line['samples']:g} samples", {})
        for way in ("launched", "replayed"):
            cells[f"{exact}, {way}"] = show(line[f"{way}_ms"], "ms")
    for row, cells in found.items():
        yield "a micro-batch in C", row, cells


@part(
    "bench/gpt_recovery.c bench/gpt_recovery_torch.py scripts/bench-recovery examples/gpt kernels "
    "src",
    gpus=1,
)
def recovery(run):
    lines = run.make("bench-recovery")
    line = line_named(lines, "recovery")
    cells = {"rebatch": ratio(line["struck"]), "others": f"halve and redo {line['halving']}"}
    yield HOST, "GPT-2 in C, memory is taken within a step: ÷ a later step", cells
    words = [line["words"] for line in lines if "words" in line]
    peers = {tuple(each[:2]): each[2:] for each in words if len(each) == 7}
    for gib, size, is_true, ooms, _, ms, *_, first in (each for each in words if len(each) == 12):
        if isinstance(gib, str):
            continue  # the head of the table
        cells = {"size found": show(size), "is the largest": is_true, "OOMs": show(ooms)}
        cells |= {"time": show(ms, "ms"), "first step ÷ later": ratio(first)}
        for peer in ("Accelerate", "Lightning"):
            name = {"Accelerate": "accelerate", "Lightning": "lightning-binsearch"}[peer]
            if (name, gib) in peers:
                found, largest, _, _, peers_ms = peers[name, gib]
                cells[f"{peer}: size"] = f"{show(found)} of {show(largest)}"
                cells[f"{peer}: time"] = show(peers_ms, "ms")
        yield "GPT-2 in C, a cap", f"{gib:g} GiB", cells


# ---- two GPUs ----

RANKS = "several GPUs"


@part("bench/ranks.py bench/pytorch.py" + TORCH, gpus=2)
def ddp(run):
    small = "--small --samples 8 --micro 4 --rounds 2 --steps 1 ddp ddp+Step"
    narrow = " --model 256 4 64 1024 --samples 16 --float32"
    for title, flags in (("GPT-2 124M", ""), ("4 layers of 256", narrow)):
        lines = run.python(f"ranks.py ddp ddp+Step{flags}", small, ranks=2)
        [share] = [line["median"] for line in lines if "ratio" in line]
        row = f"{title}, DDP with a Step: speed ÷ DDP's"
        yield RANKS, row, {"rebatch": ratio(share), "others": "1"}


@part("bench/shards.py bench/ranks.py" + TORCH, gpus=2)
def fsdp(run):
    flags = "plain lockstep window"
    lines = run.python(f"shards.py {flags} --micro 4 --steps 12", f"{flags} --small", ranks=2)
    found = {line["way"]: line for line in lines if line.get("rank") == 0}
    for way, title in (("window", "in the window"), ("lockstep", "in lockstep")):
        row, share = f"`fully_shard()`, 0.9 billion, {title}", ratio(found[way]["speed"])
        yield RANKS, f"{row}: speed ÷ alone", {"rebatch": share, "others": "1"}
        if way == "lockstep":
            yield for_readme(f"{row}: speed ÷ alone", "1", share)
        cells = {"rebatch": show(found[way]["peak"], "GiB")}
        cells["others"] = show(found["plain"]["peak"], "GiB")
        yield RANKS, f"{row}: peak in use", cells


@part("bench/nccl.c include/rebatch/nccl.h src/recover", gpus=2)
def vote_nccl(run):
    line = line_named(run.make("bench-nccl", 3), "vote")
    cells = {"rebatch": show(line["vote_us"], "µs"), "others": show(line["bare_us"], "µs")}
    yield RANKS, "a vote of two ranks by NCCL, beside its all-reduce", cells


# ---- without a GPU ----


@part("bench/step.c src/recover src/pool")
def step(run):
    line = line_named(run.make("bench-step", 5), "step")
    cells = {"rebatch": show(line["ns_per_microbatch"], "ns")}
    yield HOST, "the wrap of a micro-batch when nothing fails", cells


@part("bench/vote.c src/recover")
def vote(run):
    line = line_named(run.make("bench-vote", 5), "vote")
    yield HOST, "a vote of one rank", {"rebatch": show(line["in_step_ns"], "ns")}


@part("bench/small.py" + TORCH)
def calls(run):
    """Of narrow models, on one thread."""
    for line in run.python("small.py mlp bert --calls --micros 4", "mlp --calls", times=3):
        row = f"a Step of {line['tensors']:g} tensors in four, beyond a plain loop"
        yield HOST, f"{row}: CPU time", {"rebatch": show(line["us_beyond"], "µs")}


@part("bench/gpt_search.c examples/gpt src/probe src/recover src/pool")
def search(run):
    lines = run.make("bench-search", 3)
    times = (words for way in ("probe", "learn") for words in words_of(lines, way))
    cells = {"rebatch": ", ".join(show(words[-1], "ms") for words in times if words[0] == 48)}
    yield HOST, "a probe, a first step that learns: GPT-2 124M in C, 48 GiB", cells


@part("bench/cotenant.c src/recover src/pool src/device")
def cotenant(run):
    line = line_named(run.make("bench-cotenant"), "cotenant")
    share = {"rebatch": line["least"].replace("%", " %")}
    yield HOST, "a co-tenant comes and goes: least speed ÷ best fixed size's", share


@part("bench/cost.c src/recover src/pool")
def cost(run):
    lines = run.make("bench-cost")
    line = line_named(lines, "cost")
    [words] = words_of(lines, "|", "by", "count,", "fixed")
    cells = {
        column: f"{show(tokens)}, {show(ooms)}"
        for column, tokens, ooms in (
            ("rebatch", line["tokens_with"], line["ooms_with"]),
            ("in order", line["tokens_without"], line["ooms_without"]),
            ("fixed count", words[10], words[4]),
        )
    }
    yield LENGTHS, "sequences of 8 to 2,048 tokens, 256 MiB: tokens a unit of time, OOMs", cells


@part("bench/balance.py python/rebatch/torch/batches")
def balance(run):
    found = by(run.python("balance.py"), "way")
    columns = {"rebatch": "balanced", "in order": "greedy", "fixed count": "fixed"}
    cells = {column: show(found[way]["tokens a unit of time"]) for column, way in columns.items()}
    yield LENGTHS, "long answers over 8 ranks in lockstep: tokens a unit of time", cells


@part("bench/pool.c bench/alloc_patterns.h src/pool src/base")
def pool(run):
    lines = run.make("bench-pool", 3)
    titles = {"hot": "one block of 1 MiB", "random": "256 live, 512 B to 32 MiB, at random"}
    titles["train"] = "training step, 12 layers"
    for pattern, title in titles.items():
        names = {"rebatch": "pool", "glibc": "glibc", "mimalloc": "mimalloc"}
        found = {column: words_of(lines, name, pattern) for column, name in names.items()}
        cells = {column: show(words[0][1], "ns") for column, words in found.items() if words}
        yield "allocate and free", title, cells


@part("bench/replay bench/traces src/pool src/device")
def replay(run):
    """Traces of PyTorch and the hardest, and the worst of the others."""
    flags, others = "--json --smallest bench/traces/*.trace.gz", []
    for line in run.make(f"bench-replay REPLAY_FLAGS='{flags}'"):
        short = f"--json --capacity {int(1.02 * line['peak_live_bytes'])} {line['trace']}"
        [passes] = run.lines(f"build/release/bench/replay/replay {short} || echo '{{}}'")
        figures = [100 * line["utilisation"], line["smallest_to_live"]]
        figures += [passes[key] / 1e6 for key in ("driver_ns", "third_driver_ns") if passes]
        peer = 100 * (line["pytorch_utilisation"] or 0)
        name = line["trace"].split("/")[-1].removesuffix(".trace.gz")
        if peer or name == "churn":
            yield "traces", name, trace_cells(figures, peer)
        else:
            others.append(figures)
    least, *most = zip(*others)
    cells = trace_cells([min(least), *map(max, most)], 0)
    yield "traces", f"{len(others)} others: the worst of each", cells


def trace_cells(figures, peer):
    texts = [f"{figures[0]:.1f} %", f"{figures[1]:.4f}", *(show(ms, "ms") for ms in figures[2:])]
    columns = ("rebatch", "smallest device", "in 1.02: first pass", "third pass")
    return dict(zip(columns, texts)) | ({"PyTorch": f"{peer:.1f} %"} if peer else {})


@part("bench/probe.c bench/probe_cases.h src/probe src/pool src/recover")
def probe(run):
    """Medians of three sets that had no part in the making of the probe."""
    found = [run.make(f"bench-probe PROBE_FLAGS='--seed {seed}'") for seed in (31101, 31102, 31103)]
    names = "rebatch_probe", "halving (Composer)", "x 0.9 (Accelerate)", "power, bisect (Lightning)"
    for name in names:
        first = [number(word) for word in name.split()]
        every = [words_of(lines, *first)[0] for lines in found]
        trials, _, ooms, _, exact, above, size = median_of(every)
        cells = {"size found ÷ largest": f"{size:.1f} %", "OOMs a search": ratio(ooms)}
        cells |= {"trials": show(trials), "exact": show(exact), "above": show(above)}
        yield "200 models", name, cells
