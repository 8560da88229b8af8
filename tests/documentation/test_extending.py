"""The worked examples of docs/extending.md, executed in the modules that they extend."""

import re
from types import SimpleNamespace

import numpy as np
from tools.pages import ROOT

from flaxformer_mt.config import CleanConfig
from flaxformer_mt.corpus import pair_checks

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


def run_part(begin: str, end: str, module: object = None) -> dict:
    """Execute the part of the page from one line up to another, with the names of a module."""
    (text,) = re.findall(rf"^{re.escape(begin)}.*?(?=^{re.escape(end)})", PAGE, re.S | re.M)
    names = dict(vars(module)) if module else {}
    exec(compile(text, "docs/extending.md", "exec"), names)
    return names


def test_the_cleaning_rule_finds_questions_on_one_side():
    find = run_part("def find_questions", "RULES", pair_checks)["find_questions_on_one_side"]
    texts = (["Wer? ", "Gut.", "Wo?"], ["Who?", "Good?", "Here."])
    block = SimpleNamespace(texts=texts, first_side=0, lengths=np.ones((3, 2)))
    assert find(block, CleanConfig()).tolist() == [-1, 0, 0]


def test_the_step_is_that_of_the_package():
    (example,) = re.findall(r"^class CopiedText.*?(?=^# flaxformer_mt/translation/steps)", PAGE, re.S | re.M)
    code = (ROOT / "flaxformer_mt" / "translation" / "copied_text.py").read_text(encoding="utf-8").split("\n")
    assert all(line in code for line in example.split("\n") if line.strip() != "...")
