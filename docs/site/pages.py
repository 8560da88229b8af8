"""Completes the pages of docs/ when mkdocs builds the site: a hook, named in mkdocs.yml.

CHANGELOG.md, CONTRIBUTING.md and the pages of benchmarks/, recipes/ and tests/ become pages of the site,
links to other files outside docs/ become text, and a link to a section of README.md alone in its line becomes
that section.
"""

import functools
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]

# Files beside docs/ -> the pages of the site that they are.
_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/ablations.md": "ablations.md",
    "recipes/README.md": "recipes.md",
    "tests/README.md": "testing.md",
}
_LINKED = {**_PAGES, "README.md": "index.md"}

# GitHub's form of a remark becomes the site's.
_REMARK = re.compile(r"^> \[!(\w+)\]\n((?:> .*\n)+)", re.M)
# A line that is a link to a section of README.md becomes the section.
_SECTION = re.compile(r"^\[[^\]]+\]\(\.\./README\.md#([\w-]+)\)$", re.M)
_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are outside of docs/."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=_read_beside(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mend links that leave docs/, and write remarks as the site does."""
    return _REMARK.sub(_write_remark, _LINK_OUT.sub(_mend_link, _SECTION.sub(_read_section, markdown)))


def on_page_content(content: str, **_: Any) -> str:
    """Keep flags in running text, such as --config.data.dataset, from being broken after their dashes."""

    def keep(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        return re.sub(r"(?<![\w-])--[\w.-]{1,32}", r'<span class="flag">\g<0></span>', match[0])

    return re.sub(r"<pre.*?</pre>|<code>([^<]*)</code>", keep, content, flags=re.S)


def _read_beside(name: str) -> str:
    """Return the text of a page outside of docs/, with its links as those of a page in docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)]+)", functools.partial(_move_link, posixpath.dirname(name)), text)


def _read_section(match: re.Match[str]) -> str:
    """Return the section of README.md that a link names, without its heading."""
    for part in re.split(r"^## ", _read_beside("README.md"), flags=re.M)[1:]:
        heading, _, text = part.partition("\n")
        if heading.lower().replace(" ", "-") == match[1]:
            return text.strip()
    raise ValueError(f"README.md has no section {match[1]}")


def _move_link(folder: str, match: re.Match[str]) -> str:
    """Return a link of a page in `folder` as one of a page in docs/."""
    return "](" + posixpath.relpath(posixpath.join(folder, match[1]), "docs")


def _mend_link(match: re.Match[str]) -> str:
    text, target, anchor = match[1], match[2], match[3] or ""
    return f"[{text}]({_LINKED[target]}{anchor})" if target in _LINKED else text


def _write_remark(match: re.Match[str]) -> str:
    text = match[2].replace("> ", "    ")
    return f"!!! {match[1].lower()}\n\n{text}"
