"""Training keeps the memory that it frees; Ctrl-C ends the other commands, whatever they are doing."""

import os
import platform
import signal
import subprocess
import sys
import time

import pytest

# Allocates and frees an array of 64 MB in another thread, and prints the page faults of doing it again.
PROGRAM = """
import resource, sys, threading
sys.path.insert(0, {root!r})
from flaxformer_mt.commands import launch
launch.core_count = lambda: {cores}
launch.keep_memory()
faults = []
def allocate():
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory = bytearray(b"x") * (64 << 20)
        del memory
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
print(faults[-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets the GNU C library")
@pytest.mark.parametrize(
    ("tunables", "cores", "kept"),
    [(None, 1, True), (None, 4, True), (None, 5, False), ("glibc.malloc.check=0", 1, False)],
)
def test_freed_memory_is_used_again_by_few_cores_unless_the_user_has_chosen(
    tunables, cores, kept, pytestconfig
):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    program = [sys.executable, "-c", PROGRAM.format(root=str(pytestconfig.rootpath), cores=cores)]
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert (int(done.stdout) < 1000) == kept  # of 16,384 pages


# A command that compiles for minutes: in another thread, or in the main one, where Python gets no word in.
COMPILING = """
import hashlib, signal, sys
from concurrent.futures import ThreadPoolExecutor
from flaxformer_mt.commands import launch, main
def compile_it():
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
def run(arguments):
    future = None if sys.argv[2] == "here" else ThreadPoolExecutor(1).submit(compile_it)
    print("compiling", flush=True)
    compile_it() if future is None else future.result()
main._run = run
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let programs in the background ignore it
launch.launch([sys.argv[1]])
"""


def test_ctrl_c_ends_commands_while_they_compile(pytestconfig):
    """Once is enough but for a server that answers what it was asked; twice ends that too, at once."""
    cases = [
        ("translate", "thread", 1),
        ("translate", "here", 1),
        ("distil", "here", 2),
        ("serve", "here", 2),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILING, command, where],
            cwd=pytestconfig.rootpath,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, where, _ in cases
    ]
    try:
        for process, (*_, times) in zip(processes, cases, strict=True):
            assert process.stdout.readline() == "compiling\n"
            time.sleep(0.1)  # it is in C now
            for _ in range(times):
                process.send_signal(signal.SIGINT)
                time.sleep(0.1)
            assert process.wait(timeout=30) == 130
            assert process.stderr.read() == "interrupted\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
