"""Damage to files and values, drawn from a seeded generator."""

import copy
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# How many times more than in the usual test session: FLAXFORMER_MT_FUZZ=100 is the large size.
SIZE = int(os.environ.get("FLAXFORMER_MT_FUZZ", "1"))


def _truncate(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))] if content else content


def _zero(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) + 1)
    length = min(len(content) - start, draw.choice([1, 64, 4096]))
    return content[:start] + bytes(length) + content[start + length :]


def _flip(content: bytes, draw: random.Random) -> bytes:
    if not content:
        return content
    index = draw.randrange(len(content))
    return content[:index] + bytes([content[index] ^ 1 << draw.randrange(8)]) + content[index + 1 :]


def _insert(content: bytes, draw: random.Random) -> bytes:
    index = draw.randrange(len(content) + 1)
    return content[:index] + draw.randbytes(draw.choice([1, 7, 300])) + content[index:]


BYTES: list[Callable[[bytes, random.Random], bytes]] = [
    _truncate,
    lambda content, draw: content[:-1],
    _zero,
    _flip,
    _flip,
    _insert,
    lambda content, draw: b"",
    lambda content, draw: draw.randbytes(100),
    lambda content, draw: b"[" * 50_000,
    lambda content, draw: b"\xff\xfe" + content,
]


def damage_file(path: Path, draw: random.Random) -> str:
    """Changes, removes or replaces a file by an entry of another kind; returns what was done."""
    kind = draw.randrange(len(BYTES) + 3)
    if kind < len(BYTES):
        path.write_bytes(BYTES[kind](path.read_bytes(), draw))
        return f"bytes {kind}"
    path.unlink()
    if kind == len(BYTES):
        path.mkdir()
        return "a folder"
    if kind == len(BYTES) + 1:
        path.symlink_to(path.parent / "absent")
        return "a dangling link"
    return "missing"


def damaged_copies(folder: Path, copies: Path, count: int, seed: int) -> Iterator[tuple[Path, str]]:
    """Copies of a folder, each with damage to one of its files, and a description of it."""
    draw = random.Random(seed)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    draw.shuffle(files)
    for number in range(count):
        target = copies / "copy"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        name = files[number % len(files)]
        yield target, f"{number}: {name}, {damage_file(target / name, draw)}"


VALUES = [
    None, True, False, 0, -1, 1, 2, 7, 10**12, -(10**12), 10**400, 0.5, -0.5, 1e30, 1e-300, float("nan"),
    float("inf"), "", "x", "64", "\ud800", "a" * 5000, [], [1, "x"], [[]], {}, {"model_dim": 3},
]  # fmt: skip


def mutate(values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A copy of nested dicts with one to three changes: a value, a name that is gone, or a new name."""
    values = copy.deepcopy(values)
    for _ in range(draw.randint(1, 3)):
        node = values
        while True:
            name = draw.choice(sorted(node))
            if not isinstance(node[name], dict) or not node[name] or draw.random() < 0.05:
                break
            node = node[name]
        change = draw.random()
        if change < 0.1:
            del node[name]
        elif change < 0.2:
            node[f"{name}s"] = draw.choice(VALUES)
        else:
            node[name] = draw.choice(VALUES)
        if not node:
            node["x"] = 1
    return values
