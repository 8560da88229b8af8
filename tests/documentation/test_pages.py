"""Every command of README.md and docs/ is one that `run_pages.py` runs, or is marked in its page."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
from tools import run_pages
from tools.pages import ROOT, find_hidden_commands, find_pages, read_blocks, split_commands

import flaxformer_mt
import flaxformer_mt.config


def write_page(folder, text: str) -> str:
    (folder / "page.md").write_text(text, encoding="utf-8")
    return "page.md"


def test_every_command_of_the_pages_is_known():
    pages = find_pages()
    assert len(pages) > 12
    commands = {}
    for page in pages:
        assert not list(find_hidden_commands(page)), "put commands into ```sh blocks, which run_pages.py runs"
        for block in read_blocks(page):
            if block.kind == "sh":
                commands |= {(page, command.text): block.needs for command in split_commands(block)}
            if block.kind == "python" and not block.needs:
                ast.parse(block.text)
    assert len(commands) > 30
    assert sum(not needs for needs in commands.values()) > 25
    for rule in run_pages.ADDED:
        matching = [
            text for (page, text), needs in commands.items() if not needs and rule.matches(page, text)
        ]
        assert matching, f"no command of {rule.page} is {rule.command}"
    assert set(run_pages.GIVEN) <= set(pages) and run_pages.ONE_PROGRAM <= set(pages)


def test_commands_outside_of_blocks_and_blocks_of_other_kinds_are_found(tmp_path):
    hidden = (
        "text\n\n    PYTHONPATH=. python x.py --a\n\n```\n$ .venv/bin/python -m flaxformer_mt doctor\n```\n"
    )
    found = list(find_hidden_commands(write_page(tmp_path, hidden), tmp_path))
    assert [line.partition(": ")[0] for line in found] == ["page.md:3", "page.md:6"]
    for text, message in (("```bash\nls\n```\n", "a block of bash"), ("```sh\nls\n", "a block without end")):
        with pytest.raises(ValueError, match=f"page.md:1: {message}"):
            read_blocks(write_page(tmp_path, text), tmp_path)


def test_a_command_fails_by_its_status_and_by_a_traceback(tmp_path):
    tree = run_pages.Tree(tmp_path, python=sys.executable)
    commands = {
        "echo fine": "",
        "echo bad; exit 3": "status 3",
        "echo 'Traceback (most recent call last)'": "a traceback",
    }
    for number, (text, problem) in enumerate(commands.items(), start=7):
        command = run_pages.Command("docs/page.md", number, text)
        if not problem:
            assert tree.run(command) == "fine\n"
            continue
        with pytest.raises(run_pages.PageError, match=rf"^docs/page.md:{number}: {problem}") as raised:
            tree.run(command)
        assert text in str(raised.value) and re.search("^bad$|^Traceback", str(raised.value), re.M)


def test_a_list_of_the_commands_is_printed_without_running_them():
    command = [str(ROOT / ".ci" / "docs"), "--list", "docs/parallel.md", "README.md"]
    environment = {**os.environ, "PYTHON": sys.executable}
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.search(
        r"^docs/parallel.md:\d+ not run: Needs another machine: .*\n    srun flaxformer-mt train", out, re.M
    )
    assert re.search(r"^README.md:\d+\n    python3 -m venv .venv && .*train.py$", out, re.M)
    assert re.search(r"-m pytest -q\n    as .* -m pytest -q --collect-only\n", out)
    assert (
        run_pages.add_words("a --b  # c", ["--d"]) == "a --b --d  # c"
        and run_pages.add_words("a", ["b"]) == "a b"
    )


def test_the_site_is_built_by_the_commands_of_a_page():
    build = [step.command.text for step in run_pages.plan_site()]
    assert [line.split()[-1] for line in build] == ["requirements-docs.txt", "--strict"]
    assert not any(step.left_out for step in run_pages.plan_site())


def test_every_page_is_in_the_navigation_of_the_site():
    """mkdocs itself reports pages that are missing; the tests do so without mkdocs."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (?:[^:\n]+: )?([\w-]+\.(?:md|ipynb))$", nav, re.M)
    assert len(listed) == len(set(listed))
    beside = {"changelog.md", "contributing.md", "testing.md"}
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert set(listed) - beside == pages


def test_the_notebook_has_small_outputs_of_one_execution():
    path = ROOT / "docs" / "notebook.ipynb"
    assert path.stat().st_size < 400_000
    code = [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    assert len(code) > 5
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])
    for cell in code:
        text = json.dumps(cell["outputs"])
        assert '"output_type": "error"' not in text and not re.search("/(root|home|tmp)/|Traceback", text)


def test_links_and_pictures_of_the_pages_exist():
    for page in find_pages():
        for target in re.findall(r"\]\(([\w./-]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_variable_of_the_package_is_on_the_page_of_variables():
    sources = [path for path in ROOT.rglob("flaxformer_mt/**/*.py")] + list(ROOT.glob("Dockerfile*"))
    used = {
        name for path in sources for name in re.findall(r"FLAXFORMER_MT_[A-Z_]+", path.read_text("utf-8"))
    }
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    assert used == set(re.findall(r"^\| `(FLAXFORMER_MT_[A-Z_]+)`", page, re.M)) and len(used) >= 4


def test_containers_keep_what_the_image_writes():
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (cache,) = re.findall(r"FLAXFORMER_MT_CACHE=(\S+)", image)
    work = re.findall(r"^WORKDIR (\S+)", image, re.M)[-1]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    commands = re.findall(r"^docker run .*", page, re.M)
    assert commands and all(f":{cache}" in line and f":{work}/runs" in line for line in commands)


def test_pages_for_users_import_public_names_alone():
    """What a page imports is in `__all__` of the package or, for config files, of its module of configs."""
    public = {module.__name__: set(module.__all__) for module in (flaxformer_mt, flaxformer_mt.config)}
    programs = [
        (page, block.text) for page in find_pages() for block in read_blocks(page) if block.kind == "python"
    ]
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    programs += [("docs/notebook.ipynb", cell) for cell in cells]
    imported = [
        (page, node.module, alias.name)
        for page, text in programs
        if page != "docs/extending.md"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("flaxformer_mt")
        for alias in node.names
    ]
    assert len(imported) > 10
    assert not [one for one in imported if one[2] not in public.get(one[1], ())]
