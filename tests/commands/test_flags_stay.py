"""Flags are an interface: those that --help had on 26 November 2026 (3f607c4) are still there.

A flag that goes has an entry in config/removed.py, which says why and what to use.
"""

import contextlib
import dataclasses
import re
from pathlib import Path

from flaxformer_mt.commands.flag_parser import list_flag_types
from flaxformer_mt.commands.help_layout import _read_own_comments
from flaxformer_mt.commands.main import COMMANDS
from flaxformer_mt.config.removed import refuse_removed_flag
from flaxformer_mt.errors import UserError


def read_old_flags() -> set[tuple[str, str]]:
    text = (Path(__file__).parent / "flags_of_3f607c4.txt").read_text(encoding="utf-8")
    listed = {name: flags.split() for name, flags in re.findall(r"^(\w+): ((?:.|\n )+)", text, re.M)}
    fields = [f"config.{field}" for field in listed.pop("config")]
    return {
        (command, f"--{flag}")
        for command, flags in listed.items()
        for name in flags
        for flag in (fields if name == "config.*" else [name])
    }


def test_no_flag_is_lost_but_those_that_say_what_to_use():
    old = read_old_flags()
    assert len(old) > 1000 and ("translate", "--beam_size") in old and ("show", "--config.seed") in old
    present = {
        (command, flag) for command, facts in COMMANDS.items() for flag in list_flag_types(facts.options)
    }
    for flag in {flag for _, flag in old - present}:
        with contextlib.suppress(UserError):  # it was not at its default
            assert refuse_removed_flag(flag, "?"), flag


def test_an_option_that_several_commands_have_is_declared_once():
    places: dict[tuple[str, str], str] = {}
    for command in COMMANDS.values():
        for kind in command.options.__mro__:
            if not dataclasses.is_dataclass(kind) or "DECLARED_IN" in kind.__dict__:
                continue
            for name, comment in _read_own_comments(kind).items():
                place = places.setdefault((name, comment.text), kind.__qualname__)
                assert place == kind.__qualname__ or name in ("run", "output"), (name, place, kind)
    assert len(places) > 100
