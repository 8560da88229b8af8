"""Names of the systems that benchmarks compare, and the packages of others that each needs.

Knows nothing of how a system is run.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Sequence

from flaxformer_mt.errors import install_command

# Packages that each system of others needs.
_PACKAGES = {
    "marian": ("torch", "transformers"),
    "torch": ("torch",),
    "hugging_face": ("torch", "transformers"),
    "ctranslate2": ("ctranslate2",),
}


def choose_systems(parser: argparse.ArgumentParser, text: str, peers: Sequence[str]) -> list[str]:
    """Read a list of systems, as in "ours,torch"; end the program if one is unknown or named twice.

    Args:
      parser: says so, with status 2.
      text: names, comma-separated.
      peers: the systems of others that this benchmark has.
    """
    names = text.split(",")
    if unknown := [name for name in names if name not in ("ours", *peers)]:
        parser.error(f"unknown systems {', '.join(unknown)}; known: {', '.join(('ours', *peers))}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        parser.error(f"--systems={text} has {', '.join(twice)} more than once")
    return names


def add_marian(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the peer marian-cpp."""
    parser.add_argument(
        "--marian_python", default=sys.executable, help="Python with pymarian, for the system marian-cpp"
    )


def require_packages(systems: Iterable[str]) -> None:
    """End the program with status 2 and what to install if packages of these systems are missing."""
    needed = dict.fromkeys(package for system in systems for package in _PACKAGES.get(system, ()))
    missing = [package for package in needed if importlib.util.find_spec(package) is None]
    if missing:
        extras = dict.fromkeys("ctranslate2" if package == "ctranslate2" else "torch" for package in missing)
        commands = " && ".join(install_command(extra=extra) for extra in extras)
        print(f"error: not installed: {', '.join(missing)}; install with: {commands}", file=sys.stderr)
        raise SystemExit(2)
