"""Converts between the search options of a config and the options of `generate` in transformers.

Reads and writes generation_config.json, which reproduces this package's search as far as possible: the same
number of beams, the same forbidden symbols (padding, the start symbol and those of the config; neither system
renormalizes the other probabilities), no forced symbol at the length limit. Options that the other system
lacks are reported. The following differences are not reported:
 * Length penalty. This package divides a log-probability by ((5 + n) / 6) ** alpha, transformers by
   n ** length_penalty; n is the length with the end symbol in both. The exported length_penalty is alpha *
   25 / 30, so that at 25 tokens both systems favor longer translations equally. With
   search.length_penalty_kind=length, which imported models have, both formulas are the same.
 * Length limit. The exported max_length is the limit for a source of data.max_source_length tokens.
 * Stopping. With early_stopping=false, transformers computes the penalty of the best unfinished hypothesis at
   its current length, this package at the length limit of the sentence. With early_stopping="never",
   transformers would compute it at max_length, and most searches would run up to that length.
"""

from pathlib import Path
from typing import Any

from flaxformer_mt.config import Config, SearchConfig
from flaxformer_mt.convert.foreign_files import check_fields
from flaxformer_mt.convert.formats import changed_options, read_config_json, write_json
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.translation.constraints import make_symbols
from flaxformer_mt.vocab import Vocab

_FILE = "generation_config.json"
# Length in tokens at which both length penalties favor longer translations equally.
_TYPICAL_LENGTH = 25
# Value of top_k in `generate` if no file sets it.
_DEFAULT_TOP_K = 50
# Options of `generate` without a counterpart here -> the values, besides None, that have no effect.
_FOREIGN: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "exponential_decay_length_penalty": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "begin_suppress_tokens": ([],),
    "guidance_scale": (1,),
    "stop_strings": (),
    "dola_layers": (),
    "watermarking_config": (),
}

# Field -> whether it is a whole number, its smallest and its largest accepted value.
_NUMBERS: dict[str, tuple[type, float, float]] = {
    "num_beams": (int, 1, 1000),
    "length_penalty": (float, -1000, 1000),
}


def special_ids(vocab: Vocab) -> dict[str, Any]:
    return {
        "pad_token_id": vocab.pad_id,
        "bos_token_id": None if vocab.bos_id == vocab.pad_id else vocab.bos_id,
        "eos_token_id": vocab.eos_id,
        "decoder_start_token_id": vocab.bos_id,
    }


def write_generation(config: Config, vocab: Vocab, folder: Path, *, longest_target: int) -> None:
    search = config.search
    settings = {
        **special_ids(vocab),
        "forced_eos_token_id": None,
        "bad_words_ids": [[number] for number in sorted(set(make_symbols(vocab, search).banned))],
        "num_beams": search.beam_size if search.method == "beam" else 1,
        "length_penalty": round(length_power(search), 6),
        "early_stopping": search.method == "beam" and search.stopping == "inexact",
        "no_repeat_ngram_size": search.no_repeat_ngram,
        # Both lengths include the start symbol; min_length does not include the end symbol.
        "min_length": search.min_length_offset,
        "max_length": 1 + longest_target,
    }
    if search.method == "sample":
        names = ("temperature", "top_k", "top_p", "min_p")
        settings |= {"do_sample": True} | {name: getattr(search, name) for name in names}
    write_json(settings, folder / _FILE)


def length_power(search: SearchConfig) -> float:
    """Return the length penalty for systems that divide log-probabilities by length ** penalty.

    For search.length_penalty_kind=gnmt, both penalties favor longer translations equally at 25 tokens.
    """
    gnmt = search.length_penalty_kind == "gnmt"
    return search.length_penalty * (_TYPICAL_LENGTH / (5 + _TYPICAL_LENGTH) if gnmt else 1)


def lost_options(search: SearchConfig) -> list[str]:
    """Return the search options that are set but that generation_config.json cannot express."""
    names = ["rerank", "mbr", "min_length_ratio"]
    if search.method == "beam":
        names += ["coverage_penalty", "diversity_groups"] + ["patience"] * (search.stopping == "inexact")
    return changed_options(search, names)


def read_search(folder: Path, fields: dict[str, Any], vocab: Vocab) -> SearchConfig:
    path = folder / _FILE
    settings = read_config_json(folder, _FILE) if path.is_file() else fields
    check_fields(settings, _NUMBERS, path)
    try:
        search, ignored = _make_search(settings, vocab)
    except (TypeError, ValueError) as error:
        raise UserError(f"the search options of {folder} have a value of a wrong type: {error}") from error
    if ignored:
        warn_user(
            f"{folder} sets search options that this package does not have, so that its translations can "
            f"differ: {'; '.join(ignored)}"
        )
    return search


def _make_search(settings: dict[str, Any], vocab: Vocab) -> tuple[SearchConfig, list[str]]:
    """Convert settings of transformers to a search config; also return descriptions of ignored settings."""

    def number(name: str, default: float) -> float:
        value = settings.get(name)
        return default if value is None else float(value)

    penalty = number("length_penalty", 1)
    beams, samples = int(number("num_beams", 1)), bool(settings.get("do_sample"))
    default = SearchConfig()
    suppressed, sequences = _suppressed(settings, vocab)
    # An end before `min_length` is forbidden; `min_new_tokens` does not count the end symbol.
    shortest = max(number("min_length", 0), number("min_new_tokens", -1) + 1)
    search = SearchConfig(
        method="beam" if beams > 1 else "sample" if samples else "greedy",
        beam_size=beams if beams > 1 else default.beam_size,
        length_penalty=max(0.0, penalty),
        length_penalty_kind="length",
        stopping="inexact" if settings.get("early_stopping") is True else "exact",
        diversity_groups=int(number("num_beam_groups", 1)),
        diversity_strength=number("diversity_penalty", default.diversity_strength),
        temperature=number("temperature", 1),
        top_k=int(number("top_k", _DEFAULT_TOP_K)) if samples else default.top_k,
        top_p=number("top_p", 1),
        min_p=number("min_p", 0),
        no_repeat_ngram=int(number("no_repeat_ngram_size", 0)),
        suppress=suppressed,
        min_length_offset=int(shortest),
        max_length_offset=max(default.max_length_offset, int(shortest)),
    )
    ignored = _list_foreign(settings, vocab)
    if penalty < 0:
        ignored.append(f"length_penalty is {penalty:g}, below 0, which becomes 0")
    if samples and beams > 1:
        ignored.append("do_sample is true with several beams, which are searched without sampling")
    if sequences:
        ignored.append(f"bad_words_ids has {sequences} sequences of several tokens")
    return search, ignored


def _list_foreign(settings: dict[str, Any], vocab: Vocab) -> list[str]:
    """List the options of transformers that have an effect there but no counterpart in this package."""
    # The first symbol of translations, such as a language tag or <s>, is not a search option in this package.
    foreign = _FOREIGN | {"forced_bos_token_id": tuple(vocab.silent_ids)}
    options = [
        f"{name} is {settings[name]}"
        for name, neutral in foreign.items()
        if settings.get(name) is not None and settings[name] not in neutral
    ]
    if settings.get("forced_eos_token_id") not in (None, vocab.eos_id, [vocab.eos_id]):
        options.append(f"forced_eos_token_id is {settings['forced_eos_token_id']}")
    return options


def _suppressed(settings: dict[str, Any], vocab: Vocab) -> tuple[tuple[str, ...], int]:
    """Return the forbidden subwords, and the number of forbidden sequences of several tokens."""
    words = [[word] if isinstance(word, int) else list(word) for word in settings.get("bad_words_ids") or []]
    words += [[token] for token in settings.get("suppress_tokens") or []]
    # The search never selects pad and bos, and transformers does not forbid the end symbol either.
    always = {vocab.pad_id, vocab.bos_id, vocab.eos_id} - vocab.silent_ids
    single = {int(word[0]) for word in words if len(word) == 1} - always
    if outside := sorted(token for token in single if not 0 <= token < vocab.size):
        raise ValueError(f"bad_words_ids has {outside[0]}, but the vocabulary has {vocab.size} ids")
    return tuple(vocab.pieces(sorted(single))), sum(len(word) > 1 for word in words)
