"""Tests of decoding change and count what is traced."""

import pytest


@pytest.fixture(autouse=True)
def programs(own_programs):
    """Apply `own_programs` to every test of this folder."""
