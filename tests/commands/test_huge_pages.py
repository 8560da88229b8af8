"""Settings of the C library that commands start themselves with."""

import json
import os
import platform
import subprocess
import sys

import pytest

from flaxformer_mt.commands.launch import choose_tunables, launch

PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
from flaxformer_mt.commands.launch import use_huge_pages
use_huge_pages(keep={keep})
print(json.dumps(os.environ.get("GLIBC_TUNABLES")))
"""


def test_training_keeps_its_memory_where_few_cores_share_a_heap(monkeypatch):
    for cores, kept in ((1, True), (4, True), (5, False), (64, False)):
        monkeypatch.setattr("flaxformer_mt.commands.launch.core_count", lambda cores=cores: cores)
        assert ("arena_max=1:" in choose_tunables(keep=True)) == kept
        assert choose_tunables(keep=False) == "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("words", "keep"), [(["train", "--run=x"], True), (["translate", "--run=train"], False), ([], False)]
)
def test_only_training_asks_to_keep_memory(monkeypatch, words, keep):
    asked = []

    def record(**options: bool) -> None:
        asked.append(options)
        raise KeyboardInterrupt  # instead of the command

    monkeypatch.setattr("flaxformer_mt.commands.launch.use_huge_pages", record)
    monkeypatch.setattr(sys, "argv", ["flaxformer-mt", *words])
    for arguments in (words, None):
        with pytest.raises(KeyboardInterrupt):
            launch(arguments)
    assert asked == [{"keep": keep}] * 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets the GNU C library")
@pytest.mark.parametrize(("given", "keep"), [(None, True), (None, False), ("glibc.malloc.check=0", True)])
def test_a_program_starts_again_once_unless_the_user_has_chosen(given, keep, pytestconfig):
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given is not None:
        environment["GLIBC_TUNABLES"] = given
    program = PROGRAM.format(root=str(pytestconfig.rootpath), keep=keep)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert json.loads(done.stdout) == (choose_tunables(keep=keep) if given is None else given)
