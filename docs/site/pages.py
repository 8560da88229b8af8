"""Completes the pages of docs/ when mkdocs builds the site: a hook, named in mkdocs.yml.

CHANGELOG.md, CONTRIBUTING.md and benchmarks/README.md become pages of the site, and links to other files
outside docs/ become text.
"""

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
}
_LINKED = {**_PAGES, "README.md": "index.md"}

_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are outside of docs/."""
    for name, page in _PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        # Links become those of a page in docs/: the way there is shorter, all others begin with ../
        text = text.replace("](../docs/", "](docs/")
        text = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text).replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Mend links that leave docs/."""
    return _LINK_OUT.sub(_mend_link, markdown)


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
