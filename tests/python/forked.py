"""Programs in processes of their own. Importing PyTorch and taking it down costs seconds of a
processor, so a server imports it once and forks for each program. CUDA starts in the forks alone:
forked.run()."""

import atexit
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import traceback


@functools.cache
def _server():
    # Looking for GPUs must not start the driver in the server: it does not outlive a fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def run(program, *arguments, name="<string>", env=os.environ):
    """As subprocess.run([sys.executable, "-c", program, *arguments]), but for variables that are
    read when Python and PyTorch are imported, and for what Python does as it ends: the program's
    functions of atexit are called, and nothing is taken down."""
    server = _server()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
        request = [program, str(name), list(map(str, arguments)), dict(env), files]
        print(json.dumps(request), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(name, status, out.read(), err.read())


def _status_of(program, name, arguments, environment, files):
    """In a fork: the program's exit status."""
    os.environ.clear()
    os.environ.update(environment)
    for number, file in zip((0, 1, 2), (os.devnull, *files)):
        opened = os.open(file, os.O_RDWR)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv, globals()["__file__"] = [name, *arguments], name
    sys.path.insert(0, os.path.dirname(name))
    try:
        exec(compile(program, name, "exec"), globals())
        return 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _serve():
    import torch._dynamo  # noqa: F401, optimizers import it

    import rebatch.torch  # noqa: F401

    gc.freeze()  # no fork's garbage collection looks at that
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        fork = os.fork()
        if fork == 0:
            assert not torch.cuda._is_in_bad_fork(), "CUDA has started in the server"
            status = _status_of(*json.loads(line))
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(fork, 0)
        print(os.waitstatus_to_exitcode(status), file=replies, flush=True)
    os._exit(0)


if __name__ == "__main__":
    _serve()
