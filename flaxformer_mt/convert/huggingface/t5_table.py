"""Names of the arrays of T5 and its descendants (T5 1.1, mT5, MADLAD-400, ByT5) in transformers."""

from typing import Any

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert.array_layouts import HEADS_IN, HEADS_OUT, SAME, TRANSPOSED
from flaxformer_mt.convert.name_table import Rule, Table, rules_for

# Arrays that early files have and no version of transformers uses.
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

_ATTENTION = [
    Rule("/query/kernel", ".q.weight", HEADS_IN),
    Rule("/key/kernel", ".k.weight", HEADS_IN),
    Rule("/value/kernel", ".v.weight", HEADS_IN),
    Rule("/output/kernel", ".o.weight", HEADS_OUT),
]
# Stack -> Flax name of a sublayer -> its name in transformers, in a layer with the number of the sublayer.
_SUBLAYERS = {
    "encoder": {"self_attention": "SelfAttention", "feedforward": "DenseReluDense"},
    "decoder": {
        "self_attention": "SelfAttention",
        "cross_attention": "EncDecAttention",
        "feedforward": "DenseReluDense",
    },
}


def make_t5_table(config: Config, shapes: Any, *, what: str) -> Table:
    """Make the table of all arrays of the class; `shapes` are those of the Flax parameters, by path."""
    model = config.model
    gated = model.activation in ("swiglu", "geglu_tanh")
    # The gate of two input matrices is the first one.
    feedforward = [Rule("/gate/kernel", ".wi_0.weight", TRANSPOSED)] if gated else []
    feedforward += [
        Rule("/input/kernel", ".wi_1.weight" if gated else ".wi.weight", TRANSPOSED),
        Rule("/output/kernel", ".wo.weight", TRANSPOSED),
    ]
    rules = [Rule("shared_embedding/embedding", f"{name}.weight", SAME) for name in tied_names(model)]
    if model.tying == "embeddings":
        rules.append(Rule("output_kernel", "lm_head.weight", TRANSPOSED))
    for stack, sublayers in _SUBLAYERS.items():
        for number, (ours, theirs) in enumerate(sublayers.items()):
            flax, foreign = f"{stack}/layers_{{n}}/{ours}", f"{stack}.block.{{n}}.layer.{number}"
            own = feedforward if ours == "feedforward" else _ATTENTION
            rules += rules_for([(flax, f"{foreign}.{theirs}")], own)
            rules.append(Rule(f"{flax}_residual/norm/scale", f"{foreign}.layer_norm.weight"))
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules.append(Rule(f"{stack}/relative_positions/embedding", bias))
        rules.append(Rule(f"{stack}/final_norm/scale", f"{stack}.final_layer_norm.weight"))
    return Table(shapes, rules, what=what)


def tied_names(model: ModelConfig) -> list[str]:
    """Return the names of the array of both embeddings, that under which files store it first."""
    names = ["shared", "encoder.embed_tokens", "decoder.embed_tokens"]
    return names + ["lm_head"] if model.tying == "all" else names
