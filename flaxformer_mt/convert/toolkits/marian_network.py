"""Marian's Transformer in numpy, which uses arrays and options of Marian's files, for parity checks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, np.ndarray]
# Maps the name of a matrix and its inputs to the (rounded) inputs that are multiplied.
Inputs = Callable[[str, np.ndarray], np.ndarray]
OUTPUT = "decoder_ff_logit_out"
_BLOCKED = -1e9


def compute_log_probs(
    arrays: Arrays,
    options: Mapping[str, Any],
    source: np.ndarray,
    mask: np.ndarray,
    target: np.ndarray,
    inputs: Inputs | None = None,
) -> np.ndarray:
    """Return log-probabilities [B, T] of target ids [B, T]; the mask [B, S] is True at source tokens."""
    network = _Network(arrays, options, inputs or (lambda name, x: x))
    blocked = np.where(mask[:, None, None], 0, _BLOCKED)
    memory = network.start(network.table("encoder")[source], "encoder")
    for number in range(1, options["enc-depth"] + 1):
        memory = network.attention(f"encoder_l{number}_self", memory, None, blocked)
        memory = network.feedforward(f"encoder_l{number}_ffn", memory)
    memory = network.finish(memory, "encoder")
    # Each token is predicted from the previous tokens, the first token from zeros.
    embedded = network.table("decoder")[target]
    x = network.start(np.concatenate([np.zeros_like(embedded[:, :1]), embedded[:, :-1]], 1), "decoder")
    future = np.triu(np.full((x.shape[1], x.shape[1]), _BLOCKED), 1)
    for number in range(1, options["dec-depth"] + 1):
        layer = f"decoder_l{number}"
        if options["transformer-decoder-autoreg"] == "rnn":
            x = network.recurrence(f"{layer}_rnn", x)
        else:
            x = network.attention(f"{layer}_self", x, None, future)
        x = network.attention(f"{layer}_context", x, memory, blocked)
        x = network.feedforward(f"{layer}_ffn", x)
    logits = network.output(network.finish(x, "decoder")) + arrays[f"{OUTPUT}_b"]
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(logits, target[..., None], -1)[..., 0].astype(np.float32)


class _Network:
    def __init__(self, arrays: Arrays, options: Mapping[str, Any], inputs: Inputs) -> None:
        self._arrays, self._options, self._inputs = arrays, options, inputs

    def table(self, stack: str) -> np.ndarray:
        return self._arrays["Wemb" if "Wemb" in self._arrays else f"{stack}_Wemb"]

    def output(self, x: np.ndarray) -> np.ndarray:
        names = (f"{OUTPUT}_W", f"{OUTPUT}_Wt", "Wemb", "decoder_Wemb")
        name = next(name for name in names if name in self._arrays)
        matrix = self._arrays[name]
        return self._inputs(name, x) @ (matrix if name.endswith("_W") else matrix.T)

    def start(self, x: np.ndarray, stack: str) -> np.ndarray:
        length, width = x.shape[-2:]
        half = width // 2
        angles = np.arange(length)[:, None] * np.exp(-np.arange(half) * np.log(10000.0) / (half - 1))
        x = x * width**0.5 + np.concatenate([np.sin(angles), np.cos(angles)], 1)
        return self._norm(x, f"{stack}_emb", "_pre") if self._has("postprocess-emb", "n") else x

    def finish(self, x: np.ndarray, stack: str) -> np.ndarray:
        return self._norm(x, f"{stack}_top") if self._has("postprocess-top", "n") else x

    def attention(self, name: str, x: np.ndarray, memory: Any, blocked: np.ndarray) -> np.ndarray:
        y = self._before(x, f"{name}_Wo")
        memory = y if memory is None else memory
        query, key, value = (
            self._heads(self._linear(z, name, part)) for z, part in ((y, "q"), (memory, "k"), (memory, "v"))
        )
        scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5 + blocked
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ value).swapaxes(1, 2).reshape(x.shape)
        return self._after(self._linear(mixed, name, "o"), x, f"{name}_Wo")

    def recurrence(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self._before(x, name)
        added = self._inputs(f"{name}_W", y) @ self._arrays[f"{name}_W"]
        kept = _sigmoid(self._linear(y, name, "f"))
        state, states = np.zeros_like(x[:, 0]), []
        for step in range(x.shape[1]):
            state = kept[:, step] * state + (1 - kept[:, step]) * added[:, step]
            states.append(np.maximum(state, 0))
        return self._after(np.stack(states, 1), x, f"{name}_ffn")

    def feedforward(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self._linear(self._before(x, f"{name}_ffn"), name, "1")
        y = np.maximum(y, 0) if self._options["transformer-ffn-activation"] == "relu" else y * _sigmoid(y)
        return self._after(self._linear(y, name, "2"), x, f"{name}_ffn")

    def _has(self, option: str, operation: str) -> bool:
        return operation in self._options[f"transformer-{option}"]

    def _before(self, x: np.ndarray, name: str) -> np.ndarray:
        return self._norm(x, name, "_pre") if self._has("preprocess", "n") else x

    def _after(self, y: np.ndarray, x: np.ndarray, name: str) -> np.ndarray:
        return self._norm(x + y, name) if self._has("postprocess", "n") else x + y

    def _norm(self, x: np.ndarray, name: str, end: str = "") -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x * self._arrays[f"{name}_ln_scale{end}"] + self._arrays[f"{name}_ln_bias{end}"]

    def _linear(self, x: np.ndarray, name: str, part: str) -> np.ndarray:
        matrix = f"{name}_W{part}"
        return self._inputs(matrix, x) @ self._arrays[matrix] + self._arrays[f"{name}_b{part}"]

    def _heads(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], self._options["transformer-heads"], -1).swapaxes(1, 2)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
