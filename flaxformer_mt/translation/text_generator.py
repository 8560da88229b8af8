"""Text from a language model: prompts continued by sampling, greedy search or beam search."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxformer_mt.config import SearchConfig
from flaxformer_mt.config.checks import check_n_best, check_search
from flaxformer_mt.corpus.tfds_cache import compiled_dir
from flaxformer_mt.errors import UserError, warn_user
from flaxformer_mt.kernels.bfloat16 import cast_kernels
from flaxformer_mt.object_store.working_copies import open_copy
from flaxformer_mt.parallel import enable_compilation_cache
from flaxformer_mt.runs.load_run import TrainedModel, Warn, load_trained
from flaxformer_mt.search import Lines, SearchResult, search_width
from flaxformer_mt.search import search as run_search
from flaxformer_mt.shapes import Array, Cache
from flaxformer_mt.translation.constraints import make_symbols


class GeneratedText(NamedTuple):
    """One continuation: the text with its prompt, its log-probability, and whether it came to its end."""

    text: str
    log_prob: float
    is_finished: bool


def generate_text(
    run_dir: str | Path,
    *,
    prompt: str = "",
    n_best: int = 1,
    length: int | None = None,
    search: SearchConfig | None = None,
    checkpoint: str | None = None,
    warn: Warn = warn_user,
) -> list[GeneratedText]:
    """Continue a prompt with the language model of a run directory; the best texts first.

    Args:
      prompt: the beginning of every text; empty: texts from their beginning.
      n_best: the number of texts.
      length: the maximum number of tokens of a text, with the prompt and the end symbol. None:
        data.max_target_length of the run's config.
      search: search options that replace those of the run's config; max_length_* have no effect.
      checkpoint: best, last, average or a step. None: as the run's config says.

    Raises:
      UserError: the run is not a language model, the checkpoint is absent, the options are invalid, or the
        prompt is not shorter than the length or the length is more than the model has positions for.
    """
    run_dir = open_copy(run_dir)
    trained = load_trained(run_dir, checkpoint=checkpoint, warn=warn)
    if trained.config.data.source_language:
        raise UserError(
            f"{run_dir} is a translation model (data.source_language is "
            f"{trained.config.data.source_language}), not a language model; use translate --run={run_dir}"
        )
    options = trained.config.search if search is None else search
    check_search(options, model=trained.config.model)
    check_n_best(options, n_best, where="--")
    length = trained.config.data.max_target_length if length is None else length
    prefix = trained.vocabs.target.tokenize(prompt)[:-1]
    longest = trained.config.model.longest_input
    if longest is not None and length > longest:
        raise UserError(f"--length is {length}, but the model has positions for {longest} tokens; lower it")
    if len(prefix) >= length:
        raise UserError(
            f"the prompt has {len(prefix)} tokens and the text at most {length}, with its end symbol; "
            "shorten the prompt, or raise --length"
        )
    enable_compilation_cache(compiled_dir())
    result = _search(trained, options, prefix, length, n_best)
    return _read(result, trained)


def _search(
    trained: TrainedModel, options: SearchConfig, prefix: list[int], length: int, n_best: int
) -> SearchResult:
    # The padding mask concerns sources, of which there are none.
    model = trained.make_model(padding_mask="source")
    symbols = make_symbols(trained.vocabs.target, options)
    width = search_width(options, n_best)

    def run(params: dict, lines: Lines) -> SearchResult:
        params = cast_kernels(params, model.config.dtype)  # once, not in each step
        no_source = jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 0), bool)
        cache = model.apply({"params": params}, *no_source, width, length, method="start_decoding")

        def next_logits(tokens: Array, cache: Cache) -> tuple[Array, Cache]:
            return model.apply({"params": params}, tokens, cache, method="decode_step")

        return run_search(
            next_logits, cache, lines, options=options, symbols=symbols, max_length=length, n_best=n_best
        )

    lines = Lines(
        max_lengths=np.array([length], np.int32),
        min_lengths=np.array([options.min_length_offset], np.int32) if options.min_length_offset else None,
        prefixes=np.array([prefix], np.int32) if prefix else None,
        seeds=np.array([options.seed], np.uint32) if options.method == "sample" else None,
    )
    return jax.device_get(jax.jit(run)(trained.params, lines))


def _read(result: SearchResult, trained: TrainedModel) -> list[GeneratedText]:
    vocab, texts = trained.vocabs.target, []
    for tokens, size, log_prob in zip(result.tokens[0], result.lengths[0], result.log_probs[0], strict=True):
        if size:  # 0: there are fewer hypotheses
            kept = tokens[:size]
            texts.append(GeneratedText(vocab.detokenize(kept), float(log_prob), kept[-1] == vocab.eos_id))
    return texts
