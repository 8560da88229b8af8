"""Scripts of benchmarks/ as modules."""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load_benchmark() -> Iterator[Callable[[str], ModuleType]]:
    @functools.cache
    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for a class's annotations
        spec.loader.exec_module(module)
        return module

    sys.path.insert(0, str(FOLDER))
    yield load
    sys.path.remove(str(FOLDER))
    for name in [name for name in sys.modules if name.startswith("benchmark_")]:
        del sys.modules[name]
