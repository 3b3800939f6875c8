"""The page's own files: HTML, a style sheet and scripts, as a browser reads them."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "web"
STYLE = "page.css"
# In the order in which they are run; each adds to what those before it made.
SCRIPTS = (
    "dom.js",
    "state.js",
    "source.js",
    "chart.js",
    "curves.js",
    "tokens.js",
    "samples.js",
    "maps.js",
    "routes.js",
    "timeline.js",
    "main.js",
)


@cache
def web_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def html_of(head: str, end: str) -> str:
    """The page with what stands in its head and at the end of its body."""
    return web_file("index.html").replace("<!-- head -->", head).replace("<!-- end -->", end)


def page_html() -> str:
    """The page as the server sends it: it asks for the other files."""
    scripts = "".join(f'<script src="web/{escape(name)}"></script>\n' for name in SCRIPTS)
    return html_of(f'<link rel="stylesheet" href="web/{STYLE}">', scripts)
