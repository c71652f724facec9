"""librebatch.so, loaded with ctypes: its structs, enums and functions that the package uses.

The structs and enums follow the headers in include/rebatch member by member, in the same order and
with the same names; tests/python/test_structs.py compares them with the headers.
"""

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_size_t,
    c_uint,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any, Callable

# ---- enums ----
# A class stands for the C enum `c_name`, and a member X of it for the constant `c_prefix` + X.


class Status(IntEnum):
    """What a call returns."""

    OK = 0
    OOM = 1
    E_INVALID = 2
    E_STATE = 3
    E_HOST_OOM = 4
    E_EXHAUSTED = 5
    E_TORN = 6
    E_DEVICE = 7
    E_DEVICE_LOST = 8
    E_NO_DEVICE = 9
    E_UNSUPPORTED = 10
    E_IO = 11
    E_PARSE = 12
    E_PEER = 13
    E_USER = 1000


class Toggle(IntEnum):
    """A switch in an options struct."""

    DEFAULT = 0
    ON = 1
    OFF = 2


class SnapshotFormat(IntEnum):
    """The format of a snapshot."""

    BLOCKS_CSV = 0
    EVENTS_CSV = 1


class StepFlag(IntEnum):
    """Bits of StepOps.flags."""

    DECLARES_MUTATION = 1
    OWN_WEIGHTS = 2
    SCOPED_MEMORY = 4


class Phase(IntEnum):
    """Where an OOM occurs."""

    ZERO_GRAD = 0
    ADMISSION = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    UPDATE = 5
    RESIZE = 6
    MAP = 7
    REDUCE = 8
    COUNT = 9


class LogLevel(IntEnum):
    """The importance of an event."""

    DEFAULT = 0
    QUIET = 1
    ERROR = 2
    WARN = 3
    INFO = 4
    DEBUG = 5


class EventKind(IntEnum):
    """What an event reports."""

    STEP = 0
    RETRY = 1
    SHRINK = 2
    LIGHTEN = 3
    GROW = 4
    GROWTH_FAILED = 5
    EXHAUSTED = 6
    TORN = 7
    TRIAL = 8
    PROBE_FILE = 9
    THRASHING = 10
    LEARN = 11
    SWALLOWED = 12
    LEAK = 13
    UNDECLARED = 14
    LATE_FREE = 15
    CUT = 16
    OVERFLOW = 17


class OnOom(IntEnum):
    """What to do about an OOM that would occur again at the same micro-batch size."""

    DEFAULT = 0
    HALVE = 1
    STOP = 2
    FIT = 3


class GuardPoint(IntEnum):
    """The moments whose state is kept."""

    STEP = 0
    ATTEMPT = 1


# Class, C enum, prefix of its constants.
ENUMS = [
    (Status, "rebatch_status", "REBATCH_"),
    (Toggle, "rebatch_toggle", "REBATCH_"),
    (SnapshotFormat, "rebatch_snapshot_format", "REBATCH_SNAPSHOT_"),
    (StepFlag, "rebatch_step_flags", "REBATCH_"),
    (Phase, "rebatch_phase", "REBATCH_PHASE_"),
    (LogLevel, "rebatch_log_level", "REBATCH_LOG_"),
    (EventKind, "rebatch_event_kind", "REBATCH_EVENT_"),
    (OnOom, "rebatch_on_oom", "REBATCH_ON_OOM_"),
    (GuardPoint, "rebatch_guard_point", "REBATCH_GUARD_"),
]

OOM_TAGS = 6
ALLOWED_SIZES = 32

# ---- structs ----


class Struct(ctypes.Structure):
    """A struct of the headers. struct_size is set, all other members are zero: the defaults."""

    struct_size: int

    def __init__(self, *values: Any, **members: Any):
        super().__init__(*values, **members)
        if self._fields_[0][0] == "struct_size" and not self.struct_size:
            self.struct_size = ctypes.sizeof(self)


TakeLastError = CFUNCTYPE(c_int)


class CudaOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ordinal", c_int),
        ("take_last_error", TakeLastError),
    ]


class PoolOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("limit_bytes", c_size_t),
        ("limit_permille", c_uint32),
        ("headroom_bytes", c_size_t),
        ("caching", c_int),
        ("rounding_divisions", c_uint32),
        ("events", c_uint32),
        ("keep_room_permille", c_uint32),
        ("replay", c_int),
        ("overflow", c_int),
        ("overflow_bytes", c_size_t),
        ("reuse_after_device", c_int),
        ("may_wait", c_void_p),
        ("may_wait_user", c_void_p),
    ]


class PoolStats(Struct):
    _fields_ = [
        ("live_bytes", c_uint64),
        ("live_peak_bytes", c_uint64),
        ("requested_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
        ("reserved_peak_bytes", c_uint64),
        ("deferred_bytes", c_uint64),
        ("blocks", c_uint64),
        ("blocks_peak", c_uint64),
        ("allocations", c_uint64),
        ("frees", c_uint64),
        ("allocated_total_bytes", c_uint64),
        ("freed_total_bytes", c_uint64),
        ("device_allocations", c_uint64),
        ("device_frees", c_uint64),
        ("trims", c_uint64),
        ("pressure_calls", c_uint64),
        ("ooms", c_uint64),
        ("rollbacks", c_uint64),
        ("rolled_back_blocks", c_uint64),
        ("late_frees", c_uint64),
        ("remaps", c_uint64),
        ("quarantined_bytes", c_uint64),
        ("driver_creates", c_uint64),
        ("driver_maps", c_uint64),
        ("driver_accesses", c_uint64),
        ("driver_unmaps", c_uint64),
        ("driver_releases", c_uint64),
        ("driver_pieces", c_uint64),
        ("driver_ns", c_uint64),
        ("overflow_bytes", c_uint64),
        ("overflow_peak_bytes", c_uint64),
        ("overflow_total_bytes", c_uint64),
        ("phases", c_uint64),
        ("planned_phases", c_uint64),
    ]


class TagUsage(Struct):
    _fields_ = [
        ("name", c_char * 32),
        ("live_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("at_peak_bytes", c_uint64),
    ]


class OomReport(Struct):
    _fields_ = [
        ("asked_bytes", c_uint64),
        ("tag", c_char * 32),
        ("stage", c_int),
        ("limit_bytes", c_uint64),
        ("live_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
        ("room_bytes", c_uint64),
        ("device_total_bytes", c_uint64),
        ("device_free_bytes", c_uint64),
        ("largest_hole_bytes", c_uint64),
        ("would_fit_bytes", c_uint64),
        ("tag_count", c_uint32),
        ("tags", TagUsage * OOM_TAGS),
    ]


class Microbatch(Struct):
    _fields_ = [
        ("step", c_uint64),
        ("first", c_size_t),
        ("count", c_size_t),
        ("batch", c_size_t),
        ("attempt", c_uint32),
        ("probing", c_bool),
        ("pool", c_void_p),
        ("stream", c_void_p),
        ("rank_batch", c_size_t),
        ("is_abandoned", c_bool),
    ]


ZeroGrad = CFUNCTYPE(c_int, c_void_p)
ForwardBackward = CFUNCTYPE(c_int, POINTER(Microbatch), c_void_p)
OptimizerStep = CFUNCTYPE(c_int, c_void_p)
Lighten = CFUNCTYPE(c_int, c_uint, c_void_p)
Cost = CFUNCTYPE(c_uint64, c_size_t, c_size_t, c_void_p)
Resize = CFUNCTYPE(c_int, c_size_t, c_void_p)
Reduce = CFUNCTYPE(c_int, c_bool, c_void_p)
Part = CFUNCTYPE(c_size_t, c_size_t, c_void_p)


class StepOps(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("zero_grad", ZeroGrad),
        ("forward_backward", ForwardBackward),
        ("optimizer_step", OptimizerStep),
        ("lighten", Lighten),
        ("flags", c_uint32),
        ("cost", Cost),
        ("resize", Resize),
        ("reduce", Reduce),
        ("part", Part),
    ]


class MapOps(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("run", ForwardBackward),
        ("resize", Resize),
        ("largest", c_size_t),
        ("key", c_void_p),
        ("flags", c_uint32),
    ]


class Event(Struct):
    _fields_ = [
        ("kind", c_int),
        ("level", c_int),
        ("step", c_uint64),
        ("phase", c_int),
        ("attempt", c_uint32),
        ("first", c_size_t),
        ("count", c_size_t),
        ("batch", c_size_t),
        ("micro_before", c_size_t),
        ("micro_after", c_size_t),
        ("lighten_before", c_uint),
        ("lighten_after", c_uint),
        ("redone_samples", c_size_t),
        ("lost_ns", c_uint64),
        ("asked_bytes", c_uint64),
        ("needed_bytes", c_uint64),
        ("available_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("text", c_char_p),
        ("cost", c_uint64),
        ("cost_before", c_uint64),
        ("cost_after", c_uint64),
        ("is_unexplained", c_bool),
        ("is_injected", c_bool),
    ]


OnEvent = CFUNCTYPE(None, POINTER(Event), c_void_p)


class MeterReading(Struct):
    _fields_ = [
        ("live_bytes", c_uint64),
        ("peak_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
        ("asked_bytes", c_uint64),
        ("reserved_peak_bytes", c_uint64),
        ("retries", c_uint64),
    ]


MeterBegin = CFUNCTYPE(None, c_int, c_size_t, c_void_p)
MeterRead = CFUNCTYPE(c_int, POINTER(MeterReading), c_void_p)
MeterAvailable = CFUNCTYPE(c_int, POINTER(c_uint64), c_void_p)
MeterRelease = CFUNCTYPE(c_uint64, c_void_p)
MeterOutside = CFUNCTYPE(c_uint64, c_void_p)


class Meter(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("begin", MeterBegin),
        ("read", MeterRead),
        ("available", MeterAvailable),
        ("release", MeterRelease),
        ("user", c_void_p),
        ("outside", MeterOutside),
    ]


Guard = CFUNCTYPE(c_int, c_int, c_void_p)


AllReduce = CFUNCTYPE(c_int, POINTER(c_uint64), c_size_t, c_int, c_uint64, c_void_p)
Missing = CFUNCTYPE(c_uint32, c_void_p)
Abort = CFUNCTYPE(None, c_void_p)


class Group(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rank", c_uint32),
        ("size", c_uint32),
        ("all_reduce", AllReduce),
        ("missing", Missing),
        ("abort", Abort),
        ("user", c_void_p),
    ]


class GuardOps(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("save", Guard),
        ("restore", Guard),
    ]


class Options(Struct):
    """Options of a session. `pool` is zero: the pool's defaults."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("pool", PoolOptions),
        ("stream", c_void_p),
        ("micro_start", c_size_t),
        ("micro_smallest", c_size_t),
        ("micro_largest", c_size_t),
        ("on_oom", c_int),
        ("admission", c_int),
        ("lighten", c_int),
        ("max_attempts", c_uint32),
        ("growth", c_int),
        ("grow_after", c_uint32),
        ("grow_wait_max", c_uint32),
        ("log_level", c_int),
        ("on_event", OnEvent),
        ("on_event_user", c_void_p),
        ("micro_multiple_of", c_size_t),
        ("micro_allowed", c_size_t * ALLOWED_SIZES),
        ("max_ooms_in_row", c_uint32),
        ("learn", c_int),
        ("environment", c_int),
        ("log_format", c_int),
        ("log_file", c_char_p),
        ("reclaim", c_int),
        ("existing_pool", c_void_p),
        ("meter", POINTER(Meter)),
        ("group", POINTER(Group)),
        ("group_timeout_ms", c_uint32),
        ("lockstep", c_int),
        ("oom_wait_ms", c_uint32),
    ]


class StepReport(Struct):
    _fields_ = [
        ("step", c_uint64),
        ("status", c_int),
        ("microbatches", c_uint32),
        ("attempts", c_uint32),
        ("ooms", c_uint32),
        ("ooms_in", c_uint32 * Phase.COUNT),
        ("micro_before", c_size_t),
        ("micro_after", c_size_t),
        ("lighten_level", c_uint),
        ("redone_samples", c_size_t),
        ("lost_ns", c_uint64),
        ("peak_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
        ("oom", OomReport),
        ("cost_before", c_uint64),
        ("cost_after", c_uint64),
        ("thrashed", c_uint32),
        ("learned", c_uint32),
        ("micro", c_size_t),
        ("torn", c_bool),
        ("overflow_bytes", c_uint64),
    ]


class ProbeOptions(Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("max_trials", c_uint32),
        ("reserve_bytes", c_size_t),
        ("file", c_char_p),
        ("key", c_char_p),
        ("max_seconds", c_uint32),
        ("choose", c_int),
    ]


class ProbeReport(Struct):
    _fields_ = [
        ("status", c_int),
        ("size", c_size_t),
        ("predicted_size", c_size_t),
        ("predicted_peak_bytes", c_uint64),
        ("measured_peak_bytes", c_uint64),
        ("twice_bytes", c_uint64),
        ("available_bytes", c_uint64),
        ("trials", c_uint32),
        ("microbatches", c_uint32),
        ("ooms", c_uint32),
        ("confidence", c_int),
        ("oom", OomReport),
        ("saved", c_int),
        ("saved_size", c_size_t),
        ("largest_size", c_size_t),
        ("samples_per_second", c_double),
    ]


class Prediction(Struct):
    _fields_ = [
        ("size", c_size_t),
        ("fits", c_bool),
        ("peak_bytes", c_uint64),
        ("reserved_bytes", c_uint64),
        ("limit_bytes", c_uint64),
        ("failing_bytes", c_uint64),
    ]


# Class, C struct.
STRUCTS = [
    (CudaOptions, "rebatch_cuda_options"),
    (PoolOptions, "rebatch_pool_options"),
    (PoolStats, "rebatch_pool_stats"),
    (TagUsage, "rebatch_tag_usage"),
    (OomReport, "rebatch_oom_report"),
    (Microbatch, "rebatch_microbatch"),
    (StepOps, "rebatch_step_ops"),
    (MapOps, "rebatch_map_ops"),
    (Event, "rebatch_event"),
    (MeterReading, "rebatch_meter_reading"),
    (Meter, "rebatch_meter"),
    (Group, "rebatch_group"),
    (GuardOps, "rebatch_guard_ops"),
    (Options, "rebatch_options"),
    (StepReport, "rebatch_step_report"),
    (ProbeOptions, "rebatch_probe_options"),
    (ProbeReport, "rebatch_probe_report"),
    (Prediction, "rebatch_prediction"),
]

# ---- functions ----

HANDLE_OUT = POINTER(c_void_p)  # where a function stores the object that it made
SIZE_OUT = POINTER(c_size_t)

# Name, result, arguments. None: void.
FUNCTIONS = [
    # status.h, version.h
    ("rebatch_status_name", c_char_p, [c_int]),
    ("rebatch_status_text", c_char_p, [c_int]),
    ("rebatch_last_error", c_char_p, []),
    ("rebatch_version", c_char_p, []),
    # device.h, cuda.h
    ("rebatch_device_open_dry", c_int, [HANDLE_OUT, c_size_t, c_size_t]),
    ("rebatch_device_open_cuda", c_int, [HANDLE_OUT, POINTER(CudaOptions)]),
    ("rebatch_device_close", None, [c_void_p]),
    # pool.h
    ("rebatch_pool_create", c_int, [HANDLE_OUT, c_void_p, POINTER(PoolOptions)]),
    ("rebatch_pool_destroy", None, [c_void_p]),
    ("rebatch_pool_device", c_void_p, [c_void_p]),
    ("rebatch_pool_alloc", c_int, [HANDLE_OUT, c_void_p, c_size_t, c_void_p, c_uint16]),
    ("rebatch_pool_free", c_int, [c_void_p, c_void_p]),
    ("rebatch_pool_available", c_int, [SIZE_OUT, c_void_p]),
    ("rebatch_pool_tag", c_int, [POINTER(c_uint16), c_void_p, c_char_p]),
    ("rebatch_pool_get_stats", c_int, [POINTER(PoolStats), c_void_p]),
    ("rebatch_pool_mark", c_int, [c_void_p, c_uint64]),
    ("rebatch_pool_allow_overflow", c_int, [c_void_p, c_bool]),
    ("rebatch_pool_overflow_room", c_size_t, [c_void_p]),
    ("rebatch_pool_get_tag_usage", c_int, [POINTER(TagUsage), c_void_p, c_uint16]),
    ("rebatch_pool_format_summary", c_size_t, [c_char_p, c_size_t, c_void_p]),
    ("rebatch_pool_save_snapshot", c_int, [c_void_p, c_int, c_char_p]),
    # cuda.h
    ("rebatch_doctor_format", c_size_t, [c_char_p, c_size_t, POINTER(c_bool)]),
    # step.h
    ("rebatch_open", c_int, [HANDLE_OUT, c_void_p, POINTER(Options)]),
    ("rebatch_close", None, [c_void_p]),
    ("rebatch_get_pool", c_void_p, [c_void_p]),
    ("rebatch_get_micro", c_size_t, [c_void_p, c_size_t]),
    ("rebatch_set_step", c_int, [c_void_p, c_uint64]),
    ("rebatch_set_lighten", c_int, [c_void_p, c_uint]),
    (
        "rebatch_step",
        c_int,
        [c_void_p, POINTER(StepOps), c_size_t, c_void_p, POINTER(StepReport)],
    ),
    ("rebatch_abandon_step", c_int, [c_void_p, c_char_p]),
    ("rebatch_explain", None, [c_void_p, c_char_p]),
    (
        "rebatch_map",
        c_int,
        [c_void_p, POINTER(MapOps), c_size_t, c_void_p, POINTER(StepReport)],
    ),
    ("rebatch_reserve", c_int, [c_void_p, c_size_t]),
    ("rebatch_mutating", None, [c_void_p]),
    ("rebatch_mutating_together", c_int, [c_void_p]),
    ("rebatch_guard_with", c_int, [c_void_p, POINTER(GuardOps), c_void_p]),
    ("rebatch_event_format", c_size_t, [c_char_p, c_size_t, POINTER(Event)]),
    # probe.h
    (
        "rebatch_probe",
        c_int,
        [
            c_void_p,
            POINTER(StepOps),
            c_size_t,
            c_void_p,
            POINTER(ProbeOptions),
            POINTER(ProbeReport),
        ],
    ),
    (
        "rebatch_predict",
        c_int,
        [POINTER(Prediction), c_void_p, c_size_t, c_size_t, POINTER(ProbeOptions)],
    ),
    ("rebatch_confidence_text", c_char_p, [c_int]),
    # config.h
    ("rebatch_config_parse_size", c_int, [SIZE_OUT, POINTER(c_uint32), c_char_p]),
    ("rebatch_config_run_limit", c_int, [SIZE_OUT, POINTER(c_uint32)]),
]

# ---- loading ----

NAME = "librebatch.so"


def library_path() -> str:
    """Where the library is.

    The path in the environment variable REBATCH_LIBRARY, else the library beside this file.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), NAME)
    return os.environ.get("REBATCH_LIBRARY") or beside


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"rebatch: the library {path} cannot be loaded ({error}): install the package, which "
            "builds it, or set REBATCH_LIBRARY to its path"
        ) from None
    for name, result, arguments in FUNCTIONS:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib = _load()


# ---- errors and texts ----


class Error(RuntimeError):
    """A call of the library failed. `status` is a Status, or a callback's own number."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def status_of(number: int) -> int:
    """The Status of that number; the number itself when it is a callback's own."""
    try:
        return Status(number)
    except ValueError:
        return number


# What users of this package call, by the name of what it calls.
_CALLED = {
    "rebatch_step()": "step(batch)",
    "rebatch_map()": "rebatch.map() or step.evaluate()",
    "rebatch_probe()": "step.probe()",
}


def last_error() -> str:
    """The message of this thread's last call that failed; "" when none has failed."""
    text: str = lib.rebatch_last_error().decode(errors="replace")
    for name, called in _CALLED.items():
        text = text.replace(name, called)
    return text


def check(status: int) -> None:
    """Raise Error with the message of the library when `status` is not OK."""
    if status != Status.OK:
        status = status_of(status)
        text = last_error() or lib.rebatch_status_text(status).decode()
        raise Error(f"rebatch: {text}", status)


def text_of(format_function: Callable[..., int], *arguments: Any) -> str:
    """The whole text that a function such as rebatch_pool_format_summary() writes."""
    size = format_function(None, 0, *arguments)
    while True:
        buffer = ctypes.create_string_buffer(size + 1)
        length = format_function(buffer, size + 1, *arguments)
        if length <= size:
            return buffer.value.decode(errors="replace")
        size = length


def parse_size(size: object) -> tuple[int, int]:
    """Bytes and share of a size.

    `size` is a number of bytes, or a text such as "22GiB", "512 MiB", "1048576" or "90%".
    Returns (bytes, 0), or (0, share in 1/1000) for a text with "%". None gives (0, 0).
    Raises Error for a text that is not a size, ValueError for a negative number and TypeError for
    anything else.
    """
    if size is None:
        return 0, 0
    if isinstance(size, str):
        count, share = c_size_t(), c_uint32()
        text = size.encode()
        check(lib.rebatch_config_parse_size(ctypes.byref(count), ctypes.byref(share), text))
        return count.value, share.value
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(
            f'rebatch: a size is {size!r}: expected bytes as an int, or a text such as "22GiB"'
        )
    if not 0 <= size < 1 << 63:
        raise ValueError(f"rebatch: a size is {size}: expected 0 to 2^63 - 1 bytes")
    return size, 0
