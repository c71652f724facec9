"""librebatch.so by ctypes: its structs member by member, as in include/rebatch, and its functions.

Every class has the name of its struct without the prefix; tests/python/test_structs.py compares
sizes and offsets with those of the C compiler."""

from __future__ import annotations

import ctypes as C
import enum
import os

_u32, _u64, _size, _pointer, _int = C.c_uint32, C.c_uint64, C.c_size_t, C.c_void_p, C.c_int

# ---- enums ----------------------------------------------------------------------------------------


class Status(enum.IntEnum):
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
    E_USER = 1000


class Toggle(enum.IntEnum):
    DEFAULT = 0
    ON = 1
    OFF = 2


class OnOom(enum.IntEnum):
    DEFAULT = 0
    HALVE = 1
    STOP = 2
    FIT = 3


class LogLevel(enum.IntEnum):
    DEFAULT = 0
    QUIET = 1
    ERROR = 2
    WARN = 3
    INFO = 4
    DEBUG = 5


class LogFormat(enum.IntEnum):
    TEXT = 0
    JSON = 1


class GuardPoint(enum.IntEnum):
    STEP = 0
    ATTEMPT = 1


class Phase(enum.IntEnum):
    ZERO_GRAD = 0
    ADMISSION = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    UPDATE = 5
    RESIZE = 6
    MAP = 7


class EventKind(enum.IntEnum):
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


class Confidence(enum.IntEnum):
    NONE = 0
    MEASURED = 1
    AFFINE = 2
    EXACT = 3


class SnapshotFormat(enum.IntEnum):
    PICKLE = 0
    BLOCKS_CSV = 1
    EVENTS_CSV = 2


DECLARES_MUTATION = 1
OWN_WEIGHTS = 2

# ---- structs --------------------------------------------------------------------------------------


class PoolOptions(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("limit_bytes", _size),
        ("limit_permille", _u32),
        ("headroom_bytes", _size),
        ("caching", _int),
        ("ballast_bytes", _size),
        ("max_split_bytes", _size),
        ("gc_threshold_permille", _u32),
        ("rounding_divisions", _u32),
        ("guard", _int),
        ("events", _u32),
        ("keep_room_permille", _u32),
        ("replay", _int),
    ]


POOL_STATISTICS = (
    "live_bytes live_peak_bytes requested_bytes reserved_bytes reserved_peak_bytes deferred_bytes "
    "blocks blocks_peak allocations frees allocated_total_bytes freed_total_bytes "
    "device_allocations device_frees trims pressure_calls ooms rollbacks rolled_back_blocks "
    "late_frees remaps quarantined_bytes collected_bytes ballast_drops"
).split()


class PoolStats(C.Structure):
    _fields_ = [(name, _u64) for name in POOL_STATISTICS]


class ScopeStats(C.Structure):
    _fields_ = [
        ("live_bytes", C.c_int64),
        ("peak_bytes", C.c_int64),
        ("requested_bytes", _u64),
        ("allocations", _u64),
        ("largest_bytes", _u64),
    ]


class TagUsage(C.Structure):
    _fields_ = [
        ("name", C.c_char * 32),
        ("live_bytes", _u64),
        ("peak_bytes", _u64),
        ("at_peak_bytes", _u64),
    ]


class OomReport(C.Structure):
    _fields_ = [
        ("asked_bytes", _u64),
        ("tag", C.c_char * 32),
        ("stage", _int),
        ("limit_bytes", _u64),
        ("live_bytes", _u64),
        ("reserved_bytes", _u64),
        ("room_bytes", _u64),
        ("device_total_bytes", _u64),
        ("device_free_bytes", _u64),
        ("largest_hole_bytes", _u64),
        ("would_fit_bytes", _u64),
        ("tag_count", _u32),
        ("tags", TagUsage * 6),
    ]


class MemoryInfo(C.Structure):
    _fields_ = [("total_bytes", _size), ("free_bytes", _size), ("used_bytes", _size)]


class Microbatch(C.Structure):
    _fields_ = [
        ("step", _u64),
        ("first", _size),
        ("count", _size),
        ("batch", _size),
        ("attempt", _u32),
        ("probing", C.c_bool),
        ("pool", _pointer),
        ("stream", _pointer),
    ]


class MeterReading(C.Structure):
    _fields_ = [
        ("live_bytes", _u64),
        ("peak_bytes", _u64),
        ("reserved_bytes", _u64),
        ("asked_bytes", _u64),
    ]


MeterBegin = C.CFUNCTYPE(None, _int, _size, _pointer)
MeterRead = C.CFUNCTYPE(_int, C.POINTER(MeterReading), _pointer)
MeterAvailable = C.CFUNCTYPE(_int, C.POINTER(_u64), _pointer)
MeterRelease = C.CFUNCTYPE(_u64, _pointer)


class Meter(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("begin", MeterBegin),
        ("read", MeterRead),
        ("available", MeterAvailable),
        ("release", MeterRelease),
        ("user", _pointer),
    ]


class Event(C.Structure):
    _fields_ = [
        ("kind", _int),
        ("level", _int),
        ("step", _u64),
        ("phase", _int),
        ("attempt", _u32),
        ("first", _size),
        ("count", _size),
        ("batch", _size),
        ("micro_before", _size),
        ("micro_after", _size),
        ("lighten_before", C.c_uint),
        ("lighten_after", C.c_uint),
        ("redone_samples", _size),
        ("lost_ns", _u64),
        ("asked_bytes", _u64),
        ("needed_bytes", _u64),
        ("available_bytes", _u64),
        ("peak_bytes", _u64),
        ("text", C.c_char_p),
        ("cost", _u64),
        ("cost_before", _u64),
        ("cost_after", _u64),
        ("is_unexplained", C.c_bool),
    ]


OnEvent = C.CFUNCTYPE(None, C.POINTER(Event), _pointer)


class Options(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("pool", PoolOptions),
        ("stream", _pointer),
        ("micro_start", _size),
        ("micro_smallest", _size),
        ("micro_largest", _size),
        ("on_oom", _int),
        ("admission", _int),
        ("lighten", _int),
        ("max_attempts", _u32),
        ("growth", _int),
        ("grow_after", _u32),
        ("grow_wait_max", _u32),
        ("log_level", _int),
        ("on_event", OnEvent),
        ("on_event_user", _pointer),
        ("micro_multiple_of", _size),
        ("micro_allowed", _size * 32),
        ("max_ooms_in_row", _u32),
        ("learn", _int),
        ("environment", _int),
        ("log_format", _int),
        ("log_file", C.c_char_p),
        ("reclaim", _int),
        ("existing_pool", _pointer),
        ("meter", C.POINTER(Meter)),
    ]


class StepReport(C.Structure):
    _fields_ = [
        ("step", _u64),
        ("status", _int),
        ("microbatches", _u32),
        ("attempts", _u32),
        ("ooms", _u32),
        ("ooms_in", _u32 * len(Phase)),
        ("micro_before", _size),
        ("micro_after", _size),
        ("lighten_level", C.c_uint),
        ("redone_samples", _size),
        ("lost_ns", _u64),
        ("peak_bytes", _u64),
        ("reserved_bytes", _u64),
        ("oom", OomReport),
        ("cost_before", _u64),
        ("cost_after", _u64),
        ("thrashed", _u32),
        ("learned", _u32),
        ("micro", _size),
        ("torn", C.c_bool),
    ]


ZeroGrad = C.CFUNCTYPE(_int, _pointer)
RunSamples = C.CFUNCTYPE(_int, C.POINTER(Microbatch), _pointer)
Lighten = C.CFUNCTYPE(_int, C.c_uint, _pointer)
Cost = C.CFUNCTYPE(_u64, _size, _size, _pointer)
Resize = C.CFUNCTYPE(_int, _size, _pointer)
Guard = C.CFUNCTYPE(_int, _int, _pointer)


class StepOps(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("zero_grad", ZeroGrad),
        ("forward_backward", RunSamples),
        ("optimizer_step", ZeroGrad),
        ("lighten", Lighten),
        ("flags", _u32),
        ("cost", Cost),
        ("resize", Resize),
    ]


class MapOps(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("run", RunSamples),
        ("resize", Resize),
        ("largest", _size),
        ("key", _pointer),
    ]


class GuardOps(C.Structure):
    _fields_ = [("struct_size", _size), ("save", Guard), ("restore", Guard)]


class ProbeOptions(C.Structure):
    _fields_ = [
        ("struct_size", _size),
        ("max_trials", _u32),
        ("reserve_bytes", _size),
        ("file", C.c_char_p),
        ("key", C.c_char_p),
        ("max_seconds", _u32),
        ("choose", _int),
    ]


class ProbeReport(C.Structure):
    _fields_ = [
        ("status", _int),
        ("size", _size),
        ("predicted_size", _size),
        ("predicted_peak_bytes", _u64),
        ("measured_peak_bytes", _u64),
        ("twice_bytes", _u64),
        ("available_bytes", _u64),
        ("trials", _u32),
        ("microbatches", _u32),
        ("ooms", _u32),
        ("confidence", _int),
        ("oom", OomReport),
        ("saved", _int),
        ("saved_size", _size),
        ("largest_size", _size),
        ("samples_per_second", C.c_double),
    ]


class Prediction(C.Structure):
    _fields_ = [
        ("size", _size),
        ("fits", C.c_bool),
        ("peak_bytes", _u64),
        ("reserved_bytes", _u64),
        ("limit_bytes", _u64),
        ("failing_bytes", _u64),
    ]


def sized(struct, **members):
    """A struct with its struct_size, and these members."""
    return struct(struct_size=C.sizeof(struct), **members)


# ---- functions ------------------------------------------------------------------------------------

_FUNCTIONS = {
    # name: (result, arguments)
    "rebatch_version": (C.c_char_p, []),
    "rebatch_last_error": (C.c_char_p, []),
    "rebatch_clear_error": (None, []),
    "rebatch_status_name": (C.c_char_p, [_int]),
    "rebatch_open": (_int, [C.POINTER(_pointer), _pointer, C.POINTER(Options)]),
    "rebatch_close": (None, [_pointer]),
    "rebatch_step": (
        _int,
        [_pointer, C.POINTER(StepOps), _size, _pointer, C.POINTER(StepReport)],
    ),
    "rebatch_map": (_int, [_pointer, C.POINTER(MapOps), _size, _pointer, C.POINTER(StepReport)]),
    "rebatch_probe": (
        _int,
        [
            _pointer,
            C.POINTER(StepOps),
            _size,
            _pointer,
            C.POINTER(ProbeOptions),
            C.POINTER(ProbeReport),
        ],
    ),
    "rebatch_predict": (
        _int,
        [C.POINTER(Prediction), _pointer, _size, _size, C.POINTER(ProbeOptions)],
    ),
    "rebatch_confidence_text": (C.c_char_p, [_int]),
    "rebatch_get_micro": (_size, [_pointer, _size]),
    "rebatch_set_step": (_int, [_pointer, _u64]),
    "rebatch_reserve": (_int, [_pointer, _size]),
    "rebatch_mutating": (None, [_pointer]),
    "rebatch_guard_with": (_int, [_pointer, C.POINTER(GuardOps), _pointer]),
    "rebatch_get_pool": (_pointer, [_pointer]),
    "rebatch_event_format": (_size, [C.c_char_p, _size, C.POINTER(Event)]),
    "rebatch_phase_text": (C.c_char_p, [_int]),
    "rebatch_device_open_dry": (_int, [C.POINTER(_pointer), _size, _size]),
    "rebatch_device_open_host": (_int, [C.POINTER(_pointer), _size, _pointer]),
    "rebatch_device_close": (None, [_pointer]),
    "rebatch_device_memory": (_int, [_pointer, C.POINTER(MemoryInfo)]),
    "rebatch_pool_device": (_pointer, [_pointer]),
    "rebatch_pool_available": (_int, [C.POINTER(_size), _pointer]),
    "rebatch_pool_get_stats": (_int, [C.POINTER(PoolStats), _pointer]),
    "rebatch_pool_set_limit": (_int, [_pointer, _size]),
    "rebatch_pool_trim": (_int, [_pointer, _size, C.POINTER(_size)]),
    "rebatch_pool_format_summary": (_size, [C.c_char_p, _size, _pointer]),
    "rebatch_pool_save_snapshot": (_int, [_pointer, _int, C.c_char_p]),
    "rebatch_pool_tag": (_int, [C.POINTER(C.c_uint16), _pointer, C.c_char_p]),
}


class Error(RuntimeError):
    """A call of the library failed. `status` is the number, the text is rebatch_last_error()."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def _find_library() -> str:
    given = os.environ.get("REBATCH_LIBRARY")
    return given or os.path.join(os.path.dirname(os.path.abspath(__file__)), "librebatch.so")


def _load() -> C.CDLL:
    path = _find_library()
    try:
        loaded = C.CDLL(path)
    except OSError as error:
        raise ImportError(f"librebatch.so cannot be loaded from {path}: {error}") from None
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


library = _load()


def last_error() -> str:
    """The sentence of this thread's last failed call."""
    return library.rebatch_last_error().decode()


def check(status: int) -> None:
    """Raise Error unless `status` is Status.OK."""
    if status:
        raise Error(status, last_error())
