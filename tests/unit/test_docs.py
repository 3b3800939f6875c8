"""What docs and docstrings name is there: files of ours, and the targets of links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_moe_rl.chaos.kinds import KINDS
from lora_moe_rl.config.keys import all_keys, sections

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lora_moe_rl"
TOP_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
TOP = ("adapters", "kernels", "refit", "router_replay", "recipes", "tests", "lora_moe_rl")
SOURCES = [
    path
    for folder in TOP
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)  # which names files that are not there
]

# A path begins with a top folder, or with a room of the package ("run/loop.py").
ROOMS = sorted({*TOP, *(path.name for path in PACKAGE.iterdir() if path.is_dir())})
NAMED = re.compile(rf"(?<![\w./<>-])(?:\./)?(?P<path>(?:{'|'.join(ROOMS)})/[\w./-]*\w\.py)\b")
TEST = re.compile(r"(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)")
LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+)$", re.M)


def missing_files(text: str, folder: Path) -> list[str]:
    """Paths in `text` that are neither in the repository, nor in the package, nor beside it."""
    found = {match["path"] for match in NAMED.finditer(text)}
    places = (ROOT, PACKAGE, folder)
    return sorted(path for path in found if not any((at / path).is_file() for at in places))


def anchor(title: str) -> str:
    """A heading as a link writes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    broken = []
    for match in LINK.finditer(page.read_text()):
        target, _, place = match["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (
            place and place not in {anchor(m["title"]) for m in HEADING.finditer(file.read_text())}
        ):
            broken.append(match["target"])
    return broken


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_files_that_a_page_names_are_there(page):
    assert not missing_files(page.read_text(), page.parent)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tests_that_a_page_names_are_there(page):
    for match in TEST.finditer(page.read_text()):
        source = (ROOT / match["file"]).read_text()
        assert re.search(rf"^(?:async )?def {match['name']}\(", source, re.M), match[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page):
    assert not broken_links(page)


def test_the_files_that_sources_name_are_there():
    found = {name_of(path): missing_files(path.read_text(), path.parent) for path in SOURCES}
    assert not {path: files for path, files in found.items() if files}


def linked(page: Path) -> set[Path]:
    """Pages of ours that a page links to."""
    targets = {match["target"].partition("#")[0] for match in LINK.finditer(page.read_text())}
    return {(page.parent / target).resolve() for target in targets if target.endswith(".md")}


def test_every_page_is_a_link_or_two_from_the_readme():
    """What the index does not name, CONTRIBUTING does: the pages of docs/adding."""
    near = linked(ROOT / "README.md")
    assert set(PAGES) - {ROOT / "README.md"} <= near | linked(ROOT / "CONTRIBUTING.md")


def unknown_keys(text: str) -> set[str]:
    """Words of the form section.key, as `trainer.lr`, that are neither a key of the config nor a
    kind of fault; Python code names other things so."""
    text = re.sub(r"^```python$.*?^```$", "", text, flags=re.M | re.S)
    named = re.compile(rf"(?<![\w/.-])(?:{'|'.join(filter(None, sections()))})\.[a-z]\w*(?![\w(/])")
    return {match[0] for match in named.finditer(text) if match[0][-3:] != ".md"} - {
        *all_keys(),
        *KINDS,
    }


# These name keys of others, or of the examples that they add.
OTHERS_KEYS = [ROOT / "docs/from_verl.md", *(ROOT / "docs/adding").glob("*.md")]


@pytest.mark.parametrize("page", sorted({*PAGES} - {*OTHERS_KEYS}), ids=name_of)
def test_the_settings_that_a_page_names_are_there(page):
    assert not unknown_keys(page.read_text())


def test_every_room_of_the_package_stands_in_the_table_of_rooms():
    there = {
        f"lora_moe_rl/{path.name}/"
        for path in PACKAGE.iterdir()
        if (path / "__init__.py").is_file() and not path.is_symlink()
    }
    told = set(
        re.findall(r"^\| `(lora_moe_rl/\w+/)`", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    )
    assert there == told


def test_pages_and_sources_are_looked_at():
    assert len(PAGES) > 20 and len(SOURCES) > 250


def test_what_is_gone_is_found(tmp_path):
    text = "`run/loop.py`, lora_moe_rl/run/gone.py, adapters/gone.py; vllm/models/other.py"
    assert missing_files(text, tmp_path) == ["adapters/gone.py", "lora_moe_rl/run/gone.py"]
    page = tmp_path / "page.md"
    page.write_text("# A b\n[1](page.md#a-b) [2](#c) [3](no.md) [4](https://example.org/x)")
    assert broken_links(page) == ["#c", "no.md"]
    assert unknown_keys("trainer.lr=1 trainer.rate, data.path. adapter.ranks=2 data.md") == {
        "trainer.rate",
        "adapter.ranks",
    }
