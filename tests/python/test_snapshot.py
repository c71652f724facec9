"""rebatch.snapshot: a pool's CSV as what PyTorch's memory viewer reads."""

import ctypes
import os
import pickle
import subprocess
import sys

import pytest
from torch.cuda import _memory_viz

from rebatch import _library, snapshot

MIB = 1 << 20
PAGE = 2 * MIB


@pytest.fixture
def pool():
    device, made = ctypes.c_void_p(), ctypes.c_void_p()
    options = _library.PoolOptions(events=1000)
    lib = _library.lib
    _library.check(lib.rebatch_device_open_dry(ctypes.byref(device), 32 * MIB, PAGE))
    _library.check(lib.rebatch_pool_create(ctypes.byref(made), device, ctypes.byref(options)))
    yield made
    lib.rebatch_pool_destroy(made)
    lib.rebatch_device_close(device)


def alloc(pool, size, tag=0):
    pointer = ctypes.c_void_p()
    status = _library.lib.rebatch_pool_alloc(ctypes.byref(pointer), pool, size, None, tag)
    return pointer if status == _library.Status.OK else None


def tag_of(pool, name):
    tag = ctypes.c_uint16()
    _library.check(_library.lib.rebatch_pool_tag(ctypes.byref(tag), pool, name))
    return tag.value


def use(pool):
    """Two live blocks, one freed, and one for which there is no memory."""
    kept = alloc(pool, 3 * MIB, tag_of(pool, b'a "quoted", tag \xff'))
    gone = alloc(pool, 5000)
    alloc(pool, 700)
    _library.check(_library.lib.rebatch_pool_free(pool, gone))
    assert alloc(pool, 40 * MIB) is None
    return kept.value


def save(pool, folder):
    paths = []
    for form in _library.SnapshotFormat:
        paths.append(str(folder / form.name))
        _library.check(_library.lib.rebatch_pool_save_snapshot(pool, form, os.fsencode(paths[-1])))
    return paths


def stats_of(pool):
    stats = _library.PoolStats()
    _library.check(_library.lib.rebatch_pool_get_stats(ctypes.byref(stats), pool))
    return stats


def test_the_sums_are_those_of_the_pool(pool, tmp_path):
    kept = use(pool)
    taken = snapshot.read(*save(pool, tmp_path))
    stats = stats_of(pool)
    segments = taken["segments"]
    assert sum(s["allocated_size"] for s in segments) == stats.live_bytes
    assert sum(s["requested_size"] for s in segments) == stats.requested_bytes == 3 * MIB + 700
    spare = taken["rebatch"]["spare_bytes"]
    assert sum(s["total_size"] for s in segments) + spare == stats.reserved_bytes
    for s in segments:
        ends = [b["address"] + b["size"] for b in s["blocks"]]
        assert [b["address"] for b in s["blocks"]] == [s["address"], *ends[:-1]]
    (block,) = (b for s in segments for b in s["blocks"] if b["address"] == kept)
    assert block["state"] == "active_allocated"
    assert block["frames"] == [
        {"filename": "rebatch", "line": 0, "name": 'a "quoted", tag \N{REPLACEMENT CHARACTER}'}
    ]


def test_the_events_are_there_and_a_free_is_two(pool, tmp_path):
    use(pool)
    (trace,) = snapshot.read(*save(pool, tmp_path))["device_traces"]
    actions = [e["action"] for e in trace if not e["action"].startswith("segment")]
    assert actions == ["alloc", "alloc", "alloc", "free_requested", "free_completed", "oom"]
    assert trace[-1]["size"] == 40 * MIB and trace[-1]["device_free"] > 0
    assert sorted(e["time_us"] for e in trace) == [e["time_us"] for e in trace]


def test_a_rollback_and_a_pending_block(tmp_path):
    blocks, events = tmp_path / "b.csv", tmp_path / "e.csv"
    blocks.write_text(
        "segment,segment_bytes,address,bytes,requested_bytes,state,stream,tag,allocation\n"
        '0x1000,2048,0x1000,1024,0,pending,7,"x",\n'
        "0x1000,2048,0x1400,1024,0,quarantined,,,\n"
        ",,,4096,0,spare,,,\n"
    )
    events.write_text(
        "number,time_us,action,address,bytes,stream,tag,device_free_bytes,blocks\n"
        "0,5,rollback,,,,,,3\n"
    )
    taken = snapshot.read(str(blocks), str(events), device=1)
    (segment,) = taken["segments"]
    assert segment["device"] == 1
    assert (segment["allocated_size"], segment["active_size"]) == (0, 1024)
    states = [(b["state"], b["requested_size"], b["stream"]) for b in segment["blocks"]]
    assert states == [("active_pending_free", 1024, 7), ("inactive", 0, 0)]
    assert taken["rebatch"]["spare_bytes"] == 4096
    assert taken["device_traces"][0] == []
    (rollback,) = taken["device_traces"][1]
    assert rollback["frames"][0]["name"] == "3 blocks taken back"


def test_the_command_writes_what_pytorchs_viewer_reads(pool, tmp_path):
    use(pool)
    out = tmp_path / "out.pickle"
    command = [sys.executable, snapshot.__file__, *save(pool, tmp_path), str(out)]
    subprocess.run(command, check=True)
    with out.open("rb") as file:
        taken = pickle.load(file)
    assert "3.0MiB" in _memory_viz.segsum(taken)
    assert "raise OutOfMemoryError # 40.0MiB requested" in _memory_viz.trace(taken)
    assert "<script" in _memory_viz.trace_plot(taken)
    wrong = subprocess.run([sys.executable, snapshot.__file__, "one"], capture_output=True)
    assert wrong.returncode == 2 and b"BLOCKS.csv" in wrong.stderr


def test_the_command_loses_no_file(pool, tmp_path):
    use(pool)
    blocks, events = save(pool, tmp_path)
    notes, out = tmp_path / "notes", tmp_path / "out.pickle"
    notes.write_text("kept")
    snapshot.main([blocks, events, str(out)])
    (link := tmp_path / "link").symlink_to(blocks)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for arguments, said in (
        ([blocks, events], "EVENTS_CSV is there and is no pickle: expected OUT.pickle last"),
        ([blocks, blocks], "is no pickle"),
        ([blocks, events, blocks], "is no pickle"),
        ([blocks, str(link)], "is no pickle"),
        ([blocks, str(notes)], "is no pickle"),
        ([blocks, str(tmp_path)], "is no pickle"),
        ([str(tmp_path / "none.csv"), str(out)], "none.csv"),
        ([events, str(out)], "segment"),  # blocks were expected
    ):
        command = [sys.executable, snapshot.__file__, *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode != 0 and said in result.stderr, result.stderr
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert snapshot.main([blocks, str(out)]) == 0  # an older snapshot
    assert out.read_bytes() != before[out]
