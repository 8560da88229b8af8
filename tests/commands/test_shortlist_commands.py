"""A shortlist from `prepare` to `translate` and the server: which pieces translations have."""

import json

import pytest

from flaxformer_mt.commands.main import main
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.vocab.shortlist import Shortlist

SOURCES = ["ba do fi", "gu", "ka lo mi nu ba do", "", "fi fi", "nu mi", "lo", "ka ka gu do", "mi ba fi nu lo"]


@pytest.fixture(scope="module")
def shortlist(tiny_run, tmp_path_factory):
    """The file of a shortlist of the run: for each source piece its two likeliest target pieces."""
    file = tmp_path_factory.mktemp("shortlist") / "list.txt"
    flags = [f"--run={tiny_run}", f"--shortlist={file}", "--shortlist_candidates=2", "--shortlist_common=0"]
    assert main(["prepare", *flags]) == 0
    return file


def test_translations_have_pieces_of_the_shortlist_alone(tiny_run, shortlist, tmp_path):
    (tmp_path / "in").write_text("\n".join(SOURCES) + "\n", encoding="utf-8")
    files = [f"--input={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", f"--run={tiny_run}"]
    assert main(["translate", *files, f"--shortlist={shortlist}", "--json"]) == 0
    found = [json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()]
    translator = Translator.load(tiny_run, shortlist=shortlist)
    vocabs, free = translator.vocabs, Translator.load(tiny_run).translate(SOURCES)
    listed = Shortlist.read(shortlist, vocabs)
    outside = 0
    for source, restricted, other in zip(SOURCES, found, free, strict=True):
        allowed = {*listed.common.tolist(), *listed.find(vocabs.source.tokenize(source)).tolist()}
        assert set(restricted["tokens"]) <= allowed
        outside += not set(other.tokens) <= allowed
    assert outside, "without the shortlist, translations have other pieces as well"
    # The server's search, to which lines come one by one.
    live = translator.engine(arriving=True)
    for number, source in enumerate(SOURCES):
        live.submit(Request(source, id=number))
    answers = {}
    while len(live):
        answers |= {name: answer.text for name, answer in live.step()}
    assert [answers[number] for number in range(len(SOURCES))] == [one["text"] for one in found]


def test_a_shortlist_that_does_not_fit_is_one_line(tiny_run, shortlist, tmp_path, capfd):
    (tmp_path / "other").write_text(shortlist.read_text(encoding="utf-8") + "\tnothing\n", encoding="utf-8")
    for file, named in (("absent", "cannot be read: No such file"), ("other", "has the subword 'nothing'")):
        assert main(["translate", f"--run={tiny_run}", f"--shortlist={tmp_path / file}"]) == 2
        error = capfd.readouterr().err
        assert named in error and error.count("\n") == 1
