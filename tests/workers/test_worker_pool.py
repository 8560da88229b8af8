"""The map over blocks: order, look-ahead, and workers that die, as processes and as actors of Ray."""

import functools
import os
import re
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from mortal_work import begun, make_mortal_work

from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.workers.worker_pool import PoolOptions, open_workers

HERE = Path(__file__).parent
MODULES = f"{HERE}:{HERE.parents[1]}"


@pytest.fixture(params=["processes", "ray"])
def ray(request, monkeypatch):
    """The address of Ray; None for processes. A cluster that starts here finds the modules of the tests."""
    if request.param == "processes":
        return None
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", f"{MODULES}:{os.environ.get('PYTHONPATH', '')}")
    return "local"


def work_on(folder, blocks, *, ray=None, **options):
    """The results and warnings of a map by two workers, and the error that ended it, if one did."""
    results, error = [], None
    make = functools.partial(make_mortal_work, folder, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FlaxformerWarning)
        try:
            with open_workers(make, PoolOptions(2, ray)) as map_blocks:
                for result in map_blocks(iter(blocks), name=lambda block: f"block {block}"):
                    results.append(result)
        except (UserError, RuntimeError) as raised:
            error = raised
    return results, [str(one.message) for one in caught], error


def test_a_block_whose_worker_is_killed_is_done_by_another_one(tmp_path, ray):
    """Results are in order, and every other block is worked on once."""
    blocks = (number for number in range(7))
    results, messages, error = work_on(tmp_path, blocks, ray=ray, kills={3: 2})
    assert error is None and results == [0, 1, 4, 9, 16, 25, 36]
    assert [len(begun(tmp_path, block)) for block in range(7)] == [1, 1, 1, 3, 1, 1, 1]
    assert len(set(begun(tmp_path, 3))) == 3
    assert len({process for block in range(7) for process in begun(tmp_path, block)}) >= 3
    # Each worker has the first warning.
    lost = [message for message in messages if "block 3, which it worked on, will be done by" in message]
    assert len(lost) == 2 and sorted({*messages} - {*lost}) == ["block 2 is odd", "loaded"]
    assert messages.count("loaded") == 1
    cause = "was ended by SIGKILL" if ray is None else "has died (The actor is dead because its worker"
    assert all(cause in message for message in lost)


def test_a_block_that_kills_three_workers_is_named(tmp_path, ray):
    results, _, error = work_on(tmp_path, range(6), ray=ray, kills={3: 9})
    assert isinstance(error, UserError) and "block 3: 3 workers, one after the other, have died" in str(error)
    assert len(begun(tmp_path, 3)) == 3 and results == [0, 1, 4][: len(results)]


def test_blocks_are_read_ahead_but_for_a_few(tmp_path):
    """While the first block is worked on, the other worker does what there is room for."""
    read = []
    blocks = (read.append(number) or number for number in range(20))
    make = functools.partial(make_mortal_work, tmp_path, awaited=3)
    with pytest.warns(FlaxformerWarning) as caught, open_workers(make, PoolOptions(2)) as map_blocks:
        results = map_blocks(blocks, name=str)
        assert next(results) == 0 and len(read) == 4
        assert begun(tmp_path, 3) and not begun(tmp_path, 4)
        assert next(results) == 1 and len(read) == 5
        assert list(results) == [number**2 for number in range(2, 20)]
        # The same workers map again.
        assert list(map_blocks([5, 6], name=str)) == [25, 36]
    assert [str(one.message) for one in caught] == ["loaded", "block 2 is odd"]
    workers = {process for block in range(20) for process in begun(tmp_path, block)}
    assert len(workers) == 2 and {*begun(tmp_path, 5), *begun(tmp_path, 6)} <= workers


def test_errors_of_the_function_are_raised_here_in_the_order_of_blocks(tmp_path, ray):
    """A user error as it is, a bug with the traceback of the worker."""
    results, _, error = work_on(tmp_path, [0, "wrong", 2], ray=ray)
    assert results == [0] and type(error) is UserError
    assert str(error) == "the block is wrong; give a number"
    results, _, error = work_on(tmp_path, [0, "bug", 2], ray=ray)
    assert results == [0] and "TypeError: unsupported operand" in str(error)
    assert "return block**2" in str(error)


PROGRAM = """
import functools, sys
from mortal_work import make_mortal_work
from flaxformer_mt.workers.worker_pool import PoolOptions, open_workers
with open_workers(functools.partial(make_mortal_work, sys.argv[1]), PoolOptions(1)) as map_blocks:
    print(*map_blocks(["interrupted", 3], name=str))
"""


def test_ctrl_c_is_left_to_the_process_that_started_the_workers(tmp_path):
    """In a new process: the first worker is started together with a process of Python's own."""
    environment = {**os.environ, "PYTHONPATH": MODULES}
    command = [sys.executable, "-c", PROGRAM, tmp_path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "went on 9\n" and "Traceback" not in done.stderr
    assert len(begun(tmp_path, "interrupted")) == 1


def test_an_error_of_the_blocks_is_raised_when_those_before_are_done(tmp_path):
    def blocks():
        yield from range(3)
        raise UserError("line 4 cannot be read")

    results, _, error = work_on(tmp_path, blocks())
    assert results == [0, 1, 4] and isinstance(error, UserError) and str(error) == "line 4 cannot be read"


def test_workers_that_die_while_they_start_are_counted(tmp_path):
    results, _, error = work_on(tmp_path, [0], dies_at_start=True)
    assert not results and isinstance(error, UserError)
    assert "block 0: 3 workers, one after the other, have died while they started or worked" in str(error)
    assert "the last one was ended by SIGKILL" in str(error)
    assert 3 <= len(list(tmp_path.glob("start.*"))) <= 4  # of the second worker too


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch):
    """Before Ray, which would try for minutes; here it is a module that knows no cluster."""
    ray, exceptions = types.ModuleType("ray"), types.ModuleType("ray.exceptions")
    ray.init = lambda address, **options: int("Ray was asked")
    exceptions.RayActorError = Exception
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "flaxformer_mt.workers.ray_actors", None)
    del sys.modules["flaxformer_mt.workers.ray_actors"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto", "local", "anything"):
            assert "Ray was asked" in refuse(address)
    for address in (f"127.0.0.1:{port}", f"ray://[::1]:{port}", "127.0.0.1:99999", "no host:80"):
        assert "Ray was asked" not in refuse(address)


def refuse(address: str) -> str:
    start = f"^--ray={re.escape(address)}: there is no such Ray cluster .*--ray=local"
    with pytest.raises(UserError, match=start) as caught, open_workers(dict, PoolOptions(2, address)):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)
