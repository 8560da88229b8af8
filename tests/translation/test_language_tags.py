"""Language tags: those at the start of lines, and those of given languages, which alignments do not count."""

import dataclasses

import pytest
from fake_engine import read_lines
from make_translator import make_translator

from flaxformer_mt.config import DataConfig, SearchConfig
from flaxformer_mt.decoding.forced_decoding import PairScore
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.constraints import Constraints
from flaxformer_mt.translation.language_tags import (
    LanguageTags,
    LineTags,
    choose_line_tags,
    find_language_tags,
)
from flaxformer_mt.translation.scorer import Scorer
from flaxformer_mt.translation.sentences import Sentences
from flaxformer_mt.translation.tokenization import Tokenization
from flaxformer_mt.vocab.pretrained_vocab import PretrainedMetadata, PretrainedVocab

GERMAN = DataConfig()
MANY = DataConfig(dataset="a:en-de,b:en-fr,c:de-en")


@pytest.mark.parametrize(
    ("line", "tag"),
    [
        (">>fr<< der Hund", ">>fr<< "),
        (" >>cmn_Hans<<der Hund", " >>cmn_Hans<<"),
        (">>fr<< <from:de> der Hund", ">>fr<< <from:de> "),
        ("<2de> >>sr_latn<<\tder Hund", "<2de> >>sr_latn<<\t"),
        (">>Hund<< sagt er", ""),
        ("der >>fr<< Hund", ""),
        ("<2> Hund", ""),
        (">>fr<<", ""),
        ("\u200e>>fr<<\u00a0der Hund", "\u200e>>fr<<\u00a0"),
        ("", ""),
    ],
)
def test_tags_at_the_start_of_a_line(line, tag):
    assert find_language_tags(line) == tag


@pytest.fixture
def read(make_characters):
    """Returns lines whose sentences are apart, with at most so many tokens in a part; and the vocabulary."""

    def read(lines, *, longest, data=GERMAN, tags=(), **fields):
        data, vocabs = dataclasses.replace(data, max_source_length=longest), make_characters(*tags)
        steps = (
            LanguageTags(data, vocabs),
            Sentences(apart=False),
            Tokenization(vocabs.source, longest=longest, long_lines="split"),
        )
        found = read_lines(lines, *steps, **fields)
        for line in found:
            assert line.tag + "".join(part.text for part in line.parts) == line.line
            assert all(len(part.ids) <= longest and not part.is_cut for part in line.parts)
        return found, vocabs.source

    return read


def test_given_tags_are_put_before_all_parts_and_belong_to_none(read):
    data = DataConfig(dataset="a:de-fr,b:de-en", source_tags=True)
    lines = ["x y", "Ab cd. Ef gh. Ij kl.", "<2de> Ab cd. Ef gh."]
    added, languages = (">>fr<<", "<from:de>"), {"source_language": "de", "target_language": "fr"}
    found, vocab = read(lines, longest=17, data=data, tags=added, **languages)
    texts = [["x y"], ["Ab cd. ", "Ef gh. ", "Ij kl."], ["<2de> Ab cd. ", "Ef gh."]]
    assert [[part.text for part in line.parts] for line in found] == texts
    for part in (part for line in found for part in line.parts):
        assert part.added == ">>fr<< <from:de> " and (part.added_pieces, part.tag_pieces) == (2, 0)
        assert vocab.pieces(part.ids[:2]) == ["\u2581>>fr<<", "\u2581<from:de>"]
        assert vocab.detokenize(part.ids[2:]) == part.text.strip()
    # Where no language is named, the tag of a line is enough.
    (line,), _ = read([">>fr<< <from:de> Ab cd."], longest=17, data=data, tags=added)
    assert [(part.added, part.tag, part.tag_pieces) for part in line.parts] == [("", ">>fr<< <from:de> ", 2)]


def test_all_parts_of_a_line_have_its_language_tag(read):
    lines = [
        "x",
        ">>fr<< Ab. Cd. Ef.",
        "<2de>abcdefghij klmno",
        "Ab cd. Ef gh. Ij kl.",
        ">>fr<<" * 9,  # no room for text
    ]
    found, vocab = read(lines, longest=14)
    texts = [[vocab.detokenize(part.ids) for part in line.parts] for line in found]
    assert texts[:4] == [
        ["x"],
        [">>fr<< Ab.", ">>fr<< Cd.", ">>fr<< Ef."],
        ["<2de>abcde", "<2de>fghij", "<2de>klmno"],
        ["Ab cd.", "Ef gh.", "Ij kl."],
    ]
    assert "".join(texts[4]) == lines[4]
    assert [line.tag_words for line in found] == [0, 1, 0, 0, 0]
    for part in (part for line in found for part in line.parts):
        assert len(vocab.tokenize(part.tag)) - 1 == part.tag_pieces


def test_the_languages_choose_the_tags():
    names = {"source_language": "en", "target_language": "fr"}
    assert choose_line_tags(MANY, target_language="fr") == LineTags(">>fr<< ", **names)
    assert choose_line_tags(MANY, "de").known == (">>de<<", ">>fr<<", ">>en<<")
    assert choose_line_tags(MANY, "de").added == ">>en<< "  # the only language that German goes to
    assert choose_line_tags(MANY, "de", "fr").added == ">>fr<< "  # without an example in training
    assert choose_line_tags(DataConfig(), "de", "en") == LineTags(
        "", source_language="de", target_language="en"
    )
    assert choose_line_tags(MANY)[3:] == ("", "", "")
    always = dataclasses.replace(DataConfig(), target_tags="always", source_tags=True)
    assert choose_line_tags(always).added == ">>en<< <from:de> "
    both = dataclasses.replace(MANY, source_tags=True)
    assert choose_line_tags(both, "en", "fr").added == ">>fr<< <from:en> "
    assert (
        "give --source_language=en"
        in choose_line_tags(
            dataclasses.replace(DataConfig(), dataset="a:en-de,b:fr-de", source_tags=True)
        ).missing
    )


def test_a_tag_in_a_text_is_text_where_the_request_names_the_language():
    lines = ["A dog.", ">>de<< A dog.", " ", "\u200e"]
    assert choose_line_tags(MANY, "en", "fr").find(lines) == [">>fr<< ", ">>fr<< ", "", ""]
    assert choose_line_tags(MANY, target_language="fr").find(lines[1:2]) == [">>fr<< "]
    assert choose_line_tags(MANY).find([">>de<< A dog.", "\ufeff>>de<<\u00a0A dog."]) == ["", ""]
    nllb = DataConfig(source_language="de", target_language="en", tag_style="nllb")
    text = "deu_Latn ist ein Code."
    assert choose_line_tags(nllb, "de").find([text]) == ["deu_Latn "]
    assert choose_line_tags(nllb, None, "en").find([text]) == [""]


def test_the_first_word_of_a_text_is_kept_after_the_tag_of_the_request():
    tags = {"deu_Latn": 259, "eng_Latn": 260}
    vocab = PretrainedVocab(PretrainedMetadata("bytes", 261, 0, 1, 1, 2, tags=tags, target_tags=True), {})
    added, text = "deu_Latn ", "deu_Latn ist ein Code."
    assert vocab.tokenize(added + text)[0] == 259
    assert vocab.detokenize(vocab.tokenize(added + text)) == text
    for spelling in ("\u200edeu_Latn Hund", "deu_Latn\u00a0Hund", " deu_Latn Hund"):
        assert vocab.tokenize(spelling) == vocab.tokenize("deu_Latn Hund")
    # So is that of a required phrase.
    step = Constraints(vocab, SearchConfig(), lambda *checked: None, limited=False)
    (line,) = read_lines(["x"], step, required=("eng_Latn code",))
    line.lead = "eng_Latn "
    step.before([line])
    assert vocab.detokenize(line.sentence.required[0]) == "eng_Latn code"


def test_a_missing_or_unknown_language_is_named_with_the_known_ones():
    for options, expected in (
        (
            {"target_language": "it"},
            r"--target_language is it, but .* to de and fr and en \(en-de, en-fr, de",
        ),
        ({"source_language": "fr"}, "--source_language is fr, but this model translates from en and de"),
    ):
        with pytest.raises(UserError, match=expected):
            choose_line_tags(MANY, **options)
    with pytest.raises(UserError, match="target_language is fr, but this model translates to en"):
        choose_line_tags(DataConfig(), target_language="fr")
    tags = choose_line_tags(MANY)
    assert tags.find([" ", ">>fr<< a", " >>de<< b"]) == ["", "", ""]
    expected = r"to de and fr and en; give --target_language=de, or begin .* in >>de<< \(line 8 does not\)"
    with pytest.raises(UserError, match=expected) as refused:
        tags.find([">>fr<< a", "b"], first_line=7)
    assert "\n" not in str(refused.value)


def test_a_scorer_puts_tags_before_sources_as_well(config, make_characters, monkeypatch):
    data = dataclasses.replace(MANY, max_source_length=20, max_target_length=20)
    vocabs = make_characters(">>de<<", ">>fr<<", ">>en<<")
    scorer, read = Scorer(make_translator(dataclasses.replace(config, data=data), {}, vocabs)), []

    def score_all(pairs, *, params):
        read.extend(pair.source.tolist() for pair in pairs)
        return [PairScore(0.0, 0.0, (), ())] * len(pairs)

    monkeypatch.setattr(scorer.tokens, "score_all", score_all)
    scorer.score(["the dog"], ["le chien"], target_language="fr")
    list(scorer.score_stream(["the dog"], ["le chien"], target_language="fr"))
    scorer.score([">>fr<< the dog"], ["le chien"])
    assert read == [vocabs.source.tokenize(">>fr<< the dog")] * 3
    with pytest.raises(UserError, match="to de and fr and en"):
        list(scorer.score_stream(["the dog"], ["le chien"]))
