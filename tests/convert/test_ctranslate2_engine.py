"""CTranslate2 behind the server: the same lines, hypotheses and alignments as when it is called directly."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

pytest.importorskip("ctranslate2")
from flaxformer_mt.commands.translate import WITHOUT_EFFECT
from flaxformer_mt.config import MbrConfig, SearchConfig
from flaxformer_mt.convert.ctranslate2.backend import load_engine
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.errors import UserError
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translator


@pytest.fixture(scope="module")
def folder(tiny_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "ctranslate2"
    export_run(tiny_run, format_name="ctranslate2", output=path)
    return path


def translate(engine, lines, **fields):
    """In one window, with these fields of the requests."""
    requests = [Request(line, seed=number, **fields) for number, line in enumerate(lines, start=1)]
    (found,) = engine.run([requests], warn=lambda message: None)
    assert engine.backend.num_active == 0
    return found


def test_lines_are_translated_as_by_greedy_search_of_the_run(folder, tiny_run):
    lines = ["ba do fi", "", "gu ka", "ba do fi gu ka lo mi nu ba do fi gu ka lo", *(["lo"] * 80)]
    engine = load_engine(folder, beam_size=1)
    assert engine.backend.most_hypotheses == 1
    translations = translate(engine, lines)
    greedy = dataclasses.replace(engine.config.search, method="greedy", beam_size=1)
    ours = Translator.load(tiny_run, search=greedy, use_all_devices=False, warn=lambda message: None)
    assert [one.text for one in translations] == [one.text for one in ours.translate(lines)]
    assert translations[3].parts > 1
    several = ["ba do. fi gu!  ka"]
    (apart,) = translate(engine, several)
    assert apart.parts == 3 and apart.text == ours.translate(several)[0].text
    (whole,) = translate(load_engine(folder, beam_size=1, split_sentences="never"), several)
    assert whole.parts == 1


def test_the_sentences_of_a_long_text_hold_up_no_other_text(folder):
    """Where requests arrive; the lines of a file share batches as whole lines."""
    for arriving in (True, False):
        engine, batches = load_engine(folder, beam_size=1, arriving=arriving), []
        translate = engine.backend._translate
        engine.backend._translate = lambda sentences, *how, own=translate, seen=batches: (
            seen.append(len(sentences)) or own(sentences, *how)
        )
        engine.submit(Request("ba do. " * 150, id="long"))
        engine.submit(Request("gu", id="other"))
        found = []
        while len(engine):
            found += [name for name, _ in engine.step()]
        assert sum(batches) == 151 and (found == ["other", "long"] or not arriving)
        assert max(batches) <= 256 / 2 if arriving else batches == [150, 1]


def test_hypotheses_alignments_and_attention(folder):
    engine = load_engine(folder)
    asked = Annotations(alignments="words", attention=True)
    translation, plain = translate(engine, ["ba do fi", "gu"], n_best=2, annotations=asked)
    assert len(translation.n_best) == 2 and translation.score >= translation.alternatives[0].score
    pieces = engine.target_pieces(translation)
    assert np.shape(translation.attention) == (len(pieces), len(translation.source_pieces))
    assert {target for _, target in translation.alignment} == set(range(len(translation.text.split())))
    engine.submit(Request("ba", id="left"))
    engine.cancel("left")
    assert not len(engine) and plain.alignment is not None


LINES = ["ba do fi", "gu ka", "lo mi nu ba", "do", "fi fi gu"]


@pytest.fixture(scope="module")
def plain(folder):
    return translate(load_engine(folder, method="greedy"), LINES)


@pytest.fixture(scope="module")
def our_search(folder, tiny_run):
    """Gives the texts by greedy search of this package, which this option changes."""
    config = load_engine(folder).config

    def search(**options):
        greedy = dataclasses.replace(config.search, method="greedy", **options)
        ours = Translator.load(tiny_run, search=greedy, use_all_devices=False, warn=lambda message: None)
        return [one.tokens for one in ours.translate(LINES)]

    return search


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram": 1},
        {"suppress": ("30", "34", "<unk>")},
        {"min_length_offset": 2, "max_length_offset": 24, "min_length_ratio": 1.5, "max_length_ratio": 3.0},
    ],
    ids=str,
)
def test_what_a_translation_may_be_is_as_in_the_search_of_this_package(folder, plain, our_search, options):
    found = translate(load_engine(folder, method="greedy", **options), LINES)
    assert [one.tokens for one in found] != [one.tokens for one in plain], "the option has no effect"
    eos = load_engine(folder).vocabs.target.eos_id
    expected = [tuple(token for token in tokens if token != eos) for tokens in our_search(**options)]
    assert [one.tokens for one in found] == expected


def test_what_training_lacked_is_known_as_from_the_run(tiny_run, tmp_path):
    run, counts = tmp_path / "run", {"capitals": 0.001, "title_case": 0.2, "single_words": 0.004}
    shutil.copytree(tiny_run, run)
    described = {"ratio": 1.0, "offset": 5.0, "several_sentences": 0.3, **counts}
    (run / "target_lengths.json").write_text(json.dumps(described))
    files = export_run(run, format_name="ctranslate2", output=tmp_path / "out")["files"]
    assert "target_lengths.json" in files
    engine = load_engine(tmp_path / "out", method="greedy", capitals="auto")
    assert engine.describe()["capitals"] == ["capitals", "single_words"]
    (found,) = translate(engine, ["ba do. fi gu!  ka"])
    assert found.parts == 1, "lines of several sentences were no rarity"


def test_samples_depend_on_the_seed_and_on_their_options(folder, plain):
    def sample(**options):
        engine = load_engine(folder, method="sample", **options)
        return [one.tokens for one in translate(engine, LINES * 4)]

    greedy = [one.tokens for one in plain] * 4
    assert sample(seed=3) == sample(seed=3) != sample(seed=4)
    assert sample(top_k=1) == greedy != sample()
    assert sample(top_p=1e-6) == greedy
    assert sample(temperature=1e-5) == greedy


def test_arguments_of_a_beam_search(folder):
    asked = []

    def record(**options):
        engine = load_engine(folder, **options)

        class Model:
            def translate_batch(self, *args, **arguments):
                asked.append(arguments)
                raise KeyboardInterrupt

        engine.backend._model = Model()
        engine.submit(Request("ba do", id="line"))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
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
        ({"method": "sample", "min_p": 0.1}, "search.min_p=0.1"),
        ({"coverage_penalty": 0.2, "diversity_groups": 2}, "0.2, search.diversity_groups=2"),
    ],
)
def test_options_that_it_lacks_are_refused_by_name(folder, options, named):
    with pytest.raises(UserError, match=f"{named}: CTranslate2 does not have this"):
        load_engine(folder, **options)


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
        translate(load_engine(copy), ["a"])
