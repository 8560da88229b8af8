"""All tests of search run without implicit promotion of dtypes."""

import pytest


@pytest.fixture(autouse=True)
def no_implicit_promotion(strict_dtypes):
    """Apply `strict_dtypes` to every test of this folder."""
