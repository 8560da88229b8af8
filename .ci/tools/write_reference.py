"""Writes docs/reference/: the flags, fields, extras and the Python API, as Markdown made from the code.

    PYTHONPATH=.ci:. python -m tools.write_reference

Run it after a change of a flag, a field, an extra or a public docstring; a test compares pages and code.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator

from tools.pages import ROOT

from flaxformer_mt.commands.doctor import EXTRAS
from flaxformer_mt.commands.flag_parser import takes_config
from flaxformer_mt.commands.help_layout import FlagHelp, list_flags, list_sections, list_settings
from flaxformer_mt.commands.main import COMMANDS
from flaxformer_mt.config import Config
from flaxformer_mt.config.foreign_names import FOREIGN_NAMES

# What the page of the API shows: module.NAME, or module.NAME[members].
API = {
    "Config": ("config.files.load_config", "config.schema.Config[replace]"),
    "Training": (
        "training.loop.fit",
        "training.initial_model.start_run",
        "training.final_report.TrainingReport",
    ),
    "Translation": (
        "translation.translator.Translator[load,translate,translate_stream,with_search,warm_up,engine]",
        "translation.translator.TranslationOptions",
        "config.load_options.LoadOptions",
        "translation.result.Translation",
        "translation.result.Annotations",
        "translation.glossary.Glossary[read,load,make,find]",
        "translation.requests.Request",
        "translation.engine.Engine[submit,cancel,step]",
    ),
    "Scoring and language models": (
        "translation.scorer.Scorer[load,score,score_stream,score_tokens]",
        "decoding.forced_decoding.PairScore",
        "translation.scorer.generate_text",
        "translation.scorer.GeneratedText",
    ),
    "Evaluation": (
        "evaluation.evaluate.evaluate_run",
        "evaluation.evaluate.EvaluationOptions",
        "evaluation.evaluate.EvaluationResult",
        "scoring.significance.ResamplingOptions",
        "translation.define_scorer.define_scorer",
    ),
    "Export and import": (
        "convert.export_run.export_run",
        "convert.export_run.ExportResult",
        "convert.import_run.import_run",
        "convert.import_run.ImportResult",
        "convert.huggingface.new_languages.NewVocabulary",
    ),
    "Errors and warnings": (
        "errors.UserError",
        "errors.TrainingInterrupted",
        "errors.FlaxformerWarning",
    ),
}
_SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
_HEADER = "<!-- Written by .ci/tools/write_reference.py from the code: do not edit. -->\n\n"


def write_pages() -> dict[str, str]:
    """Return the text of each page, by its path from the root."""
    pages = {"api": _api(), "commands": _commands(), "configuration": _fields(), "extras": _extras()}
    return {f"docs/reference/{name}.md": f"{_HEADER}{text}\n" for name, text in pages.items()}


def _commands() -> str:
    parts = ["# Flags of each command", "[What each command does](../commands.md), with examples."]
    for name, command in COMMANDS.items():
        words = "".join(f" [{word.upper()}]" for word in command.words)
        parts += [f"## {name}", f"`flaxformer-mt {name}{words} [FLAGS]`", _escape(command.summary)]
        flags = list(list_flags(command.options))
        for group in dict.fromkeys(flag.group for flag in flags):
            parts += [f"**{group.capitalize()}**", _list([f for f in flags if f.group == group])]
        if takes_config(command.options):
            parts.append("Also each [config field](configuration.md), as `--config.SECTION.FIELD=VALUE`.")
    return "\n\n".join(parts)


def _fields() -> str:
    config = Config()
    parts = [
        "# Config fields",
        "[Training](../training.md#config-files) shows how to write a config. Each field is also a flag. "
        "*Elsewhere* lists what other toolkits call a field ([versions](../migrating.md#options)).",
    ]
    parts += ["## seed", _list(list_settings(config, "config"))]
    for name, section in list_sections(config):
        title = " ".join((inspect.getdoc(type(section)) or "").split())
        parts += [f"{'##' if '.' not in name else '###'} {name}", _escape(title)]
        parts.append(_list(list_settings(section, f"config.{name}")))
    return "\n\n".join(parts)


def _list(flags: Iterable[FlagHelp]) -> str:
    return "\n".join(f"* `{flag.flag}`: {_escape(flag.text)}{_list_names(flag)}" for flag in flags)


def _list_names(flag: FlagHelp) -> str:
    """Return what other toolkits call a field of the config."""
    names = FOREIGN_NAMES.get(flag.flag.partition("=")[0].removeprefix("--config."), "").split()
    return f" Elsewhere: {', '.join(f'`{name}`' for name in names)}." if names else ""


def _extras() -> str:
    rows = [f"| `{name}` | {use} | {', '.join(packages)} |" for name, (use, packages) in EXTRAS.items()]
    title = "# Extras\n\nOptional packages: `pip install '.[NAME,NAME]'` ([Install](../install.md)).\n"
    return "\n".join([title, "| extra | for | main packages |", "|---|---|---|", *rows])


def _api() -> str:
    parts = ["# Python API: signatures", "[Examples of all of them](../api.md), as one program."]
    for title, names in API.items():
        parts.append(f"## {title}")
        for name in names:
            path, _, members = name.rstrip("]").partition("[")
            module, _, attribute = path.rpartition(".")
            parts += _describe(module, attribute, [member for member in members.split(",") if member])
    return "\n\n".join(parts)


def _describe(module: str, name: str, members: list[str]) -> Iterator[str]:
    """Yield the paragraphs of a function, or of a class with its fields and some of its methods."""
    path = ROOT / "flaxformer_mt" / f"{module.replace('.', '/')}.py"
    source = path.read_text(encoding="utf-8")
    (node,) = [one for one in ast.parse(source).body if getattr(one, "name", "") == name]
    if isinstance(node, ast.FunctionDef):
        yield from _function(node, f"### {name}", name)
        return
    assert isinstance(node, ast.ClassDef), f"{path}: {name} is no function or class"
    yield f"### {name}"
    yield from _docstring(node)
    bases = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)}
    if fields := _list_all_fields(node, source, bases):
        yield "\n".join(fields.values())
    for member in members:
        (method,) = [
            one
            for one in node.body
            if isinstance(one, ast.FunctionDef) and one.name == member and not _is_overload(one)
        ]
        yield from _function(method, f"#### {name}.{member}", f"{name}.{member}", method=True)


def _function(node: ast.FunctionDef, heading: str, name: str, *, method: bool = False) -> Iterator[str]:
    yield heading
    arguments = ast.parse(ast.unparse(node)).body[0].args  # type: ignore[attr-defined]
    if method and arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args.pop(0)
    # An argument with a type has spaces around the sign of its default.
    each = filter(None, _split_arguments(ast.unparse(arguments)))
    parts = [re.sub(r"(: [^=]+)=", r"\1 = ", part) for part in each]
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    short = f"{name}({', '.join(parts)}){result}"
    long = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){result}"
    yield f"```\n{short if len(short) <= 100 else long}\n```"
    yield from _docstring(node)


def _split_arguments(text: str) -> list[str]:
    """Split at the commas outside of brackets: "a: dict[str, int], b" is two arguments."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _is_overload(node: ast.FunctionDef) -> bool:
    return any(getattr(decorator, "id", "") == "overload" for decorator in node.decorator_list)


def _list_all_fields(node: ast.ClassDef, source: str, bases: dict[str, ast.ClassDef]) -> dict[str, str]:
    """Return the fields of a class by name, those of its base classes in the same file first."""
    fields: dict[str, str] = {}
    for base in (bases.get(getattr(base, "id", "")) for base in reversed(node.bases)):
        fields |= _list_all_fields(base, source, bases) if base else {}
    return fields | dict(_list_fields(node, source))


def _list_fields(node: ast.ClassDef, source: str) -> Iterator[tuple[str, str]]:
    """Yield the public fields of a class with what its docstring, or the comments above them, say of them."""
    listed = (ast.get_docstring(node) or "").partition("Attributes:\n")[2]
    texts = dict(entry.partition(": ")[::2] for entry in _join_entries(listed))
    fields = {
        one.lineno: (one.target.id, one)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    comments = list[str]()
    for number, line in enumerate(source.split("\n")[: node.end_lineno], start=1):
        if comment := re.match(r"    # (.*)$", line):
            comments.append(comment[1])
            continue
        name, one = fields.get(number, ("_", None))
        if one is not None and not name.startswith("_"):
            default = f" = {ast.unparse(one.value)}" if one.value else ""
            text = texts.get(name, " ".join(comments))
            kind = re.sub(r"^Annotated\[([^,]+|tuple\[[^\]]+\]), .*\]$", r"\1", ast.unparse(one.annotation))
            yield name, f"* `{name}: {kind}{default}`" + (f": {_escape(text)}" if text else "")
        comments = []


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> Iterator[str]:
    """Yield the paragraphs of a docstring; its sections become lists."""
    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
        first, _, rest = paragraph.partition("\n")
        if first.rstrip(":") in _SECTIONS and first.endswith(":"):
            if first != "Attributes:":  # which are the fields, listed with their types
                yield f"**{first.rstrip(':')}**"
                yield "\n".join(map(_format_entry, _join_entries(rest)))
        elif paragraph.startswith("    ") or "\n    " in paragraph:
            yield f"```\n{inspect.cleandoc(paragraph)}\n```"
        else:
            yield _escape(" ".join(paragraph.split()))


def _join_entries(text: str) -> list[str]:
    """Return the entries of a section of a docstring, each as one line."""
    entries = list[str]()
    for line in filter(None, text.split("\n")):
        if re.match(r"  \S", line) or not entries:
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    return entries


def _format_entry(entry: str) -> str:
    name, colon, rest = entry.partition(": ")
    named = colon and re.fullmatch(r"[\w, .*]+", name)
    return f"* `{name}`: {_escape(rest)}" if named else f"* {_escape(entry)}"


def _escape(text: str) -> str:
    """Escape what Markdown would read, outside of `code`: <BT>, *_embedding, [B, T]."""
    parts = re.split(r"(`[^`]+`)", text)
    marks = r"([*\[\]]|(?<!\w)_|_(?!\w))"
    return "".join(
        part if part.startswith("`") else re.sub(marks, r"\\\1", part).replace("<", "&lt;") for part in parts
    )


def main() -> None:
    for path, text in write_pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
