"""The Python of every model card runs as it is written, for every family and format, and gives the network
what the package gives it: the ids of the source with its tags, and the first token of the translation.
"""

import contextlib
import dataclasses
import io
import re
import sys
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
ctranslate2 = pytest.importorskip("ctranslate2")

from test_huggingface import make_weights
from test_network_fields import EXPORTED, OWN
from tiny_experiment import mark_slow

from benchmarks.originals.tiny_hub import CORPUS, MAKERS
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.huggingface.new_languages import NewVocabulary
from flaxformer_mt.convert.huggingface.nllb_bart_t5 import FORMAT as HUB
from flaxformer_mt.convert.huggingface.vocabulary_changes import change_vocabulary
from flaxformer_mt.convert.model_cards import make_card
from flaxformer_mt.vocab import PretrainedVocab

SIZES = {"num_encoder_layers": 1, "num_decoder_layers": 1}


def run_card(weights: Weights, name: str, folder, monkeypatch) -> tuple[str, list]:
    """Export, run the card in its folder; return what it prints and the calls of the network."""
    folder.mkdir()
    find_format(name).write(weights, folder, "none")
    facts = {"format": name, "checkpoint": "best", "step": 7}
    card = make_card(weights.config, facts, None, weights.vocabs)
    ((language, code),) = re.findall(r"^```(python|html)\n(.*?)^```", card, re.S | re.M)
    if language == "html":  # a page, which .ci/engines opens
        return code, []
    calls = []

    class Translator(ctranslate2.Translator):
        def translate_batch(self, sources, **options):
            found = super().translate_batch(sources, **options)
            names = {
                piece: i
                for i, piece in enumerate(weights.vocabs.source.pieces(range(weights.vocabs.source.size)))
            }
            calls.append(([names[piece] for piece in sources[0]], options, found[0].hypotheses[0]))
            return found

    plain = transformers.GenerationMixin.generate

    def generate(self, **options):
        found = plain(self, **options | {"max_length": 8, "num_beams": 2})
        calls.append((options["input_ids"][0].tolist(), options, found[0].tolist()))
        return found

    # Of 600 MB, and so not here.
    marian = types.SimpleNamespace(Translator=lambda flags: types.SimpleNamespace(translate=list))
    monkeypatch.setitem(sys.modules, "pymarian", marian)
    monkeypatch.setattr(ctranslate2, "Translator", Translator)
    monkeypatch.setattr(transformers.GenerationMixin, "generate", generate)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "modeling", raising=False)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, f"{name}/README.md", "exec"), {})
    sys.modules.pop("modeling", None)
    assert said.getvalue()
    return said.getvalue(), calls


def check_call(weights: Weights, name: str, calls: list) -> None:
    """The network has got the ids that the package makes of the sentence, and begins with the tag."""
    direction, (ids, options, found) = find_directions(weights.config.data)[0], calls[0]
    text = " ".join([*choose_tags(weights.config.data, direction), "A sentence."])
    expected = weights.vocabs.source.tokenize(text)
    assert ids == (expected[:-1] if name == "ctranslate2" else expected)
    if name == "ctranslate2" or isinstance(weights.vocabs.target, PretrainedVocab):
        limit = options["max_decoding_length" if name == "ctranslate2" else "max_length"]
        assert limit == min(weights.config.model.longest_input or 256, 256)
    if tag := choose_target_tag(weights.config.data, direction):
        number = weights.vocabs.target.tags[tag]
        assert found[0] == tag if name == "ctranslate2" else found[1] == number
        assert options.get("forced_bos_token_id", number) == number


@pytest.mark.parametrize("name", ["hf", "ctranslate2"])
@pytest.mark.parametrize("family", mark_slow(MAKERS, "m2m_100", "mt5", "byt5", "bart"))
def test_the_card_of_a_pretrained_model_runs(family, name, tmp_path, monkeypatch):
    MAKERS[family](tmp_path / "hub")
    weights = HUB.read(tmp_path / "hub", ImportOverrides())
    said, calls = run_card(weights, name, tmp_path / "out", monkeypatch)
    check_call(weights, name, calls)
    assert "_Latn" not in said and "__en__" not in said and "en_XX" not in said


def test_the_card_of_a_cut_vocabulary_runs(tmp_path, monkeypatch):
    MAKERS["nllb"](tmp_path / "hub")
    (tmp_path / "text").write_text("\n".join(CORPUS[:6]))
    whole = HUB.read(tmp_path / "hub", ImportOverrides())
    request = NewVocabulary([tmp_path / "text"])
    weights, _ = change_vocabulary(whole, request, ["deu_Latn", "eng_Latn"], [])
    _, calls = run_card(weights, "ctranslate2", tmp_path / "out", monkeypatch)
    direction = find_directions(weights.config.data)[0]
    assert calls[0][0][0] == weights.vocabs.target.tags["deu_Latn"] and calls[0][2][0] == choose_target_tag(
        weights.config.data, direction
    )


@pytest.mark.parametrize("name", EXPORTED)
def test_the_card_of_an_own_model_runs(name, tmp_path, monkeypatch):
    weights = make_weights(tmp_path, vars(OWN[name]) | SIZES | {"max_positions": 64}, {})
    _, calls = run_card(weights, name, tmp_path / "out", monkeypatch)
    if calls:
        check_call(weights, name, calls)


@pytest.mark.parametrize("name", ["hf", "ctranslate2", "torch"])
def test_the_card_of_a_model_of_several_languages_begins_sources_with_tags(name, tmp_path, monkeypatch):
    weights = make_weights(tmp_path, SIZES, {})
    data = dataclasses.replace(weights.config.data, dataset="a:de-en,a:de-fr", source_tags=True)
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, data=data))
    _, calls = run_card(weights, name, tmp_path / "out", monkeypatch)
    assert calls or name == "torch"


def test_the_card_of_a_language_model_runs(tmp_path, monkeypatch):
    weights = make_weights(tmp_path, {"architecture": "decoder_only", "num_decoder_layers": 1}, {})
    data = dataclasses.replace(weights.config.data, source_language="")
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, data=data))
    said, _ = run_card(weights, "torch", tmp_path / "out", monkeypatch)
    assert "tensor" in said


def test_a_card_names_no_training_pairs_of_a_model_that_saw_none():
    from flaxformer_mt.config import Config

    report = {"data": {"train": {"parts": [{"name": "mine", "pairs": 5898}]}}}
    facts = {"format": "hf", "checkpoint": "best", "step": 0}
    assert "5,898" not in make_card(Config(), facts, report)
    assert "* mine: 5,898 training pairs" in make_card(Config(), facts | {"step": 50}, report)
