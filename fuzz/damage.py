"""Damage to files and values, each a function of a seed and a number, so that a failure can be repeated."""

import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# How many times more than in the usual test session: FLAXFORMER_MT_FUZZ=100 is the large size.
SIZE = int(os.environ.get("FLAXFORMER_MT_FUZZ", "1"))


def draw_for(seed: str, number: int) -> random.Random:
    return random.Random(f"{seed} {number}")


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


# A list of a list of ... of tens of thousands of millions of values, as YAML.
LAUGHS = b"a0: &a0 [x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 10)) for n in range(1, 12)
)
MERGES = LAUGHS.replace(b"[", b"{<<: [").replace(b"]", b"]}").replace(b"{<<: [x]}", b"{x: 1}")
BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncate, "last byte lost": lambda content, draw: content[:-1], "zeroed in part": _zero,
    "all zeroed": lambda content, draw: bytes(len(content)), "flipped bit": _flip,
    "another flipped bit": _flip, "bytes inserted": _insert, "empty": lambda content, draw: b"",
    "random": lambda content, draw: draw.randbytes(100), "nested": lambda content, draw: b"[" * 50_000,
    "laughs": lambda content, draw: LAUGHS, "merges": lambda content, draw: MERGES,
    "mark of UTF-16": lambda content, draw: b"\xff\xfe" + content,
}  # fmt: skip


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def _other_file(path: Path, harm: Path) -> None:
    others = sorted(other for other in path.parent.iterdir() if other.is_file())
    path.symlink_to(others[0] if others else path.parent / "absent")


def _sparse(path: Path, harm: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "missing": lambda path, harm: None,
    "a folder": lambda path, harm: path.mkdir(),
    "a folder with files": lambda path, harm: (path.mkdir(), (path / "x").write_bytes(b"x")),
    "a dangling link": lambda path, harm: path.symlink_to(path.parent / "absent"),
    "a link to itself": lambda path, harm: path.symlink_to(path),
    "a link to its folder": lambda path, harm: path.symlink_to(path.parent),
    "a link to another file": _other_file,
    "a link to an endless device": lambda path, harm: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, harm: os.mkfifo(path),
    "a terabyte of nothing": _sparse,
    "a pickle": lambda path, harm: path.write_bytes(pickle.dumps(Payload(harm))),
}
DAMAGES = [*BYTES, *KINDS]


def damage_file(path: Path, draw: random.Random, *, harm: Path) -> str:
    """Changes, removes or replaces a file by an entry of another kind; returns what was done."""
    name = draw.choice(DAMAGES)
    if name in BYTES:
        path.write_bytes(BYTES[name](path.read_bytes(), draw))
        return name
    path.unlink()
    KINDS[name](path, harm)
    return name


def damaged_copy(folder: Path, target: Path, seed: str, number: int, *, only: str = "") -> str:
    """Makes `target` a copy of a folder with damage to one of its files; returns what was done.

    Consecutive numbers damage all files in turn, or all whose path contains `only`. A pickle in the place of
    a file would create the file HARM beside `target`.
    """
    draw = draw_for(seed, number)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if only in str(path)]
    random.Random(seed).shuffle(files)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target, symlinks=True)
    name = files[number % len(files)]
    return f"{name}: {damage_file(target / name, draw, harm=target.parent / 'HARM')}"


VALUES = [
    None, True, False, 0, -1, 1, 2, 7, 10**12, -(10**12), 10**400, 0.5, -0.5, 1e30, 1e-300, float("nan"),
    float("inf"), "", "x", "64", "\ud800", "a" * 5000, [], [1, "x"], [[]], {}, {"model_dim": 3},
]  # fmt: skip


def endless() -> list[Any]:
    """A list that holds itself twice, which only a pickle can say."""
    value: list[Any] = []
    value += [value, value]
    return value


def mutate(values: dict[str, Any], draw: random.Random, possible: Sequence[Any] = VALUES) -> dict[str, Any]:
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
            node[f"{name}s"] = draw.choice(possible)
        elif change < 0.4 and type(node[name]) in (int, float):
            node[name] = draw.choice([node[name] + 1, node[name] - 1, -node[name], 2 * node[name]])
        else:
            node[name] = draw.choice(possible)
        if not node:
            node["x"] = 1
    return values


def mutate_json(path: Path, draw: random.Random) -> str:
    path.write_text(json.dumps(mutate(json.loads(path.read_bytes()), draw)), encoding="utf-8")
    return f"{path.name}: mutated"
