"""Worker processes of Ray that are forked from a server which has imported torch and the engine:
each would import for up to five seconds.

`fork_workers` replaces the script with which raylets start a worker. The new one, which is this
file, sends its arguments, environment and output to the server.
"""

import argparse
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

ADDRESS = "MMRAY_TEST_RAY_WORKERS"  # variable with the abstract address of the server's socket
LENGTH_BYTES = 4


@cache
def fork_workers():
    """Let the raylets that this process starts fork their workers; return the server, which ends
    with this process.
    """
    from ray._private import ray_constants

    listener = socket.socket(socket.AF_UNIX)
    os.environ[ADDRESS] = f"mmray-test-{os.getpid()}"
    listener.bind("\0" + os.environ[ADDRESS])
    listener.listen(128)  # connections wait in the socket until the server has imported everything
    file = listener.fileno()
    ray_constants.SETUP_WORKER_FILENAME = __file__  # an absolute path; Ray joins it to a folder
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ray_workers", str(file)],
        stdin=subprocess.PIPE,
        pass_fds=[file],
    )


def _request():
    """Request a worker with the arguments, environment and output of this process."""
    text = json.dumps([sys.argv[1:], dict(os.environ), str(Path.cwd())]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + os.environ[ADDRESS])
        socket.send_fds(server, [len(text).to_bytes(LENGTH_BYTES)], [0, 1, 2])
        server.sendall(text)
        server.recv(1)  # until the server has forked


def _serve(listener):
    """Fork for each request until standard input ends; return the request in the child."""
    children = set()

    def reap(*_):
        for pid in list(children):
            # The end of another child may interrupt this loop by a second call, which reaps both.
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    children.discard(pid)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, reap)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            size, files, *_ = socket.recv_fds(connection, LENGTH_BYTES, 3)
            request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid:
                children.add(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if not pid:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            for number, file in enumerate(files):
                os.dup2(file, number)
        for file in files:
            os.close(file)
        if not pid:
            return json.loads(request)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _run(words, environment, folder):
    """Run Ray's worker as its own script does (ray/_private/workers/setup_worker.py)."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Ray reads its variables when it is imported.
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray.core.generated.common_pb2 import Language

    from tests import forked

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, words = parser.parse_known_args(words)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context)
    changed = context.command_prefix or context.override_worker_entrypoint
    if changed or context.py_executable != sys.executable:
        context.exec_worker(words, Language.Value(options.language))
    update_envs(context.env_vars)
    forked.use_server()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path not in sys.path]
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _request()
    else:
        from importlib import import_module

        # Packages that Ray imports.
        for module in ("attrs", "click", "google.protobuf.json_format", "grpc.aio", "jsonschema"):
            import_module(module)
        for module in ("msgpack", "pandas", "requests", "tests.preloaded"):
            import_module(module)
        _run(*_serve(socket.socket(fileno=int(sys.argv[1]))))
