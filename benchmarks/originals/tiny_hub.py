"""Tiny random models of the Hub's families, and tokenizers of a small corpus, as transformers saves them."""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import torch
import transformers

CORPUS = [
    "der kleine Hund schläft im Garten .",
    "the small dog sleeps in the garden .",
    "die alte Katze trinkt heute Milch .",
    "the old cat drinks milk today .",
    "wir lesen ein gutes Buch .",
    "we read a good book .",
    "Anna kauft zwei rote Äpfel .",
    "Anna buys two red apples .",
    "le petit chien dort dans le jardin .",
    "nous lisons un bon livre .",
]
LINES = [
    *CORPUS[::2],
    "  führend  und   folgend ",
    "unbekannt: 漢字 xyz",
    "Ätz\u00a0weiß",
    "a",
    "der der der",
]

_BART_SIZES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_T5_SIZES = {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "dropout_rate": 0.0,
}


def train_sentencepiece(kind: str, size: int, **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        vocab_size=size,
        model_type=kind,
        minloglevel=3,
        **options,
    )
    return model.getvalue()


def pieces_of(model: bytes) -> list[tuple[str, float]]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [(processor.id_to_piece(i), processor.get_score(i)) for i in range(processor.get_piece_size())]


def train_bpe(*, byte_level: bool, specials: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    if byte_level:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
        alphabet = []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340 if byte_level else 90,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def randomize(model: Any, seed: int = 0) -> Any:
    """Move parameters away from their initial ones, zeros and ones; arrays that are shared stay so.

    Not far: float32 sums of a network with saturated softmaxes differ by 1e-5 in any two orders.
    """
    torch.manual_seed(seed)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(noise * (0.5 if "relative" in name else 0.1))
    return model.eval()


def make_m2m_100(folder: Path) -> Any:
    model = train_sentencepiece("bpe", 80)
    folder.mkdir(parents=True)
    (folder / "sentencepiece.bpe.model").write_bytes(model)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(piece for piece, _ in pieces_of(model)[3:])]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    tokenizer = transformers.M2M100Tokenizer(
        str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"), src_lang="de", tgt_lang="en"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(vocab_size=len(names) + 100 + 8, **_BART_SIZES)
    return _save(transformers.M2M100ForConditionalGeneration(config), folder)


def make_nllb(folder: Path) -> Any:
    vocab, merges = train_bpe(byte_level=False, specials=["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer = transformers.NllbTokenizer(
        vocab=vocab, merges=merges, src_lang="deu_Latn", tgt_lang="eng_Latn"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.M2M100Config(vocab_size=len(tokenizer) + 3, **_BART_SIZES)
    return _save(transformers.M2M100ForConditionalGeneration(config), folder)


def make_mbart_50(folder: Path) -> Any:
    tokenizer = transformers.MBart50Tokenizer(
        vocab=pieces_of(train_sentencepiece("unigram", 70)), src_lang="de_DE", tgt_lang="en_XX"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.MBartConfig(
        vocab_size=len(tokenizer),
        scale_embedding=True,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **_BART_SIZES,
    )
    model = transformers.MBartForConditionalGeneration(config)
    with torch.no_grad():
        model.final_logits_bias.add_(
            torch.randn(1, len(tokenizer), generator=torch.Generator().manual_seed(1))
        )
    return _save(model, folder)


def make_bart(folder: Path) -> Any:
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    vocab, merges = train_bpe(byte_level=True, specials=specials)
    vocab["<mask>"] = len(vocab)
    tokenizer = transformers.BartTokenizer(vocab=vocab, merges=merges)
    tokenizer.save_pretrained(folder)
    config = transformers.BartConfig(
        vocab_size=len(tokenizer), forced_bos_token_id=0, forced_eos_token_id=None, **_BART_SIZES
    )
    return _save(transformers.BartForConditionalGeneration(config), folder)


def make_t5(folder: Path) -> Any:
    model = train_sentencepiece("unigram", 70, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(model)
    tokenizer = transformers.T5Tokenizer(vocab=pieces_of(model), extra_ids=4)
    tokenizer.save_pretrained(folder)
    tasks = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    config = transformers.T5Config(
        vocab_size=len(tokenizer) + 5, decoder_start_token_id=0, task_specific_params=tasks, **_T5_SIZES
    )
    return _save(transformers.T5ForConditionalGeneration(config), folder)


def make_mt5(folder: Path) -> Any:
    """Gated GELU, tied as transformers 5 ties all of them, and without the division of the output."""
    model = train_sentencepiece("unigram", 70, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    transformers.T5Tokenizer(vocab=pieces_of(model), extra_ids=0).save_pretrained(folder)
    config = transformers.MT5Config(vocab_size=75, **_T5_SIZES)
    return _save(transformers.MT5ForConditionalGeneration(config), folder)


def make_madlad(folder: Path) -> Any:
    """T5 1.1: gated, an output matrix of its own; <unk> begins targets, <s> is padding, tags are pieces."""
    languages = [f"<2{code}>" for code in ("de", "en", "fr")]
    model = train_sentencepiece("unigram", 70, user_defined_symbols=languages)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces_of(model), unk_id=0))
    metaspace = {"replacement": "▁", "prepend_scheme": "always"}
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace(**metaspace)]
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace(**metaspace)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", pad_token="<s>"
    ).save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=70,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
        **_T5_SIZES,
    )
    model = transformers.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(70, 32))
    return _save(model, folder)


def make_byt5(folder: Path) -> Any:
    transformers.ByT5Tokenizer(extra_ids=10).save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=272,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        **_T5_SIZES,
    )
    return _save(transformers.T5ForConditionalGeneration(config), folder)


def _save(model: Any, folder: Path) -> Any:
    randomize(model).save_pretrained(folder)
    return model


MAKERS = {
    "m2m_100": make_m2m_100,
    "nllb": make_nllb,
    "mbart_50": make_mbart_50,
    "bart": make_bart,
    "t5": make_t5,
    "mt5": make_mt5,
    "madlad": make_madlad,
    "byt5": make_byt5,
}


STEPS = 150


def train_briefly(
    model: Any, sources: list[list[int]], targets: list[list[int]], *, start: int, pad: int
) -> None:
    """Fit a model to few pairs, so that its translations end, and two searches do not meet ties."""

    def fill(rows: list[list[int]], filler: int) -> torch.Tensor:
        longest = max(map(len, rows))
        return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])

    source, labels = fill(sources, pad), fill(targets, -100)
    inputs = fill([[start, *row[:-1]] for row in targets], pad)
    mask = fill([[1] * len(row) for row in sources], 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    model.train()
    for _ in range(STEPS):
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
