"""Hugging Face folders: transformers loads, computes and translates what we do; OPUS-MT folders come in."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from flaxformer_mt.config import Config, DataConfig, ModelConfig, SearchConfig, VocabConfig
from flaxformer_mt.config.checks import validate
from flaxformer_mt.convert.export_run import check_expressible
from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format, shapes_of
from flaxformer_mt.convert.huggingface.tokenizer_files import write_tokenizer
from flaxformer_mt.convert.parity_check import flax_outputs, make_batch
from flaxformer_mt.errors import UserError
from flaxformer_mt.vocab import load_vocabs, make_vocabs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.numpy")

from benchmarks.originals.tiny_toolkits import PAIRS as TEXT

LINES = [
    *(source for source, _ in TEXT),
    "  führend  und   folgend ",
    "",
    "unbekannt: 漢字 👍 <s> </s> <pad> <unk> xyz",
    "Ätz\u00a0weiß\tTab",
    "\ufeffun\u00adsicht\u200bbar\u2060 \u202a\u202c me\u200ckham",
]
TINY = {
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "model_dim": 12,
    "num_heads": 2,
    "ffn_dim": 20,
    "max_positions": 60,
    "norm_position": "post",
}
VARIANTS = {
    "all": ("marian", {}, {}),
    "embeddings": (
        "marian",
        {
            "tying": "embeddings",
            "output_bias": True,
            "activation": "silu",
            "embedding_scale": False,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
        },
        {},
    ),
    "target_output": (
        "marian",
        {"tying": "target_output", "attention_bias": False, "ffn_bias": False, "activation": "gelu"},
        {"joint": False},
    ),
    "none": (
        "marian",
        {
            "tying": "none",
            "norm_affine": False,
            "activation": "gelu_tanh",
            "ffn_layer": "convolution",
            "padding_mask": "both",
        },
        {"byte_fallback": False},
    ),
    "pre": ("hf-pre-norm", {"norm_position": "pre", "output_bias": True}, {}),
    "pre_untied": (
        "hf-pre-norm",
        {"norm_position": "pre", "tying": "embeddings", "norm_affine": False, "model_dim": 14},
        {},
    ),
}


class Pairs(list):
    def __init__(self):
        super().__init__(dataclasses.make_dataclass("Pair", ["source", "target"])(*pair) for pair in TEXT * 3)


def make_weights(folder: Path, model: dict, vocab: dict) -> Weights:
    config = Config(
        data=DataConfig(max_source_length=20, max_target_length=30, batch_tokens=512),
        vocab=VocabConfig(size=300 if vocab.get("byte_fallback", True) else 44, **vocab),
        model=ModelConfig(**(TINY | model)),
        search=SearchConfig(max_length_ratio=1.0, max_length_offset=9),
    )
    validate(config)
    vocabs = make_vocabs(config.vocab, Pairs(), folder / "vocab")
    shapes = shapes_of(config.model, source_size=vocabs.source.size, target_size=vocabs.target.size)
    return Weights(config, vocabs, random_leaves(shapes))


def random_leaves(shapes: dict) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        path: (random.normal(0, 0.4, shape) + path.endswith("norm/scale")).astype(np.float32)
        for path, shape in shapes.items()
    }


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, tmp_path_factory):
    name, model, vocab = VARIANTS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    weights, target = make_weights(root, model, vocab), find_format(name)
    check_expressible(target, weights, "none")
    (root / "out").mkdir()
    target.write(weights, root / "out", "none")
    return target, weights, root / "out"


def batch_of(weights: Weights):
    return make_batch(
        [weights.vocabs.source.tokenize(line) for line in LINES[:6]],
        [weights.vocabs.target.tokenize(target) for _, target in [*TEXT, ("", "a"), ("", "the")]],
        weights.vocabs,
        config=weights.config,
    )


def assert_same(one: Weights, other: Weights) -> None:
    assert one.config == other.config
    assert one.vocabs.joint == other.vocabs.joint
    assert one.vocabs.source.fingerprint == other.vocabs.source.fingerprint
    assert one.vocabs.target.fingerprint == other.vocabs.target.fingerprint
    assert one.leaves.keys() == other.leaves.keys()
    for path, leaf in one.leaves.items():
        assert leaf.dtype == other.leaves[path].dtype
        np.testing.assert_array_equal(leaf, other.leaves[path], err_msg=path)


def test_transformers_computes_the_same_and_comes_back_bit_for_bit(exported, tmp_path):
    target, weights, folder = exported
    batch = batch_of(weights)
    ours = flax_outputs(weights, batch, quantity="logits")
    theirs = target.open(folder)(batch)  # refuses missing and unexpected entries
    assert np.abs(ours - theirs)[batch.target_mask].max() < 1e-4
    assert np.ptp(ours) > 1
    assert_same(weights, target.read(folder, ImportOverrides()))
    # What transformers itself writes may leave out tables and tied arrays, and is the same model.
    transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path)
    for name in ("source.spm", "target.spm"):
        shutil.copy(folder / name, tmp_path)
    assert_same(weights, target.read(tmp_path, ImportOverrides()))


def test_the_tokenizer_gives_our_ids_and_our_text(exported):
    _, weights, folder = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer).__name__ == "MarianTokenizer"
    source, target = weights.vocabs.source, weights.vocabs.target
    assert tokenizer(LINES)["input_ids"] == [source.tokenize(line) for line in LINES]
    assert tokenizer(text_target=LINES)["input_ids"] == [target.tokenize(line) for line in LINES]
    for line in LINES:
        ids = [target.bos_id, *(i for i in target.tokenize(line) if i != target.unk_id), target.pad_id]
        assert tokenizer.decode(ids, skip_special_tokens=True) == target.detokenize(ids).strip()


def train_spm(lines: list[str], path: Path, size: int) -> list[str]:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_prefix=str(path.with_suffix("")),
        vocab_size=size,
        model_type="unigram",
        minloglevel=3,
    )
    path.with_suffix(".model").rename(path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def make_opus(folder: Path, *, code: bool = True, **changes) -> transformers.MarianMTModel:
    """A folder as OPUS-MT's: two unigram models, one vocab.json with </s> first and <pad> last, no bos."""
    folder.mkdir()
    pieces = train_spm([source for source, _ in TEXT], folder / "source.spm", 40)
    pieces += train_spm([target for _, target in TEXT], folder / "target.spm", 36)
    names = ["</s>", "<unk>", *sorted(set(pieces) - {"<unk>", "<s>", "</s>"}, key=lambda p: p[::-1])]
    names += [">>fr<<", "<pad>"] if code else ["<pad>"]
    numbers = {name: number for number, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(numbers))
    facts = {"source_lang": "de", "target_lang": "en", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(names),
        "d_model": 12,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "max_position_embeddings": 48,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": len(names) - 1,
        "decoder_start_token_id": len(names) - 1,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "bad_words_ids": [[len(names) - 1]],
    }
    model = transformers.MarianMTModel(transformers.MarianConfig(**(settings | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias))
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    root = tmp_path_factory.mktemp("opus")
    model = make_opus(root / "opus")
    return model, root / "opus", find_format("marian").read(root / "opus", ImportOverrides())


def test_an_opus_model_computes_the_same_here(opus):
    _, folder, weights = opus
    validate(weights.config)
    model = weights.config.model
    assert (model.activation, model.norm_position, model.tying) == ("silu", "post", "all")
    assert (model.output_bias, model.embedding_scale, model.max_positions) == (True, True, 48)
    assert (weights.config.data.source_language, weights.config.data.target_language) == ("de", "en")
    batch = batch_of(weights)
    ours = flax_outputs(weights, batch, quantity="logits")
    theirs = find_format("marian").open(folder)(batch)
    assert np.abs(ours - theirs)[batch.target_mask].max() < 1e-4


def test_an_opus_models_search_comes_in_as_it_is(opus, tmp_path):
    _, folder, weights = opus
    search = weights.config.search
    assert (search.length_penalty, search.length_penalty_kind) == (1.0, "length")
    # A minimum length allows the end of the same translations: start, two tokens, and then the end symbol.
    settings = {"min_length": 3}
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps(settings))
    shortest = (
        find_format("marian").read(tmp_path / "copy", ImportOverrides()).config.search.min_length_offset
    )
    barred = transformers.MinLengthLogitsProcessor(3, eos_token_id=0, device="cpu")
    for length in range(1, 5):  # of translations with their end symbol
        scores = barred(torch.ones(1, length).long(), torch.zeros(1, 9))
        assert bool(torch.isinf(scores[0, 0])) == (length < shortest)


def test_an_opus_vocabulary_has_the_ids_of_vocab_json(opus, tmp_path):
    _, folder, weights = opus
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    source, target = weights.vocabs.source, weights.vocabs.target
    assert weights.vocabs.joint and source.bos_id == source.pad_id == source.size - 1
    assert (source.eos_id, source.unk_id) == (0, 1)
    english = [english for _, english in TEXT]
    # y is of the target's model alone, ß of neither, ä of the source's: here and there they are looked up.
    odd = [">>fr<< der Hund", "Hund >> Katze <<", "y in 漢字 👍 ß", "  the\u00a0  ä dog "]
    german = [line for line in LINES if "xyz" not in line]
    assert tokenizer(german + english + odd)["input_ids"] == [
        source.tokenize(line) for line in german + english + odd
    ]
    assert tokenizer(text_target=english + odd)["input_ids"] == [
        target.tokenize(line) for line in english + odd
    ]
    assert source.unk_id not in source.tokenize("y") and source.unk_id in source.tokenize("ß 漢")
    # Where a run of letters is unknown there, those of them that have an id keep it here.
    run = [source.unk_id, *source.tokenize("y")[1:-1]]
    assert source.tokenize("xy")[1:-1] == run and tokenizer("xy")["input_ids"][1:-1] == run[:1]
    # Every piece can be read on the target side, those of the source model alone included.
    every = range(2, target.size - 2)  # between </s>, <unk> and >>fr<<, <pad>
    for start in range(0, len(every), 5):
        ids = list(every[start : start + 5])
        assert tokenizer.decode(ids, skip_special_tokens=True) == target.detokenize(ids).strip()
    # A run directory keeps the two models apart, and their numbering one.
    weights.vocabs.save(tmp_path)
    again = load_vocabs(tmp_path)
    assert again.joint and again.source.fingerprint == source.fingerprint
    assert make_vocabs(weights.config.vocab, [], tmp_path).joint


def test_an_imported_model_goes_out_again(opus, tmp_path):
    _, folder, weights = opus
    target = find_format("marian")
    target.write(weights, tmp_path, "none")
    assert_same(weights, target.read(tmp_path, ImportOverrides()))
    one, other = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path))
    lines = [source for source, _ in TEXT] + [">>fr<< der Hund"]
    english = [target for _, target in TEXT]
    assert one(lines)["input_ids"] == other(lines)["input_ids"]
    assert one(text_target=english)["input_ids"] == other(text_target=english)["input_ids"]


def test_two_vocabularies_of_unlike_sizes_come_in(tmp_path):
    make_opus(tmp_path / "opus", code=False)
    folder = tmp_path / "two"
    model_facts = json.loads((tmp_path / "opus" / "config.json").read_text())
    names = {"source": [], "target": []}
    folder.mkdir()
    for side in names:
        shutil.copy(tmp_path / "opus" / f"{side}.spm", folder)
        processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        pieces = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
        names[side] = ["</s>", "<unk>", "<pad>", *sorted(pieces)]
        name = "vocab.json" if side == "source" else "target_vocab.json"
        (folder / name).write_text(json.dumps({piece: i for i, piece in enumerate(names[side])}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"separate_vocabs": True, "tokenizer_class": "MarianTokenizer"})
    )
    ids = {"pad_token_id": 2, "decoder_start_token_id": 2, "eos_token_id": 0, "forced_eos_token_id": None}
    sizes = {"vocab_size": len(names["source"]), "decoder_vocab_size": len(names["target"])}
    changes = {"share_encoder_decoder_embeddings": False, **ids, **sizes}
    model = transformers.MarianMTModel(transformers.MarianConfig(**(model_facts | changes)))
    model.save_pretrained(folder)
    weights = find_format("marian").read(folder, ImportOverrides())
    validate(weights.config)
    assert (weights.vocabs.joint, weights.config.model.tying) == (False, "target_output")
    assert not weights.config.model.output_bias
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = [line.replace("<s> </s> <pad> <unk>", "") for line in LINES]
    assert tokenizer(lines)["input_ids"] == [weights.vocabs.source.tokenize(line) for line in lines]
    assert tokenizer(text_target=lines)["input_ids"] == [
        weights.vocabs.target.tokenize(line) for line in lines
    ]


def edited(folder: Path, copy: Path, name: str = "config.json", **changes) -> Path:
    shutil.copytree(folder, copy)
    facts = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(facts | changes))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "m2m_100"}, "has model_type m2m_100; marian reads marian"),
        ({"decoder_start_token_id": 0}, "decoder_start_token_id equals eos_token_id"),
        ({"eos_token_id": 5}, "says eos_token_id 5, but the vocabulary has </s> at 0"),
        ({"vocab_size": 20}, "outside the 20 rows"),
        ({"encoder_layers": 2}, "model.encoder.layers.1.fc1.weight: missing"),
        ({"d_model": 18}, r"model.shared.weight: has shape \[\d+, 12\], expected \[\d+, 18\]"),
    ],
)
def test_folders_that_cannot_be_a_model_of_ours_are_refused(opus, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        find_format("marian").read(edited(opus[1], tmp_path / "copy", **changes), ImportOverrides())


def test_claims_that_the_files_cannot_hold_are_refused_at_once(opus, tmp_path):
    folder = shutil.copytree(opus[1], tmp_path / "foreign")
    stored = json.loads((folder / "config.json").read_text())
    for changes, words in [
        (
            {"encoder_layers": 10**9},
            "encoder_layers is '1000000000'; it must be a whole number from 1 to 1000",
        ),
        ({"d_model": None}, "model.model_dim 1024 is not divisible by model.num_heads 3"),
        ({"vocab_size": 10**7}, "parameters, but the files have"),
        (
            {"decoder_start_token_id": 10**6},
            "decoder_start_token_id is 1000000; it must be an id below the",
        ),
        ({"pad_token_id": [1]}, "pad_token_id is '[1]'"),
        ({"dropout": float("nan")}, "dropout is 'nan'; it must be a number from 0 to 0.999"),
        ({"activation_function": ["silu"]}, "activation_function is \"['silu']\"; supported"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantized models are",
        ),
    ]:
        (folder / "config.json").write_text(json.dumps(stored | changes))
        with pytest.raises(UserError, match=re.escape(words)):
            find_format("marian").read(folder, ImportOverrides())
    # Kernels that are not installed have no part in the result.
    (folder / "config.json").write_text(json.dumps(stored | {"attn_implementation": "no_such_kernel"}))
    find_format("marian").open(folder)
    (folder / "config.json").write_text(json.dumps(stored))
    tensors = safetensors.load_file(folder / "model.safetensors")
    whole = {"final_logits_bias": tensors["final_logits_bias"].astype(np.int32)}
    safetensors.save_file(tensors | whole, folder / "model.safetensors")
    with pytest.raises(UserError, match="final_logits_bias has the type torch.int32"):
        find_format("marian").read(folder, ImportOverrides())
    for content, words in [
        (b"[]", "must contain a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"num_beams": "4"}', "num_beams is '4'; it must be a whole number"),
        (b'{"length_penalty": NaN}', "length_penalty is 'nan'"),
    ]:
        safetensors.save_file(tensors, folder / "model.safetensors")
        (folder / "generation_config.json").write_bytes(content)
        with pytest.raises(UserError, match=re.escape(words)):
            find_format("marian").read(folder, ImportOverrides())


def test_files_that_are_missing_are_named(opus, tmp_path):
    read = find_format("marian").read
    folder = edited(opus[1], tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model.safetensors does not exist, nor does .*; give the folder"):
        read(folder, ImportOverrides())
    (folder / "model.safetensors").write_bytes(b"junk" * 9)
    with pytest.raises(UserError, match="model.safetensors is damaged"):
        read(folder, ImportOverrides())
    shutil.copy(opus[1] / "model.safetensors", folder)
    (folder / "target.spm").write_bytes(b"\xff" * 9)
    with pytest.raises(UserError, match="target.spm is not a SentencePiece model"):
        read(folder, ImportOverrides())
    (folder / "target.spm").unlink()
    with pytest.raises(UserError, match="target.spm cannot be read: No such file"):
        read(folder, ImportOverrides())


def test_language_tags_are_single_pieces_there_too(tmp_path):
    class Tagged(list):
        tags = (">>fr<<", ">>de<<", "<from:en>")

    config = Config(data=DataConfig(dataset="a:en-fr,a:en-de", source_tags=True))
    vocabs = make_vocabs(VocabConfig(size=320), Tagged(Pairs()), tmp_path / "vocab")
    (tmp_path / "out").mkdir()
    write_tokenizer(vocabs, config, tmp_path / "out")
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "out")
    assert set(tokenizer.supported_language_codes) == {">>fr<<", ">>de<<"}
    lines = [f"{tags} the dog" for tags in (">>fr<< <from:en>", ">>de<< <from:en>", ">>fr<<", "")]
    found = tokenizer(lines)["input_ids"]
    assert found == [vocabs.source.tokenize(line) for line in lines]
    assert [len(ids) - len(found[3]) for ids in found] == [2, 2, 1, 0]
    facts = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (facts["source_lang"], facts["target_lang"]) == ("en", "fr+de")
