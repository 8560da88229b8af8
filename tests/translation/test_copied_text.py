"""Text without letters is copied: in files and by the API, in lines and in parts."""

from pathlib import Path

from fake_engine import fake_engine, read_lines

from flaxformer_mt.commands.main import main
from flaxformer_mt.translation.copied_text import CopiedText, is_copied
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.language_tags import LanguageTags
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator

WORDS, PIECES = Annotations(alignments="words", token_log_probs=True), Annotations(alignments="pieces")


def test_what_is_copied():
    copied = ["...", "12:30", "😀 👩\u200d🚀", "—", "+49 (30) 123", "https://a.de/b?c=d", "www.a.de", "١٢"]
    assert all(map(is_copied, copied))
    texts = ["", " \u200b", "a", "12a", "你好", "http://a.de b", "https://", "12 km", "Ⅷ ª", "नमः"]
    assert not any(map(is_copied, texts))


def test_a_copied_text_is_a_translation_of_its_own(config, characters):
    engine = fake_engine(None, LanguageTags(config.data, characters), CopiedText(characters.source))
    lines = [" 1:2  3\u2028 ", ">>fr<< 1 2", "<2de>1 2"]
    requests = [Request(line, annotations=WORDS, n_best=2) for line in lines]
    (found,) = engine.run([requests])
    assert [one.text for one in found] == ["1:2  3", "1 2", "1 2"]
    assert [one.alignment for one in found] == [((0, 0), (1, 1)), ((1, 0), (2, 1)), ((0, 0), (1, 1))]
    assert all((one.score, one.log_prob, one.tokens, one.token_log_probs) == (0, 0, (), ()) for one in found)
    assert engine.counts == {CopiedText.counted: 3} and not any(engine.backend.windows)
    (found,) = engine.run([[Request("1\x852\ufffd"), Request("1 2", annotations=PIECES)]])
    assert [(one.text, one.alignment) for one in found] == [("1 2", None), ("1 2", ())]


def test_what_is_required_of_a_translation_is_not_copied(characters):
    terms = Glossary.make({"12": "twelve"})
    for fields, copied in (
        ({}, True),
        ({"prefix": "a"}, False),
        ({"required": ("a",)}, False),
        ({"glossary": terms}, False),
        ({"prefix": " ", "required": (" ",), "glossary": Glossary.make({"13": "a"})}, True),
    ):
        ((line),) = read_lines(["12"], CopiedText(characters.source), **fields)
        assert (line.translation is not None) == copied, fields


def test_sentences_around_a_copied_one_keep_their_places(shared_translator):
    line, apart = "Milch! ... Anna!", ["Milch!", "...", "Anna!"]
    vocab = shared_translator.vocabs.source
    for annotations in (WORDS, PIECES):
        requests = [Request(line, annotations=annotations, sentence_starts=(0, 7, 11))]
        requests += [Request(part, annotations=annotations) for part in apart]
        ((whole, *parts),) = shared_translator.engine().run([requests])
        assert whole.text == " ".join(one.text for one in parts) and whole.parts == 3
        assert whole.tokens == parts[0].tokens + parts[2].tokens
        sources = len(vocab.tokenize("Milch! ...")) - 1 if annotations is PIECES else 2
        targets = len(parts[0].alignment) + len(parts[1].alignment)
        moved = tuple((i + sources, j + targets) for i, j in parts[2].alignment)
        assert whole.alignment[targets:] == moved and moved
    assert shared_translator.translate("{0} <b>12:30</b><br/>", markup=True).text == "{0} <b>12:30</b><br/>"


LINES = ["12:30", "ba do", "😀", "https://example.org/ba"]


def test_files_and_the_api(tiny_run, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("".join(f"{line}\n" for line in LINES))
    translator = Translator.load(tiny_run, use_all_devices=False)
    expected = [one.text for one in translator.translate(LINES)]
    assert [expected[0], *expected[2:]] == [LINES[0], *LINES[2:]]
    assert main(["translate", f"--run={tiny_run}", "--input=in", "--alignments=words"]) == 0
    out, err = capfd.readouterr()
    assert [line.split("\t")[1] for line in out.splitlines()] == expected and out.startswith("0-0\t12:30\n")
    assert "texts without letters that were copied: 3" in err
    assert main(["translate", f"--run={tiny_run}", "--input=in", "--output=out", "--workers=1"]) == 0
    assert Path("out").read_text().splitlines() == expected
    assert "texts without letters that were copied: 3" in capfd.readouterr().err
