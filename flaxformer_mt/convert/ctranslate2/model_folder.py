"""Format ctranslate2: writes a model folder for CTranslate2; export only.

Contains the files of the folder, the models that CTranslate2 supports, and the forward function for the
parity check. The contents of model.bin come from ctranslate2/spec.py.

Files: model.bin; config.json (CTranslate2's fields and the entry of this package); shared_vocabulary.json, or
source_vocabulary.json and target_vocabulary.json; the SentencePiece models source.spm and target.spm; vocab/
as in every format; with a shortlist vmap.txt, for translate_batch(..., use_vmap=True). A source consists of
SentencePiece pieces without special tokens; CTranslate2 appends the end symbol. The folder of a pretrained
model has its own tokenizer in vocab/tokenizer in place of the SentencePiece models, and sources and target
prefixes begin with the tags of languages that the model has.

    source = SentencePieceProcessor(model_file="DIR/source.spm").encode(line, out_type=str)
    translator = ctranslate2.Translator("DIR")
    result = translator.translate_batch([source], beam_size=1, min_decoding_length=0, max_input_length=0,
                                        suppress_sequences=[["<pad>"], ["<s>"]], max_decoding_length=N)

This call gives the tokens of this package's greedy search, up to rounding. N is the length limit in tokens
with the end symbol. This package has one limit per source, int(search.max_length_ratio * length +
search.max_length_offset); CTranslate2 has one limit per call. CTranslate2 raises an error for sequences
longer than the model's position table. The other arguments replace defaults that differ from this package's
search: min_decoding_length=1 forbids empty translations, max_input_length=1024 silently truncates long
sources, and pad and bos, which this package's search never selects, are ordinary tokens there. CTranslate2
renormalizes the probabilities after suppression, so its scores are slightly higher.

Beam search differs. CTranslate2 divides a log-probability by length ** length_penalty (default 1), this
package by ((5 + length) / 6) ** length_penalty; both count the end symbol. CTranslate2 stops when beam_size *
patience hypotheses have ended, this package when no unfinished hypothesis can win. CTranslate2 replaces ended
hypotheses by the next best candidates, this package does not. To rank hypotheses as this package does, pass
num_hypotheses=beam_size, length_penalty=0 and return_scores=True, and divide each score by ((5 + length) / 6)
** length_penalty, where length is len(hypothesis) + 1; the hypotheses may still differ.
"""

from pathlib import Path

import ctranslate2
import numpy as np

from flaxformer_mt.config import Config
from flaxformer_mt.convert.ctranslate2.spec import make_spec, quantize
from flaxformer_mt.convert.format_interface import (
    VOCAB_NAME,
    Format,
    Given,
    Outputs,
    Weights,
    find_vocabs,
    unsupported_fields,
    write_config_json,
)
from flaxformer_mt.errors import UserError
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import PretrainedVocab, Vocab, Vocabs

_NAME = "ctranslate2"
_QUANTIZATIONS = (
    "none",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
)


def _problems(config: Config) -> list[str]:
    if config.model.architecture != "encoder_decoder":
        return [
            f"model.architecture is {config.model.architecture}; supported: encoder_decoder "
            "(for other architectures use --format=torch)"
        ]
    return unsupported_fields(
        config,
        {
            "model.decoder_self_attention": ("attention",),
            "model.positions": ("sinusoidal", "sinusoidal_halves", "learned", "rotary", "relative"),
            "model.attention_scale": (True, False),
            "model.source_end": (True, False),
            "model.embedding_bias": (False,),
            "model.padding_mask": ("source", "both"),
        },
    )


def _write(weights: Weights, folder: Path, quantization: str) -> None:
    vocabs = weights.vocabs
    spec = make_spec(weights.config.model, weights.leaves)
    tokens = _special_tokens(vocabs)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = tokens
    spec.config.decoder_start_token = spec.config.bos_token
    spec.config.add_source_bos = False
    spec.config.add_source_eos = weights.config.model.source_end
    spec.register_source_vocabulary(vocabs.source.pieces(range(vocabs.source.size)))
    spec.register_target_vocabulary(vocabs.target.pieces(range(vocabs.target.size)))
    quantize(spec, quantization)
    spec.save(str(folder))
    write_config_json(weights, folder, _NAME, spec.config.to_dict())
    vocabs.save(folder / VOCAB_NAME)
    if not isinstance(vocabs.target, PretrainedVocab):
        vocabs.source.save(folder / "source.spm")
        vocabs.target.save(folder / "target.spm")


def _special_tokens(vocabs: Vocabs) -> list[str]:
    """Return spellings of unk, bos and eos.

    Raises:
      UserError: the spellings differ between the vocabularies; CTranslate2 has one for both languages.
    """
    source, target = (v.pieces([v.unk_id, v.bos_id, v.eos_id]) for v in (vocabs.source, vocabs.target))
    if source != target:
        raise UserError(
            f"{_NAME} cannot express this model: unk, bos and eos are {', '.join(source)} in the source "
            f"vocabulary and {', '.join(target)} in the target vocabulary; they must be equal"
        )
    return target


def _open(folder: Path) -> Outputs:
    # "default" computes in the stored type of the weights, or in the nearest type that this CPU supports.
    translator = ctranslate2.Translator(str(folder), device="cpu", compute_type="default")
    vocabs = find_vocabs(folder, Given())

    def outputs(batch: Batch) -> np.ndarray:
        source_mask, target_mask = np.asarray(batch.source_mask), np.asarray(batch.target_mask)
        sources = [
            _without_eos(row[mask], vocabs.source)
            for row, mask in zip(batch.source, source_mask, strict=True)
        ]
        targets = [
            _without_eos(row[mask], vocabs.target)
            for row, mask in zip(batch.target_out, target_mask, strict=True)
        ]
        scored = translator.score_batch(sources, targets, max_input_length=0)
        log_probs = np.zeros(target_mask.shape, np.float32)
        for row, (mask, result) in enumerate(zip(target_mask, scored, strict=True)):
            log_probs[row, mask] = result.log_probs
        return log_probs

    return outputs


def _without_eos(ids: np.ndarray, vocab: Vocab) -> list[str]:
    """Return pieces of a sentence without its end symbol, which CTranslate2 appends itself.

    Raises:
      ValueError: the last id is not the end symbol.
    """
    if not len(ids) or ids[-1] != vocab.eos_id:
        raise ValueError(f"sentences must end in eos, {vocab.eos_id}, but got {ids.tolist()}")
    return vocab.pieces(ids[:-1])


FORMAT = Format(
    name=_NAME,
    problems=_problems,
    write=_write,
    open=_open,
    read=None,
    quantity="log_probs",
    quantizations=_QUANTIZATIONS,
    shortlist_name="vmap.txt",
)
