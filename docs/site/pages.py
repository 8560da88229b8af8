"""Completes the pages of docs/ when mkdocs builds the site: a hook, named in mkdocs.yml.

CHANGELOG.md, CONTRIBUTING.md and the pages of benchmarks/, recipes/ and tests/ become pages of the site,
links to other files outside docs/ become text, and a line with a link to a section of README.md, alone in its
paragraph, becomes that section. Names in tables may break where a part of them ends, and long cells get a
class for extra.css.
"""

import functools
import html
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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
# A paragraph of one line that links to a section of README.md becomes the section.
_SECTION = re.compile(r"(?<=\n\n)[^\n\[]*\[[^\]]+\]\(\.\./README\.md#([\w-]+)\)\.?(?=\n\n|\n?\Z)")
_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")
# Blocks of Python that are no programs: a part of a file, or a signature.
_PART = re.compile(r"^```\n(?=# \S+\.py\n|[\w.]+\()", re.M)
# Code blocks, scripts and tags, or, as group 2, running text between them.
_TEXT = re.compile(r"<(pre|style|script)\b.*?</\1>|<[^>]*>|([^<]+)", re.S)
# Cells of more characters are kept wide on phones.
_LONG_CELL = 40


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are outside of docs/."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, content=_read_beside(name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Mend links that leave docs/, and write remarks and parts of Python as the site does."""
    if "/" not in page.file.src_uri:
        markdown = _SECTION.sub(_read_section, markdown)
        if page.file.src_uri == "index.md" and "(../README.md#" in markdown:
            raise ValueError("index.md: a link to a section of README.md is not alone in its paragraph")
        markdown = _LINK_OUT.sub(_mend_link, markdown)
    return _PART.sub("```python\n", _REMARK.sub(_write_remark, markdown))


def on_page_content(content: str, *, page: Page, files: Files, **_: Any) -> str:
    """Keep flags, such as --config.data.dataset, from breaking after a dash; mend the notebook's links."""

    def keep(match: re.Match[str]) -> str:
        if match[2] is None:
            return match[0]
        return re.sub(r"(?<![\w-])--[\w.-]{1,32}", r'<span class="flag">\g<0></span>', match[2])

    def link(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1])
        if target is None:
            raise ValueError(f"{page.file.src_uri} links to {match[1]}, which is no page")
        return f'href="{target.url_relative_to(page.file)}'

    if page.file.src_uri.endswith(".ipynb"):
        content = re.sub(r'href="(?!https?:)([^"#]+\.md)', link, content)
    return _TEXT.sub(keep, content)


def on_post_page(output: str, *, config: Any, **_: Any) -> str:
    """Prepare tables for narrow screens, and name the site once in the title of its first page."""
    name = config.site_name
    output = output.replace(f"<title>{name} - {name}</title>", f"<title>{name}</title>", 1)
    return re.sub(r"<table>.*?</table>", _prepare_table, output, flags=re.S)


def _prepare_table(match: re.Match[str]) -> str:
    """Let code and long words of a table break after _, = and the like; mark long cells."""

    def split(word: re.Match[str]) -> str:
        return re.sub(r"(?<=\w)([_=./,:@]+)(?=\w)(?![^<]*>)", r"\1<wbr>", word[0])

    def mark(cell: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]*>", "", cell[2]))
        return f'<td class="long"{cell[1]}>{cell[2]}' if len(text) > _LONG_CELL else cell[0]

    table = re.sub(r"<td([^>]*)>(.*?)(?=</td>)", mark, match[0], flags=re.S)
    return re.sub(r"<code>.*?</code>|<[^>]*>|[^\s<>]{20,}", split, table, flags=re.S)


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
