"""docs/images has the pictures that docs/pictures draws, and these have no number that no page says."""

import re
import shutil

import pytest

from docs.pictures.__main__ import PICTURES
from docs.pictures.pages import PAGES, ROOT, SAYS, read_numbers
from flaxformer_mt.commands.main import COMMANDS


@pytest.mark.parametrize("path", PICTURES)
def test_a_picture_is_drawn_from_the_pages_of_today(path):
    picture = PICTURES[path]()
    assert (ROOT / path).read_text(encoding="utf-8") == picture, "out of date: python -m docs.pictures"
    assert len(picture) < 60_000 and "prefers-color-scheme: dark" in picture


def test_numbers_are_read_with_their_ranges(tmp_path):
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("", encoding="utf-8")
    table = "| big, [packed](a.md) | **1,200** (1,100 to 1,300) | 0.5 |\n| small | 2 | 3 |\n"
    (tmp_path / PAGES[0]).write_text(table, encoding="utf-8")
    numbers = read_numbers("| big, packed | # | * | | small | # |", tmp_path)
    assert numbers == [("1,200", 1200, 1100, 1300), ("2", 2, 2, 2)]
    (tmp_path / PAGES[1]).write_text(table, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^2 places of benchmarks/README.md, .* say: \| small \| #"):
        read_numbers("| small | #", tmp_path)


def test_a_row_that_left_its_page_is_missed(tmp_path):
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    quotation = SAYS["gains"]["seeds"]
    assert len(read_numbers(quotation, tmp_path)) == 3
    page = tmp_path / "docs/results.md"
    page.write_text(re.sub(r"42\.48\*\*", "**", page.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(ValueError, match="^0 places of "):
        read_numbers(quotation, tmp_path)


def test_the_commands_of_the_decision_tree_and_the_pipeline_exist():
    commands = [command for _, command, _ in SAYS["decision_tree"]["lines"] + SAYS["pipeline"]["stages"]]
    names = {part.split()[0] for command in commands for part in re.split(", (?:then )?", command) if part}
    assert names - {"recipes/browser"} <= set(COMMANDS)
