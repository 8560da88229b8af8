"""A picture in SVG: text, boxes, lines and arrows, with colors for light and dark pages (style.css).

It has a background of its own, since a page may be dark where the browser prefers light. It is narrow, so
that its text can be read on a phone.
"""

import html
import textwrap
from pathlib import Path

WIDTH, MARGIN = 470, 18

_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_HEAD = """<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path d="M0 0 L8 4 L0 8 z"/></marker>"""


class Picture:
    """Elements in the order of drawing. `kind` is a class of style.css, `title` what a screen reader says."""

    def __init__(self, title: str, width: int = WIDTH) -> None:
        self.title, self.width = title, width
        self.elements: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "") -> None:
        self.elements.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(words)}</text>')

    def paragraph(self, y: float, words: str) -> float:
        """Write small lines over the whole width; return where the next line would stand."""
        for line in textwrap.wrap(words, 63):
            self.text(MARGIN, y, line, "soft")
            y += 16
        return y

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> None:
        size = f'width="{width:.4g}" height="{height:.4g}" rx="{radius:g}"'
        self.elements.append(f'<rect x="{x:.4g}" y="{y:.4g}" {size} class="{kind}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.elements.append(f'<circle cx="{x:.4g}" cy="{y:g}" r="5" class="{kind}"/>')

    def path(self, steps: str, kind: str) -> None:
        self.elements.append(f'<path d="{steps}" class="{kind}"/>')

    def finish(self, height: float) -> str:
        """Return the text of the file."""
        view = f'viewBox="0 0 {self.width} {height:g}"'
        size = f'width="{self.width * 1.15:g}" height="{height * 1.15:g}"'
        frame = f'<rect x=".5" y=".5" width="{self.width - 1}" height="{height - 1:g}" rx="10" class="page"/>'
        title = html.escape(self.title)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view} {size} role="img" aria-label="{title}">',
            f"<style>\n{_STYLE}</style>\n<defs>{_HEAD}</defs>\n{frame}",
            *self.elements,
        ]
        return "\n".join([*parts, "</svg>\n"])
