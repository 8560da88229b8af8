"""The structure of the package: order of imports, one importer per heavy dependency, form of files."""

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

# From the lowest layer up. A wing (a folder, or a loose file) imports only from layers below its own; wings
# of one layer do not import each other.
LAYERS = [
    {"errors"},
    {"shapes", "parameter_trees", "processor", "unicode_text", "atomic_file", "file_lock", "yaml_reader"},
    {"config"},
    {"flops", "vocab", "tracking", "object_store", "workers", "scoring"},
    {"atomic_folder"},
    {"parallel"},
    {"kernels"},
    {"losses"},
    {"model", "search"},
    {"corpus"},
    {"runs"},
    {"data"},
    {"text_io"},
    {"decoding"},
    {"translation"},
    {"convert"},
    {"evaluation"},
    {"training"},
    {"commands"},
    {"__main__"},
]

# Heavy dependency -> the only folder that imports it.
DOORS = {
    "torch": "convert",
    "transformers": "convert.huggingface",
    "ctranslate2": "convert.ctranslate2",
    "ray": "workers",
    "matplotlib": "evaluation",
    "tensorflow_datasets": "corpus",
    "tensorflow": None,
    "pickle": None,
}

# Files of convert/ that are imported whatever the format is; the others bring the foreign system along.
COMMON_TO_ALL_FORMATS = {
    "__init__",
    "export_run",
    "foreign_files",
    "formats",
    "hub_store",
    "import_run",
    "name_table",
    "parity_check",
    "sentencepiece_file",
}

# Wing -> wings that it must not import.
WALLS = {"search": {"vocab"}}


def wing_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    """The module's name inside the package: `training.loop`, and `config` for config/__init__.py."""
    return ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def names_in(node: ast.AST) -> set[str]:
    """Dotted names that a statement imports: `from a.b import c` gives a.b.c."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"from .{node.module or ''}: say from flaxformer_mt..."
        return {f"{node.module}.{alias.name}" for alias in node.names}
    return set()


TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
# Dotted names that each file imports anywhere in it.
IMPORTS = {file: set().union(*map(names_in, ast.walk(tree))) for file, tree in TREES.items()}


def wings_imported_by(file: Path) -> set[str]:
    """Without the version, a string that the package's __init__ defines."""
    own = {name.split(".")[1] for name in IMPORTS[file] if name.startswith("flaxformer_mt.")}
    return own - {wing_of(file), "__version__"}


def layer_of(wing: str) -> int:
    return next(number for number, wings in enumerate(LAYERS) if wing in wings)


def test_every_wing_has_one_layer():
    wings = {wing_of(file) for file in FILES} - {"__init__"}
    listed = list(itertools.chain(*LAYERS))
    assert wings == set(listed), "name each wing's layer in LAYERS, and only wings that exist"
    assert len(listed) == len(set(listed))


def test_imports_go_down():
    """The package's own __init__ is left out: its imports are for type checkers; names load lazily."""
    for file in FILES:
        if file == PACKAGE / "__init__.py":
            continue
        own = layer_of(wing_of(file))
        wrong = {wing for wing in wings_imported_by(file) if layer_of(wing) >= own}
        assert not wrong, f"{module_of(file)} is in layer {own}, not above {wrong}"


def test_no_cycles():
    modules = {f"flaxformer_mt.{module_of(file)}": file for file in FILES if file.parent != PACKAGE}
    modules |= {
        f"flaxformer_mt.{file.stem}": file for file in PACKAGE.glob("*.py") if file.stem != "__init__"
    }

    def needed(name: str) -> set[str]:
        wanted = {want if want in modules else want.rpartition(".")[0] for want in IMPORTS[modules[name]]}
        return wanted & modules.keys() - {name}

    graph = {name: needed(name) for name in modules}
    while graph:
        leaves = {name for name, wanted in graph.items() if not wanted & graph.keys()}
        assert leaves, f"a cycle among {sorted(graph)}"
        graph = {name: wanted for name, wanted in graph.items() if name not in leaves}


def test_one_folder_imports_each_heavy_dependency():
    for dependency, folder in DOORS.items():
        for file in FILES:
            if any(name.split(".")[0] == dependency for name in IMPORTS[file]):
                module = module_of(file)
                inside = folder is not None and module.startswith(f"{folder}.")
                assert inside, f"{module} imports {dependency}; only {folder} may"


def test_walls():
    for wing, forbidden in WALLS.items():
        known = set().union(*(wings_imported_by(file) for file in FILES if wing_of(file) == wing))
        assert not known & forbidden, f"{wing} imports {known & forbidden}"


def test_the_model_knows_no_platform():
    """What differs by platform is in kernels/, and devices are in parallel/: the model gets a table."""
    for file in FILES:
        if wing_of(file) in ("model", "search", "losses"):
            names = {node.attr for node in ast.walk(TREES[file]) if isinstance(node, ast.Attribute)}
            names |= {node.id for node in ast.walk(TREES[file]) if isinstance(node, ast.Name)}
            devices = {"default_backend", "devices", "local_devices", "device_kind", "Mesh", "shard_map"}
            tricks = {"optimization_barrier", "platform_dependent", "bitcast_convert_type", "PartitionSpec"}
            assert not names & (devices | tricks), file


def test_no_program_depends_on_a_hidden_context():
    """What a traced function needs is an argument; the mesh is that of JAX's own context."""
    for file in FILES:
        imported = {name.split(".")[0] for name in IMPORTS[file]}
        assert "contextvars" not in imported, file
        calls = {node.attr for node in ast.walk(TREES[file]) if isinstance(node, ast.Attribute)}
        assert "platform_dependent" not in calls, f"{file}: choose_kernels knows the platform"


def test_one_function_counts_the_cores():
    for file, tree in TREES.items():
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found = names & {"sched_getaffinity", "cpu_count", "process_cpu_count"}
        assert not found or module_of(file) == "processor", f"{file}: core_count knows, not {found}"


def test_config_imports_the_standard_library_alone():
    for file in (PACKAGE / "config").glob("*.py"):
        found = {name.split(".")[0] for name in IMPORTS[file]}
        assert found <= sys.stdlib_module_names | {"flaxformer_mt"}, file


def test_no_junk_drawers():
    assert not {file.stem for file in FILES} & {"utils", "util", "helpers", "common", "misc", "base"}


def test_no_shortcuts():
    for file, tree in TREES.items():
        text = file.read_text(encoding="utf-8")
        unwanted = r"\bTODO\b|\bFIXME\b|\bXXX\b|NotImplementedError|from __future__ import annotations"
        assert not re.search(unwanted, text), file
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{file}: a bare except"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "splitlines", (
                    f"{file}: splitlines breaks lines at U+0085 and others; split on \\n"
                )


def test_only_commands_print_and_exit():
    shows = {
        "text_io.throughput",
        "tracking",
        "parallel.processes",
        "convert.torch.modeling",
    }  # on streams given
    for file, tree in TREES.items():
        if wing_of(file) in ("commands", "__main__") or module_of(file) in shows:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert any(word.arg == "file" for word in node.keywords), f"{file}:{node.lineno} prints"
            names = {node.id} if isinstance(node, ast.Name) else set()
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            assert not names & {"SystemExit", "exit", "_exit", "execve", "execv"}, f"{file}:{node.lineno}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_the_package_and_the_command_line_loads_nothing_heavy():
    out = run_python(
        "import sys, flaxformer_mt.commands.main; from flaxformer_mt import Config, load_config; "
        "print(*{'tensorflow', 'torch', 'jax', 'flax', 'numpy'} & set(sys.modules))"
    )
    assert not out.split(), "the command line loads what its commands need when they run"
    assert not run_python("import sys, flaxformer_mt; print(*{'rich', 'json'} & set(sys.modules))").split()


def test_no_module_loads_tensorflow_torch_or_slow_dependencies():
    """All modules together, but for TFDS builders and foreign formats, imported when one is asked for."""
    slow = {"tensorflow", "torch", "tensorflow_datasets", "orbax", "matplotlib"}
    modules = []
    for file, tree in TREES.items():
        top = {name.split(".")[0] for node in tree.body for name in names_in(node)}
        builder = wing_of(file) == "corpus" and "tensorflow_datasets" in top
        late = builder or (wing_of(file) == "convert" and file.stem not in COMMON_TO_ALL_FORMATS)
        # Imported where they are needed, if their extras are there.
        late |= module_of(file) in ("commands.server.app", "workers.ray_actors")
        late |= module_of(file).startswith("tracking.") and file.stem.endswith("_run")
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
    assert text.count("\n") <= 130
    for block in shell_blocks():
        for command in re.findall(r"flaxformer-mt (\w+)", block):
            assert command in COMMANDS
        for recipe in re.findall(r"(?:--config=|flaxformer-mt train )(\w+)\s", block):
            assert any(
                (ROOT / folder / name).is_file()
                for folder in ("", "configs")
                for name in (recipe, f"{recipe}.py")
            ), recipe


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").split("\n")
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
def test_pins_are_exact_and_inside_the_declared_ranges(python):
    """Each Python takes one pin of each package."""
    declared = {r.name: r for r in map(Requirement, project()["project"]["dependencies"])}
    taken = [
        r
        for r in pins("requirements.txt")
        if r.marker is None or r.marker.evaluate({"python_version": python})
    ]
    chosen = {r.name: r for r in taken}
    assert declared.keys() == chosen.keys() and len(taken) == len(chosen)
    for name, pin in chosen.items():
        (exact,) = pin.specifier
        assert exact.operator == "==" and exact.version in declared[name].specifier, pin
    for name, required in {"test": "requirements-test.txt", "docs": "requirements-docs.txt"}.items():
        extra = {r.name: r for r in map(Requirement, project()["project"]["optional-dependencies"][name])}
        for pin in pins(required):
            assert pin.name in extra and next(iter(pin.specifier)).version in extra[pin.name].specifier, pin


def test_torch_reads_foreign_weights_safely():
    """Before 2.10, weights_only=True, which `import` relies on, corrupts memory (CVE-2026-24747)."""
    for extra in project()["project"]["optional-dependencies"].values():
        assert not any("2.9.1" in r.specifier for r in map(Requirement, extra) if r.name == "torch")


def test_the_images_install_what_is_pinned_with_hashes():
    for name in ("requirements.lock", "requirements-cuda.lock"):
        entries = re.split(r"\n(?=\S)", (ROOT / name).read_text(encoding="utf-8").partition("\n\n")[0])
        locked = {}
        for entry in entries:
            if not entry.startswith("#"):
                requirement, *hashes = entry.split(" \\\n    --hash=sha256:")
                assert hashes and all(re.fullmatch(r"[0-9a-f]{64}\s*", one) for one in hashes), entry[:80]
                pin = Requirement(requirement)
                locked.setdefault(pin.name.lower().replace("_", "-"), set()).add(str(pin.specifier))
        wanted = [*pins("requirements.txt"), *pins("requirements-image.txt")]
        for pin in wanted:
            assert str(pin.specifier) in locked[pin.name.lower().replace("_", "-")], (name, pin)
        image = ROOT / ("Dockerfile.cuda" if "cuda" in name else "Dockerfile")
        assert f"--require-hashes --requirement={name}" in image.read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {"cache", "exported", "dist", "build", ".env*"} <= set(ignored), "no image has them"
    served = {pin.name: str(pin.specifier) for pin in pins("requirements-image.txt")}
    tested = {pin.name: str(pin.specifier) for pin in pins("requirements-test.txt")}
    assert all(tested[name] == pin for name, pin in served.items() if name != "setuptools")


def test_doctor_and_pyproject_agree_on_what_is_needed():
    from flaxformer_mt.commands.doctor import EXTRAS, REQUIRED

    metadata = project()["project"]
    assert REQUIRED.keys() == {Requirement(line).name for line in metadata["dependencies"]}
    extras = metadata["optional-dependencies"]
    other_names = {name for name, lines in extras.items() if lines[0].startswith("flaxformer-mt[")}
    assert EXTRAS.keys() == extras.keys() - other_names
    for name in other_names:
        (same,) = Requirement(extras[name][0]).extras
        assert same in EXTRAS


def test_the_wheel_holds_every_folder():
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in FILES if file.name == "__init__.py"}
    listed = project()["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders | {"flaxformer_mt.configs"})


def test_what_is_installed_is_what_is_pinned():
    """Scores in the documents were made with these versions."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    for pin in pins("requirements.txt"):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert importlib.metadata.version(pin.name) in pin.specifier


def test_each_test_file_holds_a_promise_that_the_readme_of_the_tests_names():
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+(?:/|\.py))`", "".join(re.findall(r"^\|.*", page, re.M)))
    files = [path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")]
    names = {path.name for path in files} | {path.name for path in (ROOT / "fuzz").glob("*.py")}
    for name in named:
        known = (ROOT / "tests" / name).is_dir() or (ROOT / name).exists() or Path(name).name in names
        assert known, f"tests/README.md names {name}, which is gone"
    for file in files:
        folders = [f"{folder.as_posix()}/" for folder in file.parents]
        assert {*folders, file.name, file.as_posix()} & {*named, *(Path(name).name for name in named)}, file
