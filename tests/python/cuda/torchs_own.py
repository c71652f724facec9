"""PyTorch's own CUDA tests, natively and after rebatch.install(), compared.

    python3 tests/python/cuda/torchs_own.py FOLDER OUT.json [--seconds 270] [--workers 16]

FOLDER is the folder `test` of PyTorch's sources, best of the release that is installed (else a test
of it may fail natively; those are counted and left out). It needs a GPU, pytest-xdist,
pytest-timeout and expecttest. Both sides run beside each other, each test in one of several worker
processes. A worker that crashes counts as the crash of its test, and another one goes on. What ran
out of memory natively, and then what passes natively alone, runs once more with less beside it.
OUT.json has the counts, and what passes natively and does not pass after install().

The file is also the plugin of pytest that installs, and that records what each test did.
"""

import argparse
import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
INSTALL, RECORD = "TORCHS_OWN_INSTALL", "TORCHS_OWN_RECORD"
CACHED_BYTES = 1 << 30  # of one worker: more is given back after a test
RERUN_SECONDS = 45  # at most, and at most a third of the time
ONE_TEST_SECONDS = 60
# In the order of worth; the parts of the second run at the same time.
PARTS = {
    "default": (
        "test_cuda.py test_cuda_trace.py test_cuda_sanitizer.py test_autograd.py test_nn.py nn "
        "test_optim.py test_torch.py test_indexing.py test_multiprocessing.py",
        {},
        3,  # of four workers
    ),
    "expandable_segments": (
        "test_cuda.py",
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        1,
    ),
}
WORST = ("crash", "failed", "passed", "skipped")


# ---- the plugin ----


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())
        return
    if os.environ.get(INSTALL):
        import rebatch.torch

        rebatch.torch.install()
    config.pluginmanager.register(Worker())


class Worker:
    """Leaves the GPU to the next test as a new process would find it, or makes way for one."""

    def pytest_runtest_logfinish(self):
        import torch

        if not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
            if torch.cuda.memory_reserved() > CACHED_BYTES:
                torch.cuda.empty_cache()
        except RuntimeError as error:  # each later call would fail too
            print(f"torchs_own: {error}", file=sys.stderr)
            os._exit(3)


class Recorder:
    """A line for each report, at once: the run may be ended at any time."""

    def __init__(self):
        self.out = open(os.environ[RECORD], "a", buffering=1)

    def pytest_runtest_logreport(self, report):
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return
        crashed = report.when == "???"  # a worker's; xdist names no phase then
        self.write(report, "crash" if crashed else report.outcome)

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(report, "failed")

    def write(self, report, outcome):
        said = error_of(report) if outcome in ("crash", "failed") else ""
        print(json.dumps([report.nodeid, outcome, said]), file=self.out)


def error_of(report):
    """The first lines of an error's message, without PyTorch's own on how to run the test."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = (crash.message if crash else str(report.longrepr)).split("To execute this test")[0]
    return " | ".join([line.strip() for line in said.splitlines() if line.strip()][:3])[:300]


# ---- the runs ----


class Run:
    """pytest in processes of its own: a part, natively or installed, or single tests of it."""

    def __init__(self, folder, work, part, install, workers, tests=None):
        files, variables, _ = PARTS[part]
        self.folder = folder
        side = "installed" if install else "native"
        self.record = work / f"{part}-{side}{'-again' if tests else ''}"
        self.record.write_text("")
        command = [sys.executable, "-m", "pytest", "-q", "-p", pathlib.Path(__file__).stem]
        command += ["--noconftest", "-c", "/dev/null", "--rootdir", ".", "-p", "no:cacheprovider"]
        command += ["--assert", "plain"]  # quicker to load
        command += ["-k", "cuda", "-n", str(workers), "--maxschedchunk", "1"]
        command += ["--max-worker-restart", "1000", "--continue-on-collection-errors"]
        command += ["--timeout", str(ONE_TEST_SECONDS), "--timeout-method", "signal"]
        command += tests or [file for file in files.split() if (folder / file).exists()]
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda",
            RECORD: str(self.record),
            INSTALL: "1" if install else "",
        }
        with open(f"{self.record}.txt", "w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, until):
        """It is ended at that time. Returns what became of each test, the worst of its reports
        with the error."""
        try:
            self.process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        found = {}
        for line in self.record.read_text().splitlines():
            test, outcome, said = json.loads(line)
            before = found.get(test, (WORST[-1], ""))
            if WORST.index(outcome) <= WORST.index(before[0]):
                found[test] = (outcome, said)
        return found

    def crashes(self):
        """What the log has of them: errors, and where in the tests they were."""
        log = pathlib.Path(f"{self.record}.txt").read_text(errors="replace").splitlines()
        said = ("Fatal Python error", "torchs_own:", "Timeout", f'  File "{self.folder}')
        return [line.strip()[:200] for line in log if line.startswith(said)][:100] + log[-1:]


def passes_only_in(one, other):
    """The tests that pass in one run and do something else in the other: what, and its error."""
    return {
        test: other[test]
        for test, (outcome, _) in one.items()
        if outcome == "passed" and other.get(test, ("passed",))[0] != "passed"
    }


def start(folder, work, install, workers, tests):
    """A run of each part: all tests of it where they are None, else the named ones, if any."""
    return {
        part: Run(folder, work, part, install, max(workers * PARTS[part][2] // 8, 1), names)
        for part, names in tests.items()
        if names != []
    }


def finish(runs, until):
    return {part: run.wait(until) for part, run in runs.items()}


def compare(folder, work, seconds, workers):
    """A dictionary of what differs in each part, and the counts."""
    begin = time.monotonic()
    rerun = min(RERUN_SECONDS, seconds / 3)
    everything = dict.fromkeys(PARTS)
    runs = [start(folder, work, install, workers, everything) for install in (False, True)]
    native, installed = [finish(run, begin + seconds - rerun) for run in runs]
    # What others on the GPU left no memory for.
    short = {part: [test for test in native[part] if is_oom(native[part][test])] for part in PARTS}
    again = finish(start(folder, work, False, 2, short), begin + seconds - rerun / 2)
    for part in again:
        native[part].update(again[part])
    differ = {part: passes_only_in(native[part], installed[part]) for part in PARTS}
    names = {part: list(differ[part]) for part in PARTS}
    again = finish(start(folder, work, True, workers, names), begin + seconds)
    out = {}
    for part in PARTS:
        second = again.get(part, {})
        kept = {test: second.get(test, found) for test, found in differ[part].items()}
        out[part] = {
            "native": counts(native[part]),
            "installed": counts(installed[part]),
            "in one run alone": len(native[part].keys() ^ installed[part].keys()),
            "passes after install() alone": sorted(passes_only_in(installed[part], native[part])),
            "differed once": {t: differ[part][t] for t in kept if kept[t][0] == "passed"},
            "differs": {test: found for test, found in kept.items() if found[0] != "passed"},
            "crashes": [run[part].crashes() for run in runs],
        }
    return out


def is_oom(found):
    return found[0] == "failed" and "out of memory" in found[1]


def counts(results):
    return dict(collections.Counter(outcome for outcome, _ in results.values()))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=270)
    parser.add_argument("--workers", type=int, default=16)
    given = parser.parse_args()
    begin = time.monotonic()
    install = "import torch, rebatch.torch as r; r.install(); print(torch.__version__)"
    version = subprocess.run([sys.executable, "-c", install], capture_output=True, text=True)
    if version.returncode:  # it is compiled once, before several workers need it
        sys.exit(version.stderr)
    with tempfile.TemporaryDirectory() as work:
        seconds = given.seconds - (time.monotonic() - begin)
        found = compare(given.folder.resolve(), pathlib.Path(work), seconds, given.workers)
    given.out.write_text(json.dumps({"torch": version.stdout.strip(), **found}, indent=1))
    for part, of_part in found.items():
        print(part, "native:", of_part["native"], "installed:", of_part["installed"])
        for test, (outcome, said) in of_part["differs"].items():
            print(f"  {outcome} {test}: {said}")


if __name__ == "__main__":
    main()
