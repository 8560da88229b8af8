"""Chooses sizes of vocabulary, model, batches and training for a corpus and a machine, with reasons.

The rules follow the recipes in configs/ and their measured results (docs/results.md).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

_GIB = 1 << 30
# Each held-out set has at most this many pairs, and at most this share of all.
_MOST_HELD_OUT, _HELD_OUT_SHARE = 1000, 20
# Fewer pairs do not train a model that translates.
FEWEST_PAIRS = 500
# Below this number of pairs: subwords of the vocabulary, the rate of dropout, and epochs at most.
_VOCABULARIES = ((10_000, 2000), (40_000, 4000), (200_000, 8000), (2_000_000, 16_000), (1 << 62, 32_000))
_DROPOUTS = ((500_000, 0.2), (1 << 62, 0.1))
_EPOCHS = ((20_000, 60), (100_000, 40), (1_000_000, 20), (10_000_000, 8), (1 << 62, 3))
_FINE_TUNING_EPOCHS = ((20_000, 30), (100_000, 15), (1_000_000, 6), (10_000_000, 2), (1 << 62, 1))
# Up to this width, learning rate and warm-up.
_RATES = ((128, 3e-3, 1000), (256, 2e-3, 1000), (512, 7e-4, 4000), (1 << 62, 5e-4, 4000))
# Updates per epoch, without padding, that decide the batch size; approximate number of evaluations.
_UPDATES_AN_EPOCH, _EVALUATIONS = 50, 25
# Below this number of pairs, batches have few shapes, because compiling more would take most of the time.
_FEW_SHAPES_BELOW = 20_000


class Choice(NamedTuple):
    """The dotted name of a field, the chosen value, and the reason for the choice."""

    name: str
    value: Any
    reason: str


class Machine(NamedTuple):
    """Name, JAX platform, number of devices, bytes of memory per device, whether bfloat16 beats float32."""

    name: str
    platform: str
    devices: int
    memory: int | None
    fast_bfloat16: bool


class Corpus(NamedTuple):
    """Number of pairs, number of tokens (longer side of each pair), and 99.9th percentiles of the lengths."""

    pairs: int
    tokens: int
    source_length: int
    target_length: int


def choose_held_out(pairs: int, split: str) -> Choice:
    count = min(_MOST_HELD_OUT, pairs // _HELD_OUT_SHARE)
    reason = "enough for differences of one BLEU to show, and quick to translate"
    if count < _MOST_HELD_OUT:
        reason = f"one pair in {_HELD_OUT_SHARE}: scores of so few pairs are rough"
    return Choice(f"data.{split}_pairs", count, reason)


def choose_vocabulary(pairs: int, characters: int, scripts: tuple[str, str]) -> list[Choice]:
    size = next(size for limit, size in _VOCABULARIES if pairs < limit)
    reason = f"usual for {pairs:,} pairs: rarer subwords would be seen too seldom to learn"
    is_joint = scripts[0] == scripts[1]
    coverage = [Choice("vocab.character_coverage", 1.0, "every character of the text is a subword")]
    if characters > 3000:
        coverage = [Choice("vocab.character_coverage", 0.9995, "the rarest characters are spelled in bytes")]
    if size < 2 * characters + 300:
        size = -(-(2 * characters + 300) // 1000) * 1000
        reason = f"the text has {characters:,} different characters, which need a subword each"
    joint = "one vocabulary: both languages have the same letters, and share names and numbers"
    apart = f"a vocabulary for each language: {scripts[0]} and {scripts[1]} letters share no subwords"
    return [
        Choice("vocab.size", size, reason),
        Choice("vocab.joint", is_joint, joint if is_joint else apart),
        *coverage,
    ]


def choose_lengths(corpus: Corpus) -> list[Choice]:
    """Choose maximum lengths that 99.9% of the sentences do not exceed, in multiples of 8 up to 256."""
    return [
        Choice(
            f"data.max_{side}_length",
            min(256, max(32, -(-length // 8) * 8)),
            f"99.9% of the {side}s have at most {length} tokens; longer pairs are left out",
        )
        for side, length in (("source", corpus.source_length), ("target", corpus.target_length))
    ]


def choose_model(corpus: Corpus, machine: Machine, *, joint: bool) -> list[Choice]:
    on_cpu = machine.platform == "cpu"
    if corpus.pairs < 10_000:
        layers, width, heads, reason = 3, 128, 4, "a small model: a larger one would learn this text by heart"
    elif corpus.pairs < 500_000:
        layers, width, heads, reason = 3, 256, 4, "as configs/multi30k_de_en.py, for texts of this size"
    elif on_cpu:
        layers, width, heads, reason = 3, 256, 4, "the text is enough for a larger model, a CPU is not"
    elif corpus.pairs < 5_000_000 or (machine.memory or 0) < 30 * _GIB:
        layers, width, heads, reason = 6, 512, 8, "Transformer-base of Vaswani et al. 2017"
    else:
        layers, width, heads, reason = 6, 1024, 16, "Transformer-big of Vaswani et al. 2017"
    dropout = next(rate for limit, rate in _DROPOUTS if corpus.pairs < limit)
    precision = Choice("model.dtype", "float32", f"{machine.name} multiplies bfloat16 no faster")
    if machine.fast_bfloat16:
        precision = Choice("model.dtype", "bfloat16", f"{machine.name} multiplies it faster than float32")
    return [
        Choice("model.num_encoder_layers", layers, reason),
        Choice("model.num_decoder_layers", layers, ""),
        Choice("model.model_dim", width, ""),
        Choice("model.num_heads", heads, ""),
        Choice("model.ffn_dim", 4 * width, "four times the width, as usual"),
        Choice("model.dropout_rate", dropout, f"{corpus.pairs:,} pairs: less text, more dropout"),
        Choice(
            "model.tying",
            "all" if joint else "target_output",
            "one matrix for both embeddings and the output"
            if joint
            else "the target's embedding and the output",
        ),
        precision,
    ]


def choose_training(
    corpus: Corpus,
    machine: Machine,
    *,
    longest: int,
    width: int,
    row_multiple: int,
    count_updates: Callable[[dict[str, Any]], int],
    pretrained: bool = False,
) -> list[Choice]:
    most, why = _most_batch_tokens(machine, width)
    fewest = longest * row_multiple
    fitting = corpus.tokens // _UPDATES_AN_EPOCH
    batch = max(fewest, min(most, _round(fitting, 1024)))
    if batch == fewest:
        why = f"the least: {row_multiple} rows of {longest} tokens"
    shapes = [Choice("data.num_shapes", 4, "few programs to compile; training is short")]
    shapes = shapes if corpus.pairs < _FEW_SHAPES_BELOW else []
    updates = count_updates({"batch_tokens": batch} | ({"num_shapes": shapes[0].value} if shapes else {}))
    if fewest < batch < most:
        why = f"{updates:,} steps per epoch"
    table = _FINE_TUNING_EPOCHS if pretrained else _EPOCHS
    epochs = next(epochs for limit, epochs in table if corpus.pairs < limit)
    steps = min(_round(max(1000, epochs * updates), 500), 100_000)
    every = min(round(max(1, steps / _EVALUATIONS / 100)) * 100, 5000)
    rate, warmup = choose_learning_rate(width)
    chunks = [Choice("train.loss_chunk_tokens", 512, "logits of so many tokens at a time save memory")]
    return [
        Choice("data.batch_tokens", batch, why),
        *shapes,
        Choice("optim.learning_rate", rate, "for models of this size; lower it if the loss jumps"),
        Choice("optim.warmup_steps", min(warmup, steps // 5), "the learning rate rises this long"),
        Choice("optim.ema_decay", 0.999, "averages of the parameters translate better than the parameters"),
        Choice("train.steps", steps, f"about {steps / updates:.0f} epochs of {updates:,} steps at most"),
        Choice("train.evaluate_every", every, "an evaluation chooses the best checkpoint"),
        Choice("train.checkpoint_every", every, ""),
        Choice("train.patience", 10, "training ends after so many evaluations without a better BLEU"),
        *(chunks if machine.platform == "cpu" else []),
    ]


def choose_learning_rate(width: int) -> tuple[float, int]:
    """Return the learning rate and the number of warm-up steps."""
    return next((rate, warmup) for limit, rate, warmup in _RATES if width <= limit)


def _most_batch_tokens(machine: Machine, width: int) -> tuple[int, str]:
    if machine.platform == "cpu":
        return 4096, "as much as a CPU computes well at a time"
    memory = machine.memory or 16 * _GIB
    each = min(32_768, _round(int(memory / _GIB * 400 * 512 / width), 1024))
    return each * machine.devices, f"{memory / _GIB:.0f} GiB on each of {machine.devices} {machine.name}"


def _round(number: int, multiple: int) -> int:
    return max(multiple, number // multiple * multiple)
