"""Pretrained models of the Hub: the numbers and translations of transformers, and files given back."""

import dataclasses
import json
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

from make_translator import make_translator
from test_huggingface import VARIANTS, assert_same, edited, make_weights
from tiny_experiment import mark_slow

from benchmarks.originals.tiny_hub import CORPUS, LINES, MAKERS, train_briefly
from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
from flaxformer_mt.convert.huggingface.nllb_bart_t5 import _make_table
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import load_vocabs

# Family -> the style of its language tags.
STYLES = {
    "m2m_100": "m2m_100",
    "nllb": "nllb",
    "mbart_50": "mbart_50",
    "bart": "opus",
    "t5": "t5",
    "mt5": "opus",
    "madlad": "madlad",
    "byt5": "opus",
}
FORMAT = find_format("hf")
# M2M100 is the network of NLLB, mT5 and ByT5 are that of MADLAD.
DEFAULT = mark_slow(MAKERS, "m2m_100", "mt5", "byt5")


@pytest.fixture(scope="module", params=DEFAULT)
def family(request, tmp_path_factory):
    """The name of a family, a folder as transformers writes it, its model, and what is read from it."""
    folder = tmp_path_factory.mktemp("hub") / request.param
    model = MAKERS[request.param](folder)
    return request.param, folder, model, FORMAT.read(folder, ImportOverrides())


def tags_of(weights: Weights) -> tuple[str, str]:
    """What texts begin with on both sides, for the only direction of the config."""
    (direction,) = find_directions(weights.config.data)
    source = "".join(f"{tag} " for tag in choose_tags(weights.config.data, direction))
    target = choose_target_tag(weights.config.data, direction)
    return source, f"{target} " if target else ""


def batch_of(weights: Weights, lines: list[str]) -> Batch:
    """Lines as sources, and in reverse order as targets, padded on both sides."""
    source, target = tags_of(weights)
    return make_batch(
        [weights.vocabs.source.tokenize(source + line) for line in lines],
        [weights.vocabs.target.tokenize(target + line) for line in lines[::-1]],
        weights.vocabs,
        config=weights.config,
    )


def tensors_of(batch: Batch) -> dict:
    return {
        "input_ids": torch.from_numpy(np.asarray(batch.source, np.int64)),
        "attention_mask": torch.from_numpy(np.asarray(batch.source_mask, np.int64)),
        "decoder_input_ids": torch.from_numpy(np.asarray(batch.target_in, np.int64)),
    }


def test_logits_are_those_of_transformers(family):
    name, folder, _, weights = family
    validate(weights.config)
    assert weights.config.data.tag_style == STYLES[name]
    batch = batch_of(weights, LINES)
    ours = flax_outputs(weights, batch, quantity="logits")[batch.target_mask]
    theirs = FORMAT.open(folder)(batch)[batch.target_mask]
    assert not batch.source_mask.all() and not batch.target_mask.all()
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    assert np.ptp(theirs) > 0.5


def test_gradients_are_those_of_transformers(family):
    _, _, model, weights = family
    batch = batch_of(weights, LINES[:4])
    network = weights.make_model()

    def loss(params):
        logits = network.apply({"params": params}, batch, deterministic=True)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch.target_out[..., None], axis=-1)
        return -jnp.where(batch.target_mask, log_probs[..., 0], 0).sum()

    gradients = {p: np.asarray(g) for p, g in flatten_tree(jax.jit(jax.grad(loss))(weights.params)).items()}
    ours = _make_table(weights.config, weights.vocabs).to_foreign(gradients)
    model.zero_grad()
    logits = model(**tensors_of(batch)).logits
    labels = torch.where(torch.from_numpy(batch.target_mask), torch.from_numpy(batch.target_out), -100)
    torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten().long(), reduction="sum"
    ).backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert len(theirs) > 30 and theirs.keys() <= ours.keys()
    for name, gradient in theirs.items():
        scale = np.abs(gradient).max()
        assert scale > 0, name
        np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-4 * scale + 1e-6, err_msg=name)


def test_the_tokenizer_gives_the_ids_of_transformers(family):
    _, folder, _, weights = family
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source, target = tags_of(weights)
    as_text = "" if target else source  # other tags are put there by the class
    for line in [*LINES, ""]:
        assert weights.vocabs.source.tokenize(source + line) == tokenizer(as_text + line)["input_ids"]
        own = weights.vocabs.target.tokenize(target + line)
        assert own == tokenizer(text_target=line)["input_ids"]
        if weights.vocabs.target.unk_id not in own:
            text = tokenizer.decode(own, skip_special_tokens=True).removeprefix(target.strip())
            assert weights.vocabs.target.detokenize(own) == (text.lstrip() if target else text)
    assert weights.vocabs.target.eos_id not in weights.vocabs.source.tokenize("a </s> b")[:-1]


def test_an_import_goes_out_bit_for_bit_and_comes_in_again(family, tmp_path):
    _, folder, _, weights = family
    assert not FORMAT.problems(weights.config)
    FORMAT.write(weights, tmp_path, "none")
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in folder.iterdir()}
    for path in folder.iterdir():
        if path.name != "model.safetensors":
            assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    stored, written = (safetensors.load_file(one / "model.safetensors") for one in (folder, tmp_path))
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor, written[name], err_msg=name)
    assert_same(weights, FORMAT.read(tmp_path, ImportOverrides()))
    assert_same(weights, FORMAT.read(folder, ImportOverrides()))


def test_a_run_keeps_the_vocabulary(family, tmp_path):
    _, _, _, weights = family
    weights.vocabs.save(tmp_path)
    again = load_vocabs(tmp_path)
    assert again.joint and again.source is again.target
    assert again.target.fingerprint == weights.vocabs.target.fingerprint
    assert again.target.tokenize(LINES[0]) == weights.vocabs.target.tokenize(LINES[0])
    needed = ("pretrained.json", "tokenizer.json", "vocab.json", "sentencepiece.bpe.model")
    removed = [path for path in tmp_path.rglob("*") if path.name in needed]
    assert removed
    for path in removed:
        damaged = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}_{path.name}"))
        (damaged / path.relative_to(tmp_path)).unlink()
        with pytest.raises(UserError, match=r"no vocabulary|which its vocabulary needs"):
            load_vocabs(damaged)


WORDS = dict(
    zip(
        "der kleine Hund schläft im Garten die alte Katze trinkt heute Milch wir lesen gutes Buch".split(),
        "the small dog sleeps in garden the old cat drinks today milk we read good book".split(),
        strict=True,
    )
)


@pytest.mark.slow  # by default: logits of all families, and translations of Marian's class and of CTranslate2
@pytest.mark.parametrize("name", MAKERS)
def test_translations_are_those_of_transformers(name, tmp_path):
    """With a model that has learned a little, so that its translations end. Beam search differs in one thing:
    there, ended hypotheses are replaced by the next best ones."""
    model = MAKERS[name](tmp_path)
    vocab = FORMAT.read(tmp_path, ImportOverrides()).vocabs.target
    lead, tag = tags_of(FORMAT.read(tmp_path, ImportOverrides()))
    draw = random.Random(1)
    lines = [" ".join(draw.choices(list(WORDS), k=draw.randint(1, 4))) for _ in range(100)]
    targets = [" ".join(WORDS[word] for word in line.split()) for line in lines]
    sources = [vocab.tokenize(lead + line) for line in lines]
    targets = [vocab.tokenize(tag + line) for line in targets]
    train_briefly(model, sources, targets, start=vocab.bos_id, pad=vocab.pad_id)
    model.save_pretrained(tmp_path)
    weights = FORMAT.read(tmp_path, ImportOverrides())
    longest = max(map(len, sources))
    inputs = {
        "input_ids": torch.tensor([[*row, *[vocab.pad_id] * (longest - len(row))] for row in sources]),
        "attention_mask": torch.tensor([[*[1] * len(row), *[0] * (longest - len(row))] for row in sources]),
    }
    forced = vocab.tokenize(tag)[:-1]
    for beams, accepted in ((1, 0), (4, 2)):
        with torch.no_grad():
            theirs = model.generate(
                **inputs,
                num_beams=beams,
                max_length=41,
                forced_bos_token_id=forced[0] if forced else None,
                forced_eos_token_id=None,
                # What no search of this package chooses.
                bad_words_ids=[[number] for number in {vocab.pad_id} | {vocab.bos_id} - {vocab.eos_id}],
            ).tolist()
        search = SearchConfig(
            method="beam" if beams > 1 else "greedy",
            length_penalty_kind="length",
            max_length_ratio=0,
            max_length_offset=40,
        )
        config = dataclasses.replace(weights.config, search=search)
        ours = make_translator(config, weights.params, weights.vocabs).translate(lines)
        differing, ended = 0, 0
        for row, translation in zip(theirs, ours, strict=True):
            tokens = row[1:]
            if vocab.eos_id in tokens:
                tokens, ended = tokens[: tokens.index(vocab.eos_id) + 1], ended + 1
            differing += tuple(tokens) != translation.tokens
            assert tag.strip() not in translation.text or not tag
        assert differing <= accepted and ended > 90


def test_shards_and_older_files_give_the_same_model(tmp_path):
    folder = tmp_path / "whole"
    model = MAKERS["m2m_100"](folder)
    weights = FORMAT.read(folder, ImportOverrides())
    sharded = shutil.copytree(folder, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    model.save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert_same(weights, FORMAT.read(sharded, ImportOverrides()))
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(UserError, match=r"model-00002.* does not exist, but .*index\.json lists it"):
        FORMAT.read(sharded, ImportOverrides())
    older = shutil.copytree(folder, tmp_path / "older")
    (older / "model.safetensors").unlink()
    state = dict(model.state_dict())
    table = model.model.encoder.embed_positions.weights
    state |= {f"model.{side}.embed_positions.weights": table.clone() for side in ("encoder", "decoder")}
    torch.save(state, older / "pytorch_model.bin")
    assert_same(weights, FORMAT.read(older, ImportOverrides()))
    # The command also compares the outputs with those of transformers, which has another check of names.
    assert import_run(older, run_dir=tmp_path / "run")["largest_difference"] < 1e-5


@pytest.mark.parametrize("name", ["bart", "mbart_50", "nllb"])
def test_weights_of_the_base_class_and_of_wrapped_models_are_imported(name, tmp_path):
    """transformers loads the base class; torch.compile and data parallelism put names before all others."""
    model = MAKERS[name](tmp_path / "hub")
    (tmp_path / "hub" / "model.safetensors").unlink()
    base = dict(model.model.state_dict()) | {"encoder.version": torch.zeros(1)}
    whole = {key: tensor for key, tensor in model.state_dict().items() if key != "final_logits_bias"}
    expected = None
    for number, state in enumerate(
        [whole, base, {f"_orig_mod.{key}": whole[key] for key in whole}]
        + [{f"module._orig_mod.{key}": base[key] for key in base}]
    ):
        torch.save(state, tmp_path / "hub" / "pytorch_model.bin")
        found = import_run(tmp_path / "hub", run_dir=tmp_path / f"run{number}")
        assert found["largest_difference"] < 1e-5, number
        weights = FORMAT.read(tmp_path / "hub", ImportOverrides())
        expected = expected or weights
        assert_same(expected, weights)


@pytest.mark.parametrize("name", ["nllb", "m2m_100"])
def test_an_exported_tokenizer_has_the_languages_of_the_run(name, tmp_path):
    MAKERS[name](tmp_path / "hub")
    import_run(tmp_path / "hub", run_dir=tmp_path / "run", languages=["fr", "de"])
    export_run(tmp_path / "run", format_name="hf", output=tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    codes = {"nllb": ("fra_Latn", "deu_Latn"), "m2m_100": ("fr", "de")}[name]
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == codes
    tag = tokenizer.convert_ids_to_tokens(tokenizer("nous lisons").input_ids)[0]
    assert tag.strip("_") == codes[0]


def test_bfloat16_files_are_read_as_float32(tmp_path):
    model = MAKERS["mt5"](tmp_path / "mt5")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "mt5")
    weights = FORMAT.read(tmp_path / "mt5", ImportOverrides())
    expected = model.shared.weight.detach().float().numpy()
    np.testing.assert_array_equal(weights.leaves["shared_embedding/embedding"], expected)
    (tmp_path / "out").mkdir()
    FORMAT.write(weights, tmp_path / "out", "none")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    again = FORMAT.read(tmp_path / "out", ImportOverrides())
    np.testing.assert_array_equal(again.leaves["shared_embedding/embedding"], expected)


@pytest.mark.parametrize(("name", "file"), [("mbart_50", "sentencepiece.bpe.model"), ("t5", "spiece.model")])
def test_a_sentencepiece_model_serves_in_place_of_tokenizer_json(name, file, tmp_path):
    """As on the Hub, where mBART-50 and mT5 have nothing else."""
    from benchmarks.originals.tiny_hub import train_sentencepiece

    folder = tmp_path / name
    MAKERS[name](folder)
    expected = FORMAT.read(folder, ImportOverrides())
    (folder / "tokenizer.json").unlink()
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if name == "t5" else {}
    (folder / file).write_bytes(train_sentencepiece("unigram", 70, **options))
    found = FORMAT.read(folder, ImportOverrides())
    assert found.vocabs.target.tags == expected.vocabs.target.tags
    source, target = tags_of(found)
    for line in [*LINES[:5], *CORPUS]:
        assert found.vocabs.source.tokenize(source + line) == expected.vocabs.source.tokenize(source + line)
        ids = expected.vocabs.target.tokenize(target + line)
        assert found.vocabs.target.tokenize(target + line) == ids
        if expected.vocabs.target.unk_id not in ids:
            assert found.vocabs.target.detokenize(ids) == expected.vocabs.target.detokenize(ids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("refused")
    for name in ("nllb", "t5", "mbart_50"):
        MAKERS[name](root / name)
    return root


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5", {"model_type": "umt5"}, "model_type is umt5; --format=hf reads bart, mbart, m2m_100, t5, mt5"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'; supported: 'relu'"),
        ("t5", {"eos_token_id": 2}, "says eos_token_id 2, but the vocabulary has </s> at 1"),
        ("t5", {"relative_attention_num_buckets": 12}, r"has shape \[8, 2\], expected \[12, 2\]"),
        ("t5", {"relative_attention_num_buckets": 2}, "must be a whole number from 4"),
        ("t5", {"relative_attention_max_distance": 3}, "model.relative_distance 3 more than half"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder is False; only encoder-decoder models"),
        ("t5", {"quantization_config": {"bits": 4}}, "quantization_config is .*; save the model without"),
        ("t5", {"vocab_size": 10**7}, "parameters, but the files have"),
        ("t5", {"vocab_size": 60}, "but the model has 60 ids"),
        ("nllb", {"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'; supported"),
        ("nllb", {"pad_token_id": 10**6}, "pad_token_id is 1000000; it must be an id below the"),
        ("nllb", {"eos_token_id": [2]}, r"eos_token_id is \[2\]; it must be an id"),
    ],
)
def test_configs_that_no_model_of_ours_has_are_refused(folders, tmp_path, name, changes, message):
    with pytest.raises(UserError, match=message):
        FORMAT.read(edited(folders / name, tmp_path / "copy", **changes), ImportOverrides())


def test_tokenizers_that_no_vocabulary_of_ours_has_are_refused(folders, tmp_path):
    folder = edited(
        folders / "mbart_50", tmp_path / "mbart", "tokenizer_config.json", tokenizer_class="MBartTokenizer"
    )
    with pytest.raises(UserError, match="puts languages after sentences, as mBART-25 does"):
        FORMAT.read(folder, ImportOverrides())
    folder = shutil.copytree(folders / "nllb", tmp_path / "nllb")
    content = (folder / "tokenizer.json").read_bytes()
    for damaged in (b"", b"{}", content[:-9], content.replace(b'"BPE"', b'"XPE"'), b"\xff" * 99):
        (folder / "tokenizer.json").write_bytes(damaged)
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged: .*; copy or download it again"):
            FORMAT.read(folder, ImportOverrides())
    ids = json.loads(content)
    ids["model"]["vocab"]["x"] = (1 << 32) - 1
    (folder / "tokenizer.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match=r"tokenizer\.json has the id 4294967295; ids are below 16777216"):
        FORMAT.read(folder, ImportOverrides())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json and no sentencepiece\.bpe\.model or"):
        FORMAT.read(folder, ImportOverrides())


def test_languages_that_a_model_lacks_are_named(folders):
    weights = FORMAT.read(folders / "nllb", ImportOverrides())
    translator = make_translator(weights.config, weights.params, weights.vocabs)
    with pytest.raises(UserError, match=r"--target_language is xx.*no code for the language 'xx'") as caught:
        translator.translate(["der Hund"], target_language="xx")
    assert "deu_Latn" in str(caught.value)
    with pytest.raises(UserError, match=r"no language tag tlh_Latn; it has 202, such as"):
        translator.translate(["der Hund"], target_language="tlh_Latn")


@pytest.mark.parametrize("name", DEFAULT)
def test_ctranslate2_computes_the_same(name, tmp_path):
    pytest.importorskip("ctranslate2")
    MAKERS[name](tmp_path / "hub")
    weights = FORMAT.read(tmp_path / "hub", ImportOverrides())
    target = find_format("ctranslate2")
    assert not target.problems(weights.config)
    (tmp_path / "out").mkdir()
    target.write(weights, tmp_path / "out", "none")
    batch = batch_of(weights, LINES)
    ours = flax_outputs(weights, batch, quantity="log_probs")[batch.target_mask]
    theirs = target.open(tmp_path / "out")(batch)[batch.target_mask]
    assert np.abs(ours - theirs).max() < 1e-4
    assert np.ptp(theirs) > 0.5


def test_ctranslate2_translates_with_the_tags_of_languages(folders, tmp_path):
    pytest.importorskip("ctranslate2")
    from flaxformer_mt.convert.ctranslate2.backend import load_engine
    from flaxformer_mt.translation.requests import Request

    weights = FORMAT.read(folders / "nllb", ImportOverrides())
    search = SearchConfig("greedy", max_length_ratio=0, max_length_offset=12)
    weights = dataclasses.replace(weights, config=dataclasses.replace(weights.config, search=search))
    (tmp_path / "out").mkdir()
    find_format("ctranslate2").write(weights, tmp_path / "out", "none")
    engine = load_engine(tmp_path / "out")
    (found,) = engine.run([list(map(Request, LINES[:3]))])
    ours = make_translator(weights.config, weights.params, weights.vocabs).translate(LINES[:3])
    for number, translation in enumerate(ours):
        tokens = tuple(one for one in translation.tokens if one != weights.vocabs.target.eos_id)
        assert found[number].tokens == tokens and found[number].text == translation.text


def test_scores_alignments_and_long_lines_know_the_tags(folders):
    from flaxformer_mt.translation.result import Annotations
    from flaxformer_mt.translation.scorer import Scorer

    weights = FORMAT.read(folders / "nllb", ImportOverrides())
    search = SearchConfig("beam", beam_size=2, max_length_ratio=0, max_length_offset=10)
    data = dataclasses.replace(weights.config.data, max_source_length=12, max_target_length=12)
    config = dataclasses.replace(weights.config, search=search, data=data)
    translator = make_translator(config, weights.params, weights.vocabs, long_lines="split")
    tags = weights.vocabs.target.tags
    annotations = Annotations(token_log_probs=True, alignments="words")
    line = "der Hund"
    lines = [line, f"{LINES[0]} {LINES[1]} {LINES[2]}"]
    with pytest.warns(match="line 2: longer than data.max_source_length 12 tokens"):
        short, long = translator.translate(lines, annotations=annotations)
    assert short.tokens[0] == tags["eng_Latn"] and short.token_log_probs[0] == 0
    assert sum(short.token_log_probs) == pytest.approx(short.log_prob, abs=1e-4)
    words = len(short.text.split())
    assert all(target < words for _, target in short.alignment)
    assert long.tokens.count(tags["eng_Latn"]) >= 2 and "_Latn" not in long.text
    scorer = Scorer(translator)
    lead = weights.vocabs.source.tokenize(f"deu_Latn {line}")
    (score,) = scorer.score_tokens([lead], [short.tokens])
    assert score.score == pytest.approx(short.score, abs=1e-4)
    (scored,) = scorer.score(["der Hund"], ["the dog"])
    assert scored.tokens[0] == tags["eng_Latn"] and scored.token_log_probs[0] == 0
    prefixed = translator.translate([line], prefixes=["the"])[0]
    assert prefixed.tokens[0] == tags["eng_Latn"] and prefixed.text.startswith("the")


@pytest.mark.parametrize(("variant", "model_type"), [("all", "marian"), ("pre", "pegasus")])
def test_runs_that_were_not_imported_go_out_as_their_own_class(variant, model_type, tmp_path):
    _, model, vocab = VARIANTS[variant]
    weights = make_weights(tmp_path, model, vocab)
    assert not FORMAT.problems(weights.config)
    (tmp_path / "out").mkdir()
    FORMAT.write(weights, tmp_path / "out", "none")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == model_type
    assert_same(weights, FORMAT.read(tmp_path / "out", ImportOverrides()))
