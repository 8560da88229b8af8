"""docs/reference/ is what the code says."""

import re

import pytest
from tools.write_reference import API, ROOT, write_pages

import flaxformer_mt

PAGES = write_pages()


@pytest.mark.parametrize("path", PAGES)
def test_the_reference_is_that_of_the_code(path):
    advice = f"{path} is out of date: PYTHONPATH=.ci:. python -m tools.write_reference"
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path], advice


def test_every_public_name_is_in_the_reference_with_a_docstring():
    shown = [name.partition("[")[0].rpartition(".")[2] for names in API.values() for name in names]
    assert set(shown) >= set(flaxformer_mt.__all__) - {"__version__"}
    for name in shown:
        pattern = rf"\n### {name}\n\n(```\n.*?\n```\n\n)?(?!```|#|\* )"
        assert re.search(pattern, PAGES["docs/reference/api.md"], re.S), f"{name} has no docstring"
