"""Completes the pages of docs/ when mkdocs builds the site: a hook, named in mkdocs.yml.

A page on GitHub is plain Markdown. A comment in it stands where the site shows what the code says:

    <!-- flags -->                      the flags of each command, as in `COMMAND --help`
    <!-- fields -->                     the fields of the config, section by section
    <!-- loading -->                    the fields of LoadOptions
    <!-- extras -->                     the extras of the package, as `doctor` describes them
    <!-- api: flaxformer_mt.X ... -->   signatures and docstrings; X[load,score]: these members

CHANGELOG.md and CONTRIBUTING.md become pages of the site, and links to other files outside docs/ become text.
"""

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from flaxformer_mt.commands.doctor import EXTRAS
from flaxformer_mt.commands.flags import takes_config
from flaxformer_mt.commands.help_layout import FlagHelp, list_flags, list_sections, list_settings
from flaxformer_mt.commands.main import COMMANDS
from flaxformer_mt.config import Config
from flaxformer_mt.config.load_options import LoadOptions

ROOT = Path(__file__).resolve().parents[2]

# Files beside docs/ -> the pages of the site that they are.
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
_LINKED = {**_PAGES, "README.md": "index.md"}

_MARKER = re.compile(r"^<!-- (\w+)(?:: ([\w.,\[\] ]+))? -->$", re.M)
_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie beside docs/."""
    for name, page in _PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        # As if it lay in docs/: the way to what is there is shorter, that to everything else begins with ../
        text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the reference in the place of its comments, and mend links that leave docs/."""

    def insert(match: re.Match[str]) -> str:
        kind, name = match[1], match[2] or ""
        if kind not in _KINDS:
            raise PluginError(f"{page.file.src_uri}: {match[0]}: no such comment ({', '.join(_KINDS)})")
        return f"\n{_KINDS[kind](name, markdown)}\n"

    return _LINK_OUT.sub(_mend_link, _MARKER.sub(insert, markdown))


def on_page_content(content: str, **_: Any) -> str:
    """Keep flags in running text, such as --config.data.dataset, from being broken after their dashes."""

    def keep(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        return re.sub(r"(?<![\w-])--[\w.-]{1,32}", r'<span class="flag">\g<0></span>', match[0])

    return re.sub(r"<pre.*?</pre>|<code>([^<]*)</code>", keep, content, flags=re.S)


def _mend_link(match: re.Match[str]) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    return f"[{text}]({_LINKED[target]}{anchor})" if target in _LINKED else text


def _flags(_: str, page: str) -> str:
    """Return the flags of each command under a heading of its name, which a section of the page may
    have as well.
    """
    taken = re.findall(r"^## (\S+)$", page, re.M)
    parts = []
    for name, command in COMMANDS.items():
        flags = list(list_flags(command.options))
        words = "".join(f" [{word.upper()}]" for word in command.words)
        parts += [
            f"### {name} {{ #{'flags-of-' if name in taken else ''}{name} }}",
            f"`flaxformer-mt {name}{words} [FLAGS]`",
            command.summary,
        ]
        for group in dict.fromkeys(flag.group for flag in flags):
            chosen = [flag for flag in flags if flag.group == group]
            parts += [f"**{group.capitalize()}**", _definitions(chosen, anchor=f"{name}.")]
        if takes_config(command.options):
            parts.append("And each [field of the config](configuration.md): `--config.SECTION.FIELD=VALUE`.")
    return "\n\n".join(parts)


def _fields(_: str, page: str) -> str:
    """Return the fields of the config under a heading for each section."""
    config = Config()
    parts = ["## Outside of sections", _definitions(list_settings(config, "config"))]
    for name, section in list_sections(config):
        title = " ".join((type(section).__doc__ or "").split())
        parts.append(f"{'#' * (2 + name.count('.'))} {name}")
        parts.append(f"<p>{html.escape(title)}</p>")
        parts.append(_definitions(list_settings(section, f"config.{name}")))
    return "\n\n".join(parts)


def _loading(_: str, page: str) -> str:
    fields = (field._replace(flag=field.flag[4:]) for field in list_settings(LoadOptions(), "."))
    return _definitions(fields, anchor="LoadOptions.")


def _definitions(flags: Iterable[FlagHelp], *, anchor: str = "") -> str:
    """Return flags and their meanings as a list of definitions, each with an anchor, such as
    config.data.dataset.
    """
    rows = []
    for flag in flags:
        name = flag.flag.lstrip("-").partition("=")[0].partition("[")[0]
        # A long list of choices may break after each of them.
        written = html.escape(flag.flag).replace(",", ",<wbr>")
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(flag.text, quote=False))
        rows.append(f'<dt id="{anchor}{name}"><code>{written}</code></dt>\n<dd>{text}</dd>')
    return '<dl class="flags">\n' + "\n".join(rows) + "\n</dl>"


def _extras(_: str, page: str) -> str:
    rows = [
        f"| `{name}` | {purpose} | {', '.join(packages)} |" for name, (purpose, packages) in EXTRAS.items()
    ]
    return "\n".join(["| extra | for | main packages |", "|---|---|---|", *rows])


def _api(names: str, page: str) -> str:
    """Directives of mkdocstrings; NAME[one,two] shows only these members of a class."""
    directives = []
    for name in names.split():
        name, _, members = name.rstrip("]").partition("[")
        directives.append(
            f"::: {name}\n    options:\n      members: [{members}]" if members else f"::: {name}"
        )
    return "\n\n".join(directives)


_KINDS: dict[str, Callable[[str, str], str]] = {
    "flags": _flags,
    "fields": _fields,
    "loading": _loading,
    "extras": _extras,
    "api": _api,
}
