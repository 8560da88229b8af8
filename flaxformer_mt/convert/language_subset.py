"""Some of the languages of a pretrained model of many: their directions, and the pieces of their texts."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.config.directions import choose_tags, choose_target_tag, find_directions
from flaxformer_mt.convert.format_interface import Weights
from flaxformer_mt.errors import UserError
from flaxformer_mt.text_io.lines import open_input, read_lines
from flaxformer_mt.translation.language_tags import check_language
from flaxformer_mt.vocab import PretrainedVocab, Vocabs


def choose_languages(weights: Weights, languages: Sequence[str]) -> Config:
    """Return the config of a model of many languages for the directions between some of them.

    A model without tags translates from the first language to the second one, whatever its files say.

    Raises:
      UserError: fewer than two languages, or the model does not have one.
    """
    data, tags = weights.config.data, weights.vocabs.target.tags
    if len(set(languages)) < 2 or len(set(languages)) < len(languages):
        raise UserError(f"--languages is {','.join(languages)}; give two different ones, as de,en")
    if data.tag_style == "opus" and len(languages) > 2:
        raise UserError(
            f"--languages is {','.join(languages)}, but this model has no tags of languages; give the two "
            "that it translates between, as de,en"
        )
    source, target = languages[:2]
    data = dataclasses.replace(data, source_language=source, target_language=target)
    if len(languages) > 2:
        pairs = itertools.permutations(languages, 2)
        data = dataclasses.replace(data, dataset=",".join(f"parallel_text:{a}-{b}" for a, b in pairs))
    if data.tag_style == "t5":
        _list_tags(data)  # raises for a language that T5 has no name for
    elif tags:
        for language in languages:
            check_language(language, "--languages", data, tags)
    return dataclasses.replace(weights.config, data=data)


def check_cuttable(weights: Weights, texts: Sequence[str | Path]) -> None:
    """Raise UserError if `cut_vocabulary` cannot cut the vocabulary of a model to texts."""
    if not isinstance(weights.vocabs.target, PretrainedVocab):
        raise UserError(f"--vocab_text is {texts[0]}, but this model has no vocabulary that can be cut")


def cut_vocabulary(weights: Weights, texts: Sequence[str | Path], languages: Sequence[str] | None) -> Weights:
    """Return a pretrained model with the pieces that texts have, and the tags of some languages (None: all).

    Raises:
      UserError: a file cannot be read.
    """
    vocab = weights.vocabs.target
    assert isinstance(vocab, PretrainedVocab)
    tags = None if languages is None else _list_tags(weights.config.data)
    cut = vocab.cut(_read_texts(texts), tags=tags)
    kept = np.asarray(cut.facts.kept)
    leaves = dict(weights.leaves)
    for path, leaf in leaves.items():
        if path.endswith("_embedding/embedding") or path == "output_bias":
            leaves[path] = leaf[kept]
        elif path == "output_kernel":
            leaves[path] = leaf[:, kept]
    section = dataclasses.replace(
        weights.config.vocab,
        size=cut.size,
        **{name: getattr(cut, name) for name in ("pad_id", "bos_id", "eos_id", "unk_id")},
    )
    config = dataclasses.replace(weights.config, vocab=section)
    return dataclasses.replace(weights, config=config, vocabs=Vocabs(cut, cut, joint=True), leaves=leaves)


def _list_tags(data: DataConfig) -> list[str]:
    """Return the tags of all directions, on both sides."""
    tags = [
        tag
        for one in find_directions(data)
        for tag in (*choose_tags(data, one), choose_target_tag(data, one))
    ]
    return [tag for tag in dict.fromkeys(tags) if tag]


def _read_texts(paths: Sequence[str | Path]) -> Iterator[str]:
    for path in paths:
        with open_input(str(path)) as stream:
            yield from read_lines(stream, name=str(path), invalid_utf8="replace")
