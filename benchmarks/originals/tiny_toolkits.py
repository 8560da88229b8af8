"""Tiny random models in files as fairseq, OpenNMT-py, eole, Marian and Joey NMT save them.

From the layouts in the sources of each: fairseq/trainer.py and data/dictionary.py,
onmt/models/model_saver.py, eole/models/model_saver.py, marian's expression_graph.h and default_vocab.cpp,
joeynmt/training.py.
"""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import yaml
from safetensors.torch import save_file

from benchmarks.originals.toolkit_twins import Fairseq, Joey, Marian, Onmt, as_eole, randomize

GERMAN = [
    "der kleine Hund schläft im Garten .",
    "die alte Katze trinkt heute Milch .",
    "wir lesen ein gutes Buch .",
    "Anna kauft zwei rote Äpfel .",
]
ENGLISH = [
    "the small dog sleeps in the garden .",
    "the old cat drinks milk today .",
    "we read a good book .",
    "Anna buys two red apples .",
]


def train_pieces(lines: list[str], kind: str = "bpe", **options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 3),
        model_writer=model,
        model_type=kind,
        minloglevel=3,
        **{"vocab_size": 90} | options,
    )
    return model.getvalue()


def pieces_of(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


PAIRS = list(zip(GERMAN, ENGLISH, strict=True))


def fairseq_args(**changes: Any) -> argparse.Namespace:
    sizes = {"embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 2, "normalize_before": False}
    sizes |= {"learned_pos": False}
    args = {
        "arch": "transformer_iwslt_de_en",
        "task": "translation",
        "source_lang": "de",
        "target_lang": "en",
        "activation_fn": "relu",
        "dropout": 0.2,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "relu_dropout": 0.0,
        "max_source_positions": 50,
        "max_target_positions": 50,
        "share_all_embeddings": False,
        "share_decoder_input_output_embed": True,
        "layernorm_embedding": False,
        "no_scale_embedding": False,
        "adaptive_softmax_cutoff": None,
        "adaptive_input": False,
        "no_token_positional_embeddings": False,
        "encoder_layerdrop": 0,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "data": "data-bin/iwslt14",
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()},
    }
    for name, value in changes.items():
        both = name in sizes
        args |= {f"{side}_{name}": value for side in ("encoder", "decoder")} if both else {name: value}
    return argparse.Namespace(**args)


def write_fairseq(folder: Path, args: argparse.Namespace, *, modern: bool = True, spm: bool = True) -> Any:
    folder.mkdir()
    joint = args.share_all_embeddings
    sizes = []
    for language, lines in (("de", GERMAN), ("en", ENGLISH)):
        lines = GERMAN + ENGLISH if joint else lines
        model = train_pieces(lines)
        pieces = pieces_of(model)[3:] if spm else sorted({word for line in lines for word in line.split()})
        rows = [f"{piece} {100 - number}\n" for number, piece in enumerate(pieces)]
        while (len(rows) + 4) % 8:
            rows.append(f"madeupword{len(rows):04d} 0\n")
        (folder / f"dict.{language}.txt").write_text("".join(rows), encoding="utf-8")
        if spm:
            name = "sentencepiece.bpe.model" if joint else f"spm.{language}.model"
            (folder / name).write_bytes(model)
        sizes.append(len(rows) + 4)
    twin = randomize(Fairseq(args, *sizes))
    more = {"optimizer_history": [{"num_updates": 7}], "extra_state": {"epoch": 1, "val_loss": 2.5}}
    if modern:
        config = {"_name": None, "model": args, "task": {"_name": "translation", "source_lang": "de"}}
        state = {"args": None, "cfg": config, "model": twin.state_dict(), "task_state": {}} | more
    else:
        state = {"args": args, "model": twin.state_dict()} | more
    torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=modern)
    return twin


def onmt_options(**changes: Any) -> argparse.Namespace:
    options = {
        "model_type": "text",
        "model_task": "seq2seq",
        "encoder_type": "transformer",
        "decoder_type": "transformer",
        "enc_layers": 2,
        "dec_layers": 1,
        "enc_hid_size": 16,
        "dec_hid_size": 16,
        "src_word_vec_size": 16,
        "tgt_word_vec_size": 16,
        "heads": 2,
        "transformer_ff": 24,
        "self_attn_type": "scaled-dot",
        "position_encoding": True,
        "position_encoding_type": "SinusoidalInterleaved",
        "max_relative_positions": 0,
        "pos_ffn_activation_fn": "relu",
        "add_qkvbias": True,
        "add_ffnbias": True,
        "norm_eps": 1e-6,
        "layer_norm": "standard",
        "copy_attn": False,
        "parallel_residual": False,
        "share_embeddings": False,
        "share_decoder_embeddings": False,
        "dropout": [0.1],
        "attention_dropout": [0.1],
        "lora_layers": [],
        "generator_function": "softmax",
    }
    return argparse.Namespace(**options | changes)


def write_onmt(folder: Path, opt: argparse.Namespace, *, symbols: bool = True, spm: bool = True) -> Any:
    """A checkpoint as OpenNMT-py 3 saves it (without symbols in sources: as version 2); returns the twin."""
    folder.mkdir()
    vocab: dict[str, Any] = {}
    for side, lines in (("src", GERMAN), ("tgt", ENGLISH)):
        model = train_pieces(GERMAN + ENGLISH if opt.share_embeddings else lines)
        pieces = pieces_of(model)[3:] if spm else sorted({word for line in lines for word in line.split()})
        first = ["<unk>", "<blank>", *(["<s>", "</s>"] if symbols or side == "tgt" else [])]
        vocab[side] = [*first, *pieces, "averyunlikelytoken0"]
        if spm:
            name = "joint.model" if opt.share_embeddings else f"{side}.model"
            (folder / name).write_bytes(model)
    twin = randomize(Onmt(opt, len(vocab["src"]), len(vocab["tgt"])))
    state = twin.state_dict()
    checkpoint = {
        "model": {name: one for name, one in state.items() if "generator" not in name},
        "generator": twin.generator.state_dict(),
        "vocab": vocab | {"data_task": "seq2seq", "decoder_start_token": "<s>"},
        "opt": opt,
        "optim": {"training_step": 10},
    }
    if not symbols:
        del checkpoint["vocab"]["decoder_start_token"]
        checkpoint["generator"] = {f"0.{name}": one for name, one in checkpoint["generator"].items()}
        norms = {".weight": ".a_2", ".bias": ".b_2"}
        checkpoint["model"] = {
            name.replace(end, norms[end]) if ".layer_norm" in name else name: one
            for name, one in checkpoint["model"].items()
            for end in [f".{name.rpartition('.')[2]}"]
        }
    torch.save(checkpoint, folder / "model_step_10.pt")
    return twin


def marian_options(**changes: Any) -> dict:
    options = {
        "type": "transformer",
        "dim-emb": 16,
        "enc-depth": 2,
        "dec-depth": 2,
        "dec-cell": "gru",
        "transformer-heads": 2,
        "transformer-dim-ffn": 24,
        "transformer-ffn-depth": 2,
        "transformer-ffn-activation": "swish",
        "transformer-preprocess": "",
        "transformer-postprocess": "dan",
        "transformer-postprocess-emb": "d",
        "transformer-postprocess-top": "",
        "transformer-decoder-autoreg": "self-attention",
        "transformer-no-projection": False,
        "transformer-train-positions": False,
        "transformer-tied-layers": [],
        "transformer-guided-alignment-layer": "last",
        "tied-embeddings": False,
        "tied-embeddings-src": False,
        "tied-embeddings-all": False,
        "lemma-dim-emb": 0,
        "version": "v1.12.0",
    }
    return options | {name.replace("_", "-"): value for name, value in changes.items()}


def write_marian(folder: Path, options: dict, *, yml: bool = False) -> Marian:
    """A folder as Marian leaves it, with SentencePiece or with vocabularies in YAML; returns the twin."""
    folder.mkdir()
    joint = options["tied-embeddings-all"] or options["tied-embeddings-src"]
    specials = {"bos_id": -1, "pad_id": -1, "eos_id": 0, "unk_id": 1}
    sizes = []
    for name, lines in (("de", GERMAN), ("en", ENGLISH)):
        lines = GERMAN + ENGLISH if joint else lines
        size = 60 - 8 * len(sizes) * (not joint)
        model = train_pieces(lines, "unigram", vocab_size=size, hard_vocab_limit=False, **specials)
        pieces = pieces_of(model)
        sizes.append(len(pieces))
        file = "vocab" if joint else f"vocab.{name}"
        if not yml:
            (folder / f"{file}.spm").write_bytes(model)
        else:  # as Marian writes it: each piece quoted or not
            ids = yaml.safe_dump({piece: number for number, piece in enumerate(pieces)}, allow_unicode=True)
            (folder / f"{file}.yml").write_text(ids, encoding="utf-8")
            (folder / f"{'source' if name == 'de' else 'target'}.spm").write_bytes(model)
    names = ["vocab"] * 2 if joint else ["vocab.de", "vocab.en"]
    listed = {"models": ["model.npz"], "vocabs": [f"/data/{one}.{'yml' if yml else 'spm'}" for one in names]}
    (folder / "model.npz.decoder.yml").write_text(yaml.safe_dump(listed))
    twin = Marian(options, (sizes[0], sizes[1]))
    text = np.frombuffer(yaml.safe_dump(options).encode() + b"\0", np.int8)
    np.savez(folder / "model.npz", **twin.arrays, **{"special:model.yml": text})
    np.savez(folder / "model.npz.optimizer.npz", adam_mt=np.zeros(3))
    return twin


def eole_model(**changes: Any) -> dict:
    stack = {
        "layers": 1,
        "heads": 2,
        "hidden_size": 16,
        "transformer_ff": 24,
        "mlp_activation_fn": "gated-silu",
        "norm_eps": 1e-6,
        "add_qkvbias": True,
        "add_ffnbias": True,
    }
    model = {
        "architecture": "transformer",
        "embeddings": {"word_vec_size": 16, "position_encoding_type": "SinusoidalInterleaved"},
        "encoder": {"encoder_type": "transformer", **stack},
        "decoder": {"decoder_type": "transformer", **stack, "layers": 2},
        "hidden_size": 16,
        "share_embeddings": False,
        "share_decoder_embeddings": True,
    }
    for name, value in changes.items():
        if name in ("encoder", "decoder", "embeddings"):
            model[name] = model[name] | value
        else:
            model[name] = value
    return model


def write_eole(folder: Path, model: dict, *, spm: bool = True) -> Any:
    onmt = onmt_options(
        enc_layers=1,
        dec_layers=2,
        pos_ffn_activation_fn="silu",
        share_decoder_embeddings=model["share_decoder_embeddings"],
    )
    twin = write_onmt(folder, onmt, spm=spm)
    checkpoint = torch.load(folder / "model_step_10.pt", weights_only=False)
    (folder / "model_step_10.pt").unlink()
    state = as_eole(twin.state_dict())
    if model["share_decoder_embeddings"]:
        del state["generator.weight"]
    state |= {f"decoder.transformer_layers.{n}.layer_scalar": torch.ones(1) for n in range(2)}
    save_file(state, folder / "model.00.safetensors")
    lists = {side: checkpoint["vocab"][side] for side in ("src", "tgt")}
    specials = {"bos_token": "<s>", "pad_token": "<blank>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocab = lists | {"decoder_start_token": "<s>", "specials": specials}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    config = {"model": model, "training": {"batch_size": 64}, "transforms": ["sentencepiece"]}
    (folder / "config.json").write_text(json.dumps(config))
    return twin


def joey_config(**changes: Any) -> dict:
    stack = {
        "type": "transformer",
        "num_layers": 2,
        "num_heads": 2,
        "embeddings": {"embedding_dim": 16, "scale": True, "dropout": 0.0},
        "hidden_size": 16,
        "ff_size": 24,
        "dropout": 0.1,
        "layer_norm": "pre",
        "activation": "relu",
    }
    model = {"tied_embeddings": False, "tied_softmax": True}
    model |= {name: changes.pop(name) for name in [*model] if name in changes}
    model |= {side: stack | changes for side in ("encoder", "decoder")}
    data = {side: {"lang": lang, "lowercase": False} for side, lang in (("src", "de"), ("trg", "en"))}
    return {"name": "tiny", "joeynmt_version": "2.3.0", "data": data, "model": model}


def write_joey(folder: Path, config: dict, *, spm: bool = True) -> Joey:
    folder.mkdir()
    joint = config["model"]["tied_embeddings"]
    sizes = []
    for side, lines in (("src", GERMAN), ("trg", ENGLISH)):
        model = train_pieces(GERMAN + ENGLISH if joint else lines)
        pieces = pieces_of(model)[3:] if spm else sorted({word for line in lines for word in line.split()})
        names = ["<unk>", "<pad>", "<s>", "</s>", *pieces]
        (folder / f"{side}_vocab.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        if spm:
            (folder / ("sp.model" if joint else f"sp.{side}.model")).write_bytes(model)
        sizes.append(len(names))
    twin = randomize(Joey(config["model"], *sizes))
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    stats = {"best_ckpt_score": np.float64(3.5), "steps": 10}  # an object of numpy
    state = {"model_state": twin.state_dict(), "optimizer_state": {}, "stats_state": stats}
    torch.save(state, folder / "10.ckpt")
    (folder / "best.ckpt").symlink_to("10.ckpt")
    return twin
