"""CTranslate2 behind the server: the same lines, hypotheses and alignments as when it is called directly."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("ctranslate2")
from flaxformer_mt.commands.translate import WITHOUT_EFFECT
from flaxformer_mt.config import MbrConfig, SearchConfig
from flaxformer_mt.convert.ctranslate2.engine import CTranslate2Engine
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.glossary import Glossary
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import NO_ANNOTATIONS, Annotations
from flaxformer_mt.translation.translator import Translator
from flaxformer_mt.unicode_text import CASES


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "ctranslate2"
    export_run(tiny_run, format_name="ctranslate2", output=path)
    return path


def translate(system, lines, *, n_best=1, annotations=NO_ANNOTATIONS):
    for number, line in enumerate(lines):
        system.submit(Request(line, id=number, n_best=n_best, annotations=annotations))
    found = {}
    while len(system):
        found |= dict(system.step())
    assert system.num_active == 0
    return [found[number] for number in range(len(lines))]


def test_lines_are_translated_as_by_greedy_search_of_the_run(folder, tiny_run):
    lines = ["ba do fi", "", "gu ka", "ba do fi gu ka lo mi nu ba do fi gu ka lo", *(["lo"] * 80)]
    system = CTranslate2Engine(folder, beam_size=1)
    assert system.most_hypotheses == 1
    translations = translate(system, lines)
    greedy = dataclasses.replace(system.config.search, method="greedy", beam_size=1)
    ours = Translator.load(tiny_run, search=greedy, use_all_devices=False, warn=lambda message: None)
    assert [one.text for one in translations] == [one.text for one in ours.translate(lines)]
    assert translations[3].parts > 1
    several = ["ba do. fi gu!  ka"]
    (apart,) = translate(system, several)
    assert apart.parts == 3 and apart.text == ours.translate(several)[0].text
    (whole,) = translate(CTranslate2Engine(folder, beam_size=1, split_sentences="never"), several)
    assert whole.parts == 1


def test_the_sentences_of_a_long_text_hold_up_no_other_text(folder):
    """Where requests arrive; the lines of a file share batches as whole lines."""
    for arriving in (True, False):
        system, batches = CTranslate2Engine(folder, beam_size=1, arriving=arriving), []
        translate = system._batches._translate
        system._batches._translate = lambda sentences, *how, own=translate, seen=batches: (
            seen.append(len(sentences)) or own(sentences, *how)
        )
        system.submit(Request("ba do. " * 150, id="long"))
        system.submit(Request("gu", id="other"))
        found = []
        while len(system):
            found += [name for name, _ in system.step()]
        assert sum(batches) == 151 and (found == ["other", "long"] or not arriving)
        assert max(batches) <= 256 / 2 if arriving else batches == [150, 1]


def test_hypotheses_alignments_and_attention(folder):
    system = CTranslate2Engine(folder)
    asked = Annotations(alignments="words", attention=True)
    translation, plain = translate(system, ["ba do fi", "gu"], n_best=2, annotations=asked)
    assert len(translation.n_best) == 2 and translation.score >= translation.alternatives[0].score
    pieces = system.target_pieces(translation)
    assert np.shape(translation.attention) == (len(pieces), len(translation.source_pieces))
    assert {target for _, target in translation.alignment} == set(range(len(translation.text.split())))
    system.submit(Request("ba", id="left"))
    system.cancel("left")
    assert not len(system) and plain.alignment is not None


LINES = ["ba do fi", "gu ka", "lo mi nu ba", "do", "fi fi gu"]


@pytest.fixture(scope="module")
def plain(folder):
    return translate(CTranslate2Engine(folder, method="greedy"), LINES)


@pytest.fixture(scope="module")
def our_search(folder, tiny_run):
    """Gives the texts by greedy search of this package, which this option changes."""
    config = CTranslate2Engine(folder).config

    def search(**options):
        greedy = dataclasses.replace(config.search, method="greedy", **options)
        ours = Translator.load(tiny_run, search=greedy, use_all_devices=False, warn=lambda message: None)
        return [one.tokens for one in ours.translate(LINES)]

    return search


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram": 1},
        {"suppress": ("\u2581",)},
        {"suppress": ("30", "34", "<unk>")},
        {"min_length_offset": 20, "max_length_offset": 24},
        {"min_length_ratio": 1.5, "max_length_ratio": 3.0},
    ],
    ids=str,
)
def test_what_a_translation_may_be_is_as_in_the_search_of_this_package(folder, plain, our_search, options):
    found = translate(CTranslate2Engine(folder, method="greedy", **options), LINES)
    assert [one.tokens for one in found] != [one.tokens for one in plain], "the option has no effect"
    eos = CTranslate2Engine(folder).vocabs.target.eos_id
    expected = [tuple(token for token in tokens if token != eos) for tokens in our_search(**options)]
    assert [one.tokens for one in found] == expected


def test_capitals_are_translated_in_sentence_case(folder, plain):
    system = CTranslate2Engine(folder, method="greedy", capitals="always")
    (found,) = translate(system, [LINES[0].upper()])
    assert found.tokens == plain[0].tokens and found.text == plain[0].text.upper()
    assert system.num_recased == 1 and set(system.describe()["capitals"]) == set(CASES)


def test_what_training_lacked_is_known_as_from_the_run(tiny_run, tmp_path):
    run, counts = tmp_path / "run", {"capitals": 0.001, "title_case": 0.2, "single_words": 0.004}
    shutil.copytree(tiny_run, run)
    described = {"ratio": 1.0, "offset": 5.0, "several_sentences": 0.3, **counts}
    (run / "target_lengths.json").write_text(json.dumps(described))
    files = export_run(run, format_name="ctranslate2", output=tmp_path / "out")["files"]
    assert "target_lengths.json" in files
    system = CTranslate2Engine(tmp_path / "out", method="greedy", capitals="auto")
    assert system.describe()["capitals"] == ["capitals", "single_words"]
    (found,) = translate(system, ["ba do. fi gu!  ka"])
    assert found.parts == 1, "lines of several sentences were no rarity"


def test_samples_depend_on_the_seed_and_on_their_options(folder, plain):
    def sample(**options):
        system = CTranslate2Engine(folder, method="sample", **options)
        return [one.tokens for one in translate(system, LINES * 4)]

    greedy = [one.tokens for one in plain] * 4
    assert sample(seed=3) == sample(seed=3) != sample(seed=4)
    assert sample(top_k=1) == greedy != sample()
    assert sample(top_p=1e-6) == greedy
    assert sample(temperature=1e-5) == greedy


def test_arguments_of_a_beam_search(folder):
    asked = []

    def record(**options):
        system = CTranslate2Engine(folder, **options)

        class Model:
            def translate_batch(self, *args, **arguments):
                asked.append(arguments)
                raise KeyboardInterrupt

        system._model = Model()
        system.submit(Request("ba do", id="line"))
        with pytest.raises(KeyboardInterrupt):
            system.step()
        return asked[-1]

    found = record(beam_size=3, length_penalty=0.6, length_penalty_kind="length", patience=2.0)
    assert (found["beam_size"], found["length_penalty"], found["patience"]) == (3, 0.6, 1)
    found = record(length_penalty=0.6, stopping="inexact", patience=2.0)
    assert (found["length_penalty"], found["patience"]) == (pytest.approx(0.5), 2.0)
    assert "sampling_topk" not in found


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mbr": "chrf"}, "search.mbr=chrf"),
        ({"coverage_penalty": 0.2}, "search.coverage_penalty=0.2"),
        ({"diversity_groups": 2, "beam_size": 4}, "search.diversity_groups=2"),
        ({"method": "sample", "min_p": 0.1}, "search.min_p=0.1"),
        ({"coverage_penalty": 0.2, "diversity_groups": 2}, "0.2, search.diversity_groups=2"),
    ],
)
def test_options_that_it_lacks_are_refused_by_name(folder, options, named):
    with pytest.raises(UserError, match=f"{named}: CTranslate2 does not have this"):
        CTranslate2Engine(folder, **options)


def test_every_option_of_a_search_is_passed_on_or_refused_or_without_effect():
    """A new option must be looked at here too."""
    passed = {"method", "beam_size", "length_penalty", "length_penalty_kind", "stopping", "patience", "seed"}
    passed |= {"temperature", "top_k", "top_p", "no_repeat_ngram", "suppress"}
    passed |= {"min_length_ratio", "min_length_offset", "max_length_ratio", "max_length_offset"}
    refused = {"coverage_penalty", "diversity_groups", "min_p"}
    refused |= {field.name for field in dataclasses.fields(MbrConfig)}
    assert {field.name for field in dataclasses.fields(SearchConfig)} == passed | refused | {*WITHOUT_EFFECT}


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.bin", lambda content: content[: len(content) // 2]),
        ("model.bin", lambda content: b""),
        ("model.bin", lambda content: bytes(len(content))),
        ("model.bin", lambda content: content[:40] + b"\xff" * 40 + content[80:]),
        ("shared_vocabulary.json", lambda content: b"{"),
        ("shared_vocabulary.json", lambda content: b'["a"]'),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(folder, file, damage, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    name = file if (copy / file).is_file() else "source_vocabulary.json"
    (copy / name).write_bytes(damage((copy / name).read_bytes()))
    with pytest.raises(UserError, match=rf"^{copy} is damaged: .*; export the run again$"):
        translate(CTranslate2Engine(copy), ["a"])


def test_a_folder_that_is_no_model(tiny_run):
    with pytest.raises(UserError, match=r"no model\.bin"):
        CTranslate2Engine(tiny_run)


def test_a_term_that_two_sentences_share_ends_no_other_request(folder):
    """It is a required phrase of the line, which CTranslate2 does not have: refused before the search."""
    system = CTranslate2Engine(folder, arriving=True)
    with pytest.raises(UserError, match="CTranslate2 takes no prefixes and required phrases"):
        system.submit(Request("ba do. fi gu!", id=1, glossary=Glossary.make({"do. fi": "NU"})))
    assert translate(system, ["ba"])[0].text
