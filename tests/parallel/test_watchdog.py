"""Heartbeats of simulated processes: all learn who has died, at a cost that grows only with their number."""

import jax

from flaxformer_mt.parallel.processes import HEARTBEAT_TIMEOUT, Heartbeats


class Store:
    """The key-value store of a job, which counts requests and the values that they carry."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.requests, self.carried, self.reachable = 0, 0, True

    def _serve(self, values: int) -> None:
        if not self.reachable:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect")
        self.requests += 1
        self.carried += values

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        self._serve(1)
        assert allow_overwrite
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        self._serve(1)
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        found = [item for item in self.values.items() if item[0].startswith(f"{folder}/")]
        self._serve(len(found))
        return found


def test_watching_costs_a_few_requests_for_each_process():
    for count in (4, 64):
        store = Store()
        job = [Heartbeats(store, index, count) for index in range(count)]
        for second in range(10):
            assert not any(process.exchange(second) for process in job)
        assert store.requests == 10 * 2 * count and store.carried <= 10 * 3 * count


def test_all_processes_name_the_one_that_has_died():
    for dead in (1, 2, 0):
        store = Store()
        job = {index: Heartbeats(store, index, 3) for index in reversed(range(3))}
        for second in range(5):
            assert not any(process.exchange(second) for process in job.values())
        del job[dead]
        now = 5 + int(HEARTBEAT_TIMEOUT)
        assert not any(process.exchange(second) for second in range(5, now) for process in job.values())
        for _ in range(2):
            now += 1
            found = {process.exchange(now) for process in job.values()}
        (message,) = found
        silence = float(message.removeprefix(f"process {dead} of 3 has sent no heartbeat for ").split()[0])
        assert HEARTBEAT_TIMEOUT < silence <= HEARTBEAT_TIMEOUT + 3


def test_a_coordinator_that_cannot_be_reached_has_died():
    store = Store()
    process = Heartbeats(store, 1, 2)
    assert process.exchange(0.0) == ""
    store.reachable = False
    assert process.exchange(HEARTBEAT_TIMEOUT / 3) == ""
    assert process.exchange(HEARTBEAT_TIMEOUT / 2).startswith("process 0 of 2 has sent no heartbeat")
