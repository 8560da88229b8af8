"""The house: who may import whom, which door leads to which dependency, and what files look like."""

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flaxformer_mt"
FILES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A room (a file, or a folder with all its files) imports only from floors below its own.
FLOORS = [
    {"errors", "manifest", "memory", "signals", "tree_paths"},
    {"config", "shapes", "lines", "checkpoint_index", "splitting"},
    {"accounting", "config_checks", "config_files", "resuming", "alignment"},
    {"options", "recipes", "run_directory", "translation"},
    {"corpus", "model", "losses", "optim", "search", "parallel", "metrics", "tracking", "vocab", "plots"},
    {"state", "data", "throughput", "source_lines", "line_sharing"},
    {"steps", "checkpoint", "progress"},
    {"trained", "search_programs", "forced_decoding", "token_budget"},
    {"search_flow"},
    {"sentence_search"},
    {"demands", "scoring"},
    {"annotation", "line_formats"},
    {"translate", "likelihood", "convert", "translation_files"},
    {"scored_set", "length_breakdown"},
    {"comparison"},
    {"evaluate", "prepare"},
    {"report", "monitor", "profiling", "validation", "sitting"},
    {"trainer", "show", "doctor", "plot", "flags", "cli_text"},
    {"cli"},
    {"__main__"},
]

# Dependency -> the rooms that may import it.
DOORS = {
    "sentencepiece": {"vocab"},
    "orbax": {"checkpoint"},
    "sacrebleu": {"metrics"},
    "tensorboardX": {"tracking"},
    "rich": {"tracking", "throughput"},
    "matplotlib": {"plots"},
    "torch": {"convert"},
    "transformers": {"convert"},
    "ctranslate2": {"convert"},
    "safetensors": {"convert"},
    "tyro": {"flags"},
    "grain": {"data"},
    "tensorflow_datasets": {"corpus"},
    "tensorflow": set(),
    "pickle": set(),
}

# Files of convert/ that are imported whatever the format is; the others bring the foreign system along.
COMMON_TO_ALL_FORMATS = {
    "__init__",
    "exporting",
    "format",
    "formats",
    "importing",
    "layouts",
    "parity",
    "table",
}

# Room -> what it must not know.
WALLS = {
    "model": {"parallel"},
    "parallel": {"model"},
    "search": {"model", "vocab"},
}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def names_in(node: ast.AST) -> set[str]:
    """Dotted names that a statement imports: `from a.b import c` gives a.b.c."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"from .{node.module or ''}: say from flaxformer_mt..."
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


def imports_of(file: Path) -> set[str]:
    """Dotted names that a file imports anywhere in it."""
    return set().union(*map(names_in, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))


def rooms_imported_by(file: Path) -> set[str]:
    own = {name.split(".")[1] for name in imports_of(file) if name.startswith("flaxformer_mt.")}
    return own - {room_of(file)}


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_has_one_floor():
    rooms = [room_of(file) for file in FILES if file.parent != PACKAGE or file.name != "__init__.py"]
    listed = list(itertools.chain(*FLOORS))
    assert set(rooms) == set(listed), "name each file's floor in FLOORS, and only files that exist"
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_down(file):
    if file == PACKAGE / "__init__.py":
        assert not rooms_imported_by(file)
        return
    wrong = {room for room in rooms_imported_by(file) if floor_of(room) >= floor_of(room_of(file))}
    assert not wrong, f"{room_of(file)} is on floor {floor_of(room_of(file))}, not above {wrong}"


def test_no_cycles():
    """File by file, since within a room files import each other freely."""
    modules = {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in FILES
    }

    def needed(name: str) -> set[str]:
        wanted = {want if want in modules else want.rpartition(".")[0] for want in imports_of(modules[name])}
        return wanted & modules.keys() - {name}

    graph = {name: needed(name) for name in modules}
    while graph:
        leaves = {name for name, wanted in graph.items() if not wanted & graph.keys()}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {name: wanted for name, wanted in graph.items() if name not in leaves}


@pytest.mark.parametrize("dependency", DOORS)
def test_one_door_for_each_dependency(dependency):
    users = {room_of(file) for file in FILES for name in imports_of(file) if name.split(".")[0] == dependency}
    assert users <= DOORS[dependency]


@pytest.mark.parametrize("room", WALLS)
def test_walls(room):
    known = set().union(*(rooms_imported_by(file) for file in FILES if room_of(file) == room))
    assert not known & WALLS[room]


def test_config_knows_nothing_of_jax():
    assert {name.split(".")[0] for name in imports_of(PACKAGE / "config.py")} <= sys.stdlib_module_names | {
        "flaxformer_mt"
    }


def test_no_junk_drawers():
    assert not {file.stem for file in FILES} & {"utils", "util", "helpers", "common", "misc", "base"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_and_functions_are_short_and_say_what_they_are(file):
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert text.count("\n") <= 400
    assert ast.get_docstring(tree) or not text
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is too long"
    for node in tree.body:
        for inner in [
            node,
            *(node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []),
        ]:
            public = isinstance(inner, ast.FunctionDef | ast.ClassDef) and not inner.name.startswith("_")
            if public and inner.name != "setup":  # Linen's own constructor
                assert ast.get_docstring(inner), f"{inner.name} has no docstring"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_shortcuts(file):
    text = file.read_text(encoding="utf-8")
    assert not re.search(
        r"\bTODO\b|\bFIXME\b|\bXXX\b|NotImplementedError|from __future__ import annotations", text
    )
    for node in ast.walk(ast.parse(text)):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), "a bare except"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "splitlines", (
                "splitlines breaks lines at U+0085 and others; split on \\n"
            )


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_is_quick_and_light():
    out = run_python(
        "import sys, time; start = time.process_time(); import flaxformer_mt, flaxformer_mt.commands.main; "
        "print(time.process_time() - start, *{'tensorflow', 'torch', 'jax', 'flax'} & set(sys.modules))"
    )
    seconds, *loaded = out.split()
    assert float(seconds) < 2
    assert not loaded, "the command line loads what its commands need when they run"


def test_no_room_loads_tensorflow_torch_or_slow_dependencies():
    """All modules together, but for TFDS builders and foreign formats, imported when one is asked for."""
    slow = {"tensorflow", "torch", "tensorflow_datasets", "grain", "orbax", "matplotlib"}
    modules = []
    for file in FILES:
        top = {name.split(".")[0] for node in ast.parse(file.read_text()).body for name in names_in(node)}
        builder = room_of(file) == "corpus" and "tensorflow_datasets" in top
        late = builder or (room_of(file) == "convert" and file.stem not in COMMON_TO_ALL_FORMATS)
        assert late or not top & slow, f"{file.name} imports {top & slow} before anyone needs it"
        if not late and file.name != "__main__.py":
            modules.append(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    # What flax loads is flax's choice: orbax, for a checkpoint format that is not ours.
    out = run_python(
        f"import flax.linen, sys; before = set(sys.modules); import {', '.join(modules)}; "
        f"print(*{slow} & (set(sys.modules) - before))"
    )
    assert out.split() == []


def shell_blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)


def test_readme_starts_with_the_job_and_the_tests():
    job, tests = shell_blocks()[:2]
    for block, end in [(job, "train.py"), (tests, "-m pytest -q")]:
        assert block.count("\n") == 1
        assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert block.rstrip("\n").endswith(f"&& .venv/bin/python {end}")


def test_readme_is_short_and_names_only_commands_and_files_that_exist():
    from flaxformer_mt.commands.main import COMMANDS

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 180
    for block in shell_blocks():
        for command in re.findall(r"-m flaxformer_mt (\w+)", block):
            assert command in COMMANDS
        for recipe in re.findall(r"--config=([\w/.]+)", block):
            assert any(
                (ROOT / folder / name).is_file()
                for folder in ("", "configs")
                for name in (recipe, f"{recipe}.py")
            ), recipe
    for target in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / target).exists(), target


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").split("\n")
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-r"))]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_pins_are_exact_and_inside_the_declared_ranges(python):
    declared = {r.name: r for r in map(Requirement, project()["project"]["dependencies"])}
    chosen = {
        r.name: r
        for r in pins("requirements.txt")
        if r.marker is None or r.marker.evaluate({"python_version": python})
    }
    assert declared.keys() == chosen.keys()
    for name, pin in chosen.items():
        (exact,) = pin.specifier
        assert exact.operator == "==" and exact.version in declared[name].specifier, pin
    extra = {r.name: r for r in map(Requirement, project()["project"]["optional-dependencies"]["test"])}
    for pin in pins("requirements-test.txt"):
        assert pin.name in extra and next(iter(pin.specifier)).version in extra[pin.name].specifier, pin


def test_each_python_takes_one_pin_of_each_package():
    for python in ("3.11", "3.12", "3.14"):
        names = [
            r.name
            for r in pins("requirements.txt")
            if r.marker is None or r.marker.evaluate({"python_version": python})
        ]
        assert len(names) == len(set(names))


def test_doctor_and_pyproject_agree_on_what_is_needed():
    from flaxformer_mt.commands.doctor import EXTRAS, REQUIRED

    metadata = project()["project"]
    assert REQUIRED.keys() == {Requirement(line).name for line in metadata["dependencies"]}
    assert EXTRAS.keys() == metadata["optional-dependencies"].keys()


def test_the_wheel_holds_every_folder():
    folders = {f"flaxformer_mt.{file.parent.name}" for file in FILES if file.name == "__init__.py"} - {
        "flaxformer_mt.flaxformer_mt"
    }
    listed = set(project()["tool"]["setuptools"]["packages"])
    assert listed == folders | {"flaxformer_mt", "flaxformer_mt.configs"}


def test_what_is_installed_is_what_is_pinned():
    """Scores in the documents were made with these versions."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for pin in pins("requirements.txt"):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert importlib.metadata.version(pin.name) in pin.specifier
