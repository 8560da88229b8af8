"""Tests of several devices have all of them; jobs of several processes are forked from one."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def devices(all_devices):
    """Apply `all_devices` to every test of this folder."""


@pytest.fixture(scope="session")
def jobs() -> Iterator:
    from forked_job import Jobs

    jobs = Jobs()
    yield jobs
    jobs.close()
