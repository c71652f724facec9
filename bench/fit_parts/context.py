"""What a process takes of a GPU beside PyTorch's allocator, for the table of `rebatch fit`
(python/rebatch/fit/cards.py): after the context, cuBLAS and cuDNN, and with each model; and what
cuDNN says of the GPU and of its recurrent layers. It needs a GPU that no other process uses, and
about ten seconds for a model.

For each model: `outside_bytes`, how much that is more than a bare context, and the kernels by name
that a profiler saw (`kernels`), since the driver loads each at its first launch."""

import argparse
import ctypes
import json
import pathlib
import subprocess

import torch

from fit_parts.child import answer_of, command

MIB = 1 << 20


def used():
    """Bytes of the card in use, by all processes."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def outside(before):
    """Of those, what this process holds beside the allocator."""
    return used() - before - torch.cuda.memory_reserved()


def used_before():
    """What is in use without this process, as the driver tells: a context counts itself."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return [int(part) * MIB for part in said.splitlines()[0].split(",")]


def cudnn_library():
    torch.backends.cudnn.version()  # which loads it
    lines = pathlib.Path("/proc/self/maps").read_text().split()
    return ctypes.CDLL(next(path for path in lines if "libcudnn.so" in path))


def cudnn_handle(cudnn):
    handle = ctypes.c_void_p()
    status = cudnn.cudnnCreate(ctypes.byref(handle))
    assert status == 0, status
    return handle


def device_json(cudnn, handle):
    """The properties of the GPU, as cuDNN writes them."""
    properties, count = ctypes.c_void_p(), ctypes.c_int64()
    descriptor, by_handle, as_json, is_handle, is_char = 38, 2701, 2702, 0, 24
    assert cudnn.cudnnBackendCreateDescriptor(descriptor, ctypes.byref(properties)) == 0
    one = ctypes.c_int64(1)
    cudnn.cudnnBackendSetAttribute(properties, by_handle, is_handle, one, ctypes.byref(handle))
    assert cudnn.cudnnBackendFinalize(properties) == 0
    get = cudnn.cudnnBackendGetAttribute
    get(properties, as_json, is_char, ctypes.c_int64(0), ctypes.byref(count), None)
    text = ctypes.create_string_buffer(count.value + 1)
    get(properties, as_json, is_char, count, ctypes.byref(count), text)
    return json.loads(text.value)


def recurrent(cudnn, handle, cell, layers, hidden, length, batch, half, both, dropout):
    """Bytes of the weights, the workspace and the reserve of a recurrent layer in training."""

    def make(kind):
        made = ctypes.c_void_p()
        assert getattr(cudnn, f"cudnnCreate{kind}Descriptor")(ctypes.byref(made)) == 0
        return made

    layer, data, drop = make("RNN"), make("RNNData"), make("Dropout")
    states = ctypes.c_size_t()
    cudnn.cudnnDropoutGetStatesSize(handle, ctypes.byref(states))
    kept = torch.empty(states.value, dtype=torch.uint8, device="cuda")
    cudnn.cudnnSetDropoutDescriptor(
        drop, handle, ctypes.c_float(dropout), ctypes.c_void_p(kept.data_ptr()), states,
        ctypes.c_ulonglong(1),
    )  # fmt: skip
    kind = 2 if half else 0  # CUDNN_DATA_HALF, CUDNN_DATA_FLOAT
    status = cudnn.cudnnSetRNNDescriptor_v8(
        layer, 0, cell, 2, int(both), 0, kind, 0, 1 if half else 3,
        hidden, hidden, hidden, layers, drop, 1,
    )  # fmt: skip
    assert status == 0, status
    lengths = (ctypes.c_int * batch)(*[length] * batch)
    fill = ctypes.c_float(0)
    status = cudnn.cudnnSetRNNDataDescriptor(
        data, kind, 1, length, batch, hidden, lengths, ctypes.byref(fill)
    )
    assert status == 0, status
    weights, workspace, reserve = (ctypes.c_size_t() for _ in range(3))
    cudnn.cudnnGetRNNWeightSpaceSize(handle, layer, ctypes.byref(weights))
    status = cudnn.cudnnGetRNNTempSpaceSizes(
        handle, layer, 1, data, ctypes.byref(workspace), ctypes.byref(reserve)
    )
    assert status == 0, status
    return {
        "cell": ["relu", "tanh", "lstm", "gru"][cell],
        "layers": layers,
        "hidden": hidden,
        "length": length,
        "batch": batch,
        "half": half,
        "bidirectional": both,
        "dropout": dropout,
        "weights_bytes": weights.value,
        "workspace_bytes": workspace.value,
        "reserve_bytes": reserve.value,
        "states_bytes": states.value,
    }


def recurrent_rows(cudnn, handle):
    shapes = [
        (2, 3, 512, 128, 8, False, False, 0.1),
        (2, 3, 512, 128, 16, False, False, 0.1),
        (2, 3, 512, 128, 1000, False, False, 0.1),
        (2, 3, 512, 128, 8, False, False, 0.0),
        (2, 1, 512, 128, 8, False, False, 0.0),
        (2, 2, 512, 128, 8, False, False, 0.0),
        (2, 3, 512, 64, 8, False, False, 0.1),
        (2, 3, 256, 128, 8, False, False, 0.1),
        (2, 3, 512, 128, 8, False, True, 0.1),
        (2, 3, 512, 128, 8, True, False, 0.1),
        (2, 3, 512, 128, 1000, True, False, 0.1),
        (3, 2, 640, 200, 8, False, False, 0.1),
        (3, 2, 640, 200, 16, False, False, 0.1),
        (3, 2, 640, 200, 8, True, False, 0.1),
        (3, 2, 640, 200, 500, True, False, 0.1),
        (3, 1, 640, 200, 8, False, False, 0.0),
        (3, 2, 640, 200, 8, False, True, 0.1),
        (1, 2, 256, 64, 8, False, False, 0.0),
    ]
    return [recurrent(cudnn, handle, *shape) for shape in shapes]


def bare():
    """The context, cuBLAS and cuDNN one after another."""
    before, total = used_before()
    torch.cuda.init()
    x = torch.empty(1, device="cuda")
    rows = {"context": outside(before)}
    x.fill_(0)
    rows["first_kernel"] = outside(before)
    square = torch.ones(256, 256, device="cuda")
    square @ square
    rows["cublas"] = outside(before)
    half = square.bfloat16()
    torch.nn.functional.linear(half, half, half[0])
    rows["cublas_lt"] = outside(before)
    images = torch.ones(8, 16, 32, 32, device="cuda", requires_grad=True)
    torch.nn.Conv2d(16, 16, 3, device="cuda")(images).sum().backward()
    rows["convolution"] = outside(before)
    found = {
        "before_bytes": before,
        "nvidia_smi_total_bytes": total,
        "total_bytes": torch.cuda.mem_get_info()[1],
        "name": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "outside_bytes": rows,
    }
    for name, function in (("device_json", device_json), ("recurrent", recurrent_rows)):
        try:
            cudnn = cudnn_library()
            found[name] = function(cudnn, cudnn_handle(cudnn))
        except Exception as error:  # the stand-in for CUDA has no handles
            found[name] = f"{type(error).__name__}: {error}"
    properties = torch.cuda.get_device_properties(0)
    found["properties"] = {
        name: getattr(properties, name)
        for name in dir(properties)
        if isinstance(getattr(properties, name), (int, str)) and not name.startswith("_")
    }
    return found


def update(made, drawn):
    made.optimizer.zero_grad(set_to_none=True)
    made.loss(made.model, drawn).backward()
    made.optimizer.step()


def kernels_of(made, drawn):
    """The names of the kernels of an update."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        update(made, drawn)
        torch.cuda.synchronize()
    return sorted({event.name for event in profile.events()})


def print_bare():
    print(json.dumps(bare()))


def print_model(name, samples, has_profiler):
    print(json.dumps(of_model(name, int(samples), has_profiler == "True")))


def of_model(name, samples, has_profiler):
    """A model that trains for three updates."""
    from fit_parts.models import MODELS

    before, _ = used_before()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    context = outside(before)
    made = MODELS[name]("cuda")
    drawn = made.batch(samples)
    rows = []
    for _ in range(3):
        update(made, drawn)
        rows.append(outside(before))
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    kernels = kernels_of(made, drawn) if has_profiler else []
    return {
        "model": name,
        "samples": samples,
        "context_bytes": context,
        "outside_bytes": rows,
        "more_bytes": rows[-1] - context,
        "peak_allocated": peak,
        "peak_reserved": reserved,
        "kernels": kernels,
    }


def context(arguments):
    from fit_parts.models import MODELS

    parser = argparse.ArgumentParser(
        prog="fit.py context", description="What a process takes beside the allocator."
    )
    parser.add_argument("--models", default=",".join(MODELS), help="a,b; default: all")
    parser.add_argument("--samples", default="8,64", help="in a batch: two of them tell whether "
                        "what is taken grows")  # fmt: skip
    parser.add_argument("--output", type=pathlib.Path, default="context.json")
    parser.add_argument("--no-kernels", action="store_true", help="do not run the profiler")
    given = parser.parse_args(arguments)
    found = {"bare": answer_of(command("context", "print_bare")), "models": []}
    for name in given.models.split(","):
        for samples in given.samples.split(","):
            row = answer_of(command("context", "print_model", name, samples, not given.no_kernels))
            found["models"].append({"model": name, **row})
            more = row.get("more_bytes", 0) / MIB
            print(f"{name} {samples}: {row.get('error') or f'{more:.0f} MiB beyond a context'}")
        given.output.write_text(json.dumps(found, indent=1))
