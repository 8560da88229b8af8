"""Tests of several devices have all of them."""

import pytest


@pytest.fixture(autouse=True)
def devices(all_devices):
    """Apply `all_devices` to every test of this folder."""
