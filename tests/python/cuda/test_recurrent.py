"""What the stand-in says of cuDNN's recurrent layers, against an H200
(PyTorch 2.11, cuDNN 9.19)."""

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

pytestmark = pytest.mark.usefixtures("standin")

# Layer, layers, directions, projection, how lengths fall, dropout, type, batch, length, inputs,
# hidden; reserve, workspace, peaks of forward and backward pass.
MEASURED = """
LSTM 1 1   0 padded 0.0 float32  32  50  256 512  16384256  33358336  53477888  41762816
LSTM 1 1   0 padded 0.0 float16  32  50  256 512   8192256  47022592  58024448  51126784
LSTM 2 1   0 padded 0.3 bfloat16 32  50  256 512  18125056  35422720  63782912  44089344
LSTM 3 1   0 short  0.0 float32  32  50  256 512  14692608  52871424  69215232  77208064
LSTM 2 2   0 ramp   0.0 float32  32  50  256 512  45056256  97976576 148767232 138452992
LSTM 3 2   0 ramp   0.3 float16  32  50  256 512  35635456  95650048 134120448 129273856
LSTM 2 2   0 padded 0.3 float32  32  50 1000 512  72499456 151515648 232518144 208968192
LSTM 2 1   0 padded 0.3 float32  32  50  256  64   4518656  28901888  34354176  31526912
LSTM 2 2   0 ramp   0.3 float32  32  50  256  64   5683456  39887104  46214144  42099200
LSTM 2 2   0 ramp   0.3 float32  64 200  128 256 181862656 143393024 343278080 158007808
LSTM 1 1 256 ramp   0.0 bfloat16 32  50  256 512   6656256  16064768  25699328  19119616
LSTM 2 1 256 padded 0.3 float32  32  50  256 512  45926656  50332160  98501120  61833728
LSTM 2 2 256 padded 0.3 float16  32  50 1000 512  46080256  84933120 133045248 106188288
LSTM 3 2 256 short  0.3 float32  32  50  256 512  37572864 102277376 142377472 141170688
GRU  1 1   0 padded 0.0 float32  32  50  256 512  19661056  29819392  52888576  36319744
GRU  2 1   0 padded 0.3 float32  32  50  256 128  10675456  37618176  49309184  40710656
GRU  2 2   0 ramp   0.3 float32  32  50 1000 512  53657856  95986944 154747392 138592256
GRU  3 2   0 padded 0.0 float16  32  50  256 512  65536256  96600576 165807104 122417664
RNN  1 2   0 padded 0.0 float32  32  50  256 512   6553856  56885760  70255616  61940224
RNN  3 1   0 ramp   0.0 float16  32  50  256 512   5120256  29827328  36168704  33425920
""".strip().splitlines()
STATE_OF_PROCESSOR = 6_488_064 // 132


def lengths_of(how, batch, length):
    if how == "short":
        return [length] + [length // 4] * (batch - 1)
    return [max(1, round(length * (1 - 0.75 * at / (batch - 1)))) for at in range(batch)]


def allocations(run):
    """The sizes that were asked for in order, what came back, the peak above what there was."""
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(enabled="all", context=None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [entry["size"] for entry in trace if entry["action"] == "alloc"], result, peak


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(row.split()[:11]))
def test_recurrent_layers_take_what_they_take_on_a_card(row):
    kind, count, directions, projection, lengths, dropout, dtype, *numbers = row.split()
    batch, length, inputs, hidden, *true = map(int, numbers)
    options = {"proj_size": int(projection)} if int(projection) else {}
    options.update(bidirectional=directions == "2", dropout=float(dropout))
    layer = getattr(torch.nn, kind)(inputs, hidden, int(count), **options)
    layer.to("cuda", getattr(torch, dtype))
    packed = lengths != "padded"
    data = given = torch.zeros(length, batch, inputs).to("cuda", layer.weight_ih_l0.dtype)
    if packed:
        given = pack_padded_sequence(given, torch.tensor(lengths_of(lengths, batch, length)))
        data = given.data
    data.requires_grad_()
    first = layer(given)[0]  # dropout's state, handles
    (first.data if packed else first).float().sum().backward()
    del first
    for tensor in (data, *layer.parameters()):
        tensor.grad = None

    asked, output, forward = allocations(lambda: layer(given)[0])
    output = output.data if packed else output
    gradient = torch.ones_like(output)
    backward = allocations(lambda: output.backward(gradient))[2]

    assert asked[-1] == pytest.approx(true[0], rel=0.001)
    assert true[1] * 0.99 <= asked[-2] <= true[1] * 1.055
    assert [forward, backward] == pytest.approx(true[2:], rel=0.055)  # blocks are split differently


def test_dropout_has_a_state_for_each_processor():
    state = torch._cudnn_init_dropout_state(0.3, True, 0, dtype=torch.uint8, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert state.numel() == STATE_OF_PROCESSOR * processors
