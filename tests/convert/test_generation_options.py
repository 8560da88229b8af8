"""Search options of transformers come in as they are, ours go out, and what cannot is said."""

import dataclasses
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from flaxformer_mt.config import Config, SearchConfig, VocabConfig
from flaxformer_mt.config.checks import check_search
from flaxformer_mt.convert.formats import constraining_options
from flaxformer_mt.convert.huggingface.generation_options import lost_options, read_search, write_generation
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.vocab import Vocab, make_vocabs


@pytest.fixture(scope="module")
def vocab(tmp_path_factory) -> Vocab:
    pairs = [SimpleNamespace(source="abcde", target="fghij")]
    config = VocabConfig(kind="char", size=15, byte_fallback=False)
    return make_vocabs(config, pairs, tmp_path_factory.mktemp("vocab")).target


def written(vocab: Vocab, folder: Path, **search) -> dict:
    write_generation(Config(search=SearchConfig(**search)), vocab, folder, longest_target=29)
    return json.loads((folder / "generation_config.json").read_text())


def read(vocab: Vocab, folder: Path, **settings) -> SearchConfig:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    search = read_search(folder, {"num_beams": 9}, vocab)
    check_search(search)
    return search


def test_a_length_penalty_goes_out_as_it_is_where_both_are_of_one_kind(vocab, tmp_path):
    for kind, expected in (("length", 0.6), ("gnmt", 0.5)):
        facts = written(vocab, tmp_path, length_penalty=0.6, length_penalty_kind=kind)
        assert facts["length_penalty"] == expected


def test_options_of_theirs_come_in(vocab, tmp_path):
    piece = vocab.pieces([7])[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search = read(
            vocab,
            tmp_path,
            num_beams=6,
            length_penalty=0.6,
            early_stopping=True,
            no_repeat_ngram_size=3,
            min_length=5,
            bad_words_ids=[[0], [3], [7]],
            suppress_tokens=[8, 2],
            num_beam_groups=2,
            diversity_penalty=0.25,
            forced_eos_token_id=2,
            repetition_penalty=1.0,
            renormalize_logits=True,
        )
    assert search == SearchConfig(
        beam_size=6,
        length_penalty=0.6,
        length_penalty_kind="length",
        stopping="inexact",
        no_repeat_ngram=3,
        min_length_offset=5,
        suppress=(*vocab.pieces([3]), piece, *vocab.pieces([8])),
        diversity_groups=2,
        diversity_strength=0.25,
    )
    assert read(vocab, tmp_path).method == "greedy"
    sampled = read(vocab, tmp_path, do_sample=True, temperature=0.7, top_p=0.9, min_new_tokens=40)
    assert (sampled.method, sampled.temperature, sampled.top_k, sampled.top_p) == ("sample", 0.7, 50, 0.9)
    assert (sampled.min_length_offset, sampled.max_length_offset) == (41, 41)
    (tmp_path / "generation_config.json").unlink()
    assert read_search(tmp_path, {"num_beams": 9}, vocab).beam_size == 9  # as older models have it


def test_options_of_theirs_that_we_lack_are_named(vocab, tmp_path):
    with pytest.warns(FlaxformerWarning) as warned:
        search = read(
            vocab,
            tmp_path,
            num_beams=4,
            do_sample=True,
            length_penalty=-0.5,
            repetition_penalty=1.2,
            forced_bos_token_id=7,
            forced_eos_token_id=5,
            bad_words_ids=[[5, 6]],
        )
    message = str(warned[0].message)
    for words in (
        "repetition_penalty is 1.2; forced_bos_token_id is 7; forced_eos_token_id is 5",
        "length_penalty is -0.5, below 0",
        "do_sample is true with several beams",
        "bad_words_ids has 1 sequences of several tokens",
    ):
        assert words in message
    assert (search.method, search.length_penalty, search.suppress) == ("beam", 0.0, ())


def test_damaged_options_are_refused(vocab, tmp_path):
    with pytest.raises(UserError, match="num_beams is 'many'; it must be a whole number from 1 to 1000"):
        read(vocab, tmp_path, num_beams="many")
    for settings in ({"bad_words_ids": [["a"]]}, {"bad_words_ids": [[99]]}):
        with pytest.raises(UserError, match="value of a wrong type"):
            read(vocab, tmp_path, **settings)
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(UserError, match="generation_config.json is damaged: it must contain a JSON object"):
        read_search(tmp_path, {}, vocab)


def test_ours_go_out_and_come_back(vocab, tmp_path):
    ours = SearchConfig(
        beam_size=3,
        length_penalty_kind="length",
        stopping="inexact",
        suppress=tuple(vocab.pieces([3, 6, 9])),
        no_repeat_ngram=2,
        min_length_offset=4,
    )
    facts = written(vocab, tmp_path, **dataclasses.asdict(ours))
    assert facts["bad_words_ids"] == [[0], [1], [3], [6], [9]]
    assert (facts["no_repeat_ngram_size"], facts["min_length"], facts["max_length"]) == (2, 4, 30)
    assert lost_options(ours) == []
    assert read_search(tmp_path, {}, vocab) == ours
    sample = SearchConfig(method="sample", length_penalty_kind="length", top_k=7, top_p=0.8, temperature=2.0)
    assert written(vocab, tmp_path, **dataclasses.asdict(sample))["num_beams"] == 1
    assert read_search(tmp_path, {}, vocab) == sample


def test_ours_that_no_file_can_hold_are_named():
    search = SearchConfig(
        stopping="inexact", patience=2.0, coverage_penalty=0.2, diversity_groups=2, min_length_ratio=0.5
    )
    assert lost_options(search) == [
        "search.min_length_ratio=0.5",
        "search.coverage_penalty=0.2",
        "search.diversity_groups=2",
        "search.patience=2",
    ]
    assert lost_options(dataclasses.replace(search, method="greedy")) == ["search.min_length_ratio=0.5"]
    assert constraining_options(SearchConfig()) == []
    search = SearchConfig(suppress=("a", "b"), no_repeat_ngram=3, min_length_offset=2)
    assert constraining_options(search) == [
        "search.suppress=a,b",
        "search.no_repeat_ngram=3",
        "search.min_length_offset=2",
    ]
