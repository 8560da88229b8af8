"""Translation through a pivot language is that of one model, given to the other sentence by sentence."""

import dataclasses

import pytest
from make_translator import make_translator

from flaxformer_mt.config import DataConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation import sentences as sentences_module
from flaxformer_mt.translation.copied_text import CopiedText
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.join_sentences import join_translations
from flaxformer_mt.translation.pivot import PivotEngines, choose_pivot, join_alignments
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations

LINES = ["der Hund", "Wir lesen.  Der Hund.\tAnna!", "", "Milch"]


@pytest.fixture(scope="module")
def second(config, other_params, vocabs, shared_translator):
    """From English, whose sentences it would find by other rules, to French."""

    def make(**options):
        onward = config.replace({"data.source_language": "en", "data.target_language": "fr"})
        made = make_translator(onward, other_params, vocabs, warn=pytest.fail, **options)
        made.search.programs = shared_translator.search.programs
        return made

    return make


@pytest.fixture(scope="module")
def sentences(shared_translator, second):
    """Returns all ways of each sentence through three hypotheses of both models."""

    def translate(texts, **annotations):
        asked, whole = Annotations(alignments="words", **annotations), second(split_sentences="never")
        found = []
        for one in shared_translator.translate(texts, n_best=3, annotations=asked):
            own = whole.translate([each.text for each in one.n_best], n_best=3, annotations=asked)
            found.append([(a, b) for a, best in zip(one.n_best, own, strict=True) for b in best.n_best])
        return found

    return translate


def test_each_sentence_goes_through_both_models_and_is_split_once(
    shared_translator, second, sentences, monkeypatch
):
    split, find = [], sentences_module.split_sentences

    def record(text, **options):
        split.append(text)
        return find(text, **options)

    monkeypatch.setattr(sentences_module, "split_sentences", record)
    found = shared_translator.translate(LINES, then=second())
    assert split == LINES
    ways = sentences(["der Hund", "Wir lesen.", "Der Hund.", "Anna!", "Milch"])
    best = [own[0][1].text for own in ways]
    joined, _ = join_translations(best[1:4], ["", "  ", "\t"])
    assert [one.text for one in found] == [best[0], joined, "", best[4]]
    assert [one.parts for one in found[:2]] == [1, 3]
    first, last = ways[0][0]
    assert found[0].score == pytest.approx(first.score + last.score, abs=1e-4)
    assert found[0].log_prob == pytest.approx(first.log_prob + last.log_prob, abs=1e-4)
    assert found[0].tokens == last.tokens and found[0].alignment is None


def test_the_n_best_are_those_of_the_best_sums(shared_translator, second, sentences):
    (found,) = shared_translator.translate(
        ["der Hund"], n_best=3, then=second(), annotations=Annotations(alignments="words")
    )
    (ways,) = sentences(["der Hund"])
    best = {}
    for one, two in sorted(ways, key=lambda way: -way[0].score - way[1].score):
        best.setdefault(two.text, (one.score + two.score, join_alignments(one.alignment, two.alignment)))
    assert [one.text for one in found.n_best] == list(best)[:3]
    for one, (score, alignment) in zip(found.n_best, best.values(), strict=False):
        assert one.score == pytest.approx(score, abs=1e-4) and one.alignment == alignment


def test_alignments_and_markup_pass_through_the_pivot(shared_translator, second, sentences):
    assert join_alignments(((0, 1), (1, 0), (2, 0)), ((0, 0), (1, 1), (5, 2))) == ((1, 0), (2, 0), (0, 1))
    then = second()
    plain, marked = ("Wir lesen.  Der Hund.", "Wir <b>lesen.</b>  Der {0}Hund.")
    (aligned,) = shared_translator.translate([plain], then=then, annotations=Annotations(alignments="words"))
    (first, onward), (other, last) = (ways[0] for ways in sentences(["Wir lesen.", "Der Hund."]))
    count = len(onward.text.split())
    second_half = join_alignments(other.alignment, last.alignment)
    assert aligned.alignment == (
        *join_alignments(first.alignment, onward.alignment),
        *((i + 2, j + count) for i, j in second_half),
    )
    for found in shared_translator.translate([marked], then=then, markup=True, n_best=2)[0].n_best:
        assert all(found.text.count(one) == 1 for one in ("<b>", "</b>", "{0}")) and found.alignment is None
    without = found.text.replace("<b>", "").replace("</b>", "").replace("{0}", "")
    assert without.split() and "<" not in without


def test_prefixes_and_phrases_are_those_of_the_last_language(shared_translator, second):
    found = shared_translator.translate(
        ["der Hund", "Milch"], then=second(), prefixes=["we ", ""], required=[[], ["red apples"]]
    )
    assert found[0].text.startswith("we ") and "red apples" in found[1].text and found[1].satisfied


def test_two_engines_translate_windows(shared_translator, second):
    then, counted, told = second(), [], []
    directions = choose_pivot(shared_translator.config.data, then.config.data)
    engines = PivotEngines(shared_translator.engine(), then.engine(), directions)
    requests = [Request(line, seed=number) for number, line in enumerate([*LINES, "12:30"], start=1)]
    windows = engines.run(
        [requests[:2], requests[2:]],
        warn=told.append,
        on_progress=lambda lines, tokens: counted.append(lines),
    )
    found = [one.text for window in windows for one in window]
    assert found == [one.text for one in shared_translator.translate([*LINES, "12:30"], then=then)]
    assert counted == [2, 3] and not told and found[-1] == "12:30"
    assert engines.counts == {CopiedText.counted: 2}, "by both engines"
    described = engines.describe()
    kind = described.pop("device_kind")
    assert described.pop("then") | {"device_kind": kind} == then.engine().describe()
    for fields, refused in (
        ({"annotations": Annotations(alignments="pieces")}, "alignments of subwords"),
        ({"context": ()}, "the lines before cannot pass through a pivot language"),
        ({"glossary": Glossary.make({"a": "b"})}, "a glossary cannot pass through a pivot language"),
    ):
        with pytest.raises(UserError, match=refused):
            next(engines.run([[Request("a", **fields)]]))


def test_languages_must_meet():
    first, second = DataConfig(dataset="a:de-en,a:fr-en"), DataConfig(dataset="b:en-es,b:en-de")
    assert [one.name for one in choose_pivot(first, second, "fr", "es")] == ["fr-en", "en-es"]
    single = dataclasses.replace(first, dataset="a:de-en")
    assert [one.name for one in choose_pivot(single, DataConfig(dataset="b:en-fr"))] == ["de-en", "en-fr"]
    for languages, problem in (((), "in several ways"), (("it", "es"), "from it to es in no way")):
        with pytest.raises(UserError, match=problem):
            choose_pivot(first, second, *languages)
    with pytest.raises(UserError, match="translates de-en and the second es-fr, which leads in no way"):
        choose_pivot(single, DataConfig(dataset="b:es-fr"))
