"""Docstrings and comments name functions, fields and files that exist."""

import ast
import io
import re
import tokenize

from tools.pages import ROOT

# Names of parameters of all layers, and tags of a style.
_PATTERNS = {"layers_N", "__de__"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def read_names(source: str) -> tuple[set[str], list[str]]:
    """The names in a file, those in strings included; and its comments and docstrings."""
    names, texts = set[str](), []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            names.add(token.string)
        elif token.type == tokenize.COMMENT:
            texts.append(token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED):
            texts.append(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            names.update(str(node.value).split("."))
    return names, texts


def test_docstrings_and_comments_name_what_exists():
    names, texts = set[str](), []
    for file in sorted((ROOT / "flaxformer_mt").rglob("*.py")):
        own, comments = read_names(file.read_text(encoding="utf-8"))
        names |= own
        texts += [(file.relative_to(ROOT), text) for text in comments]
    files = {file.name for file in ROOT.rglob("*.py")}
    stale = [
        (str(file), name)
        for file, text in texts
        for name in re.findall(r"`(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)`", text)
        if name not in names | _PATTERNS | {"py"}
    ]
    stale += [
        (str(file), name)
        for file, text in texts
        for name in re.findall(r"\b[a-z]\w*\.py\b", text)
        if name not in files
    ]
    assert not stale
