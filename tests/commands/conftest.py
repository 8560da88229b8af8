"""Commands of one process: what the parser of flags reads from source files is read once."""

import functools

import pytest


@pytest.fixture(scope="session", autouse=True)
def help_texts_are_read_once():
    """tyro reads the comments of all classes of options anew for each command, half of the time of a test."""
    from tyro import _docstrings

    with pytest.MonkeyPatch.context() as patch:
        kind = getattr(_docstrings, "_ClassTokenization", None)
        if kind is not None:
            patch.setattr(kind, "make", staticmethod(functools.cache(kind.make)))
        yield
