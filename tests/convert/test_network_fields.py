"""The fields of a network in a foreign format: what a table reads, writes and refuses."""

import ast
import contextlib
import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ctranslate2")

from test_document_formats import BASES, TINY

from flaxformer_mt.config import Config, ModelConfig
from flaxformer_mt.convert import formats
from flaxformer_mt.convert.formats import NAMES, find_format
from flaxformer_mt.convert.name_table import Table, read_names
from flaxformer_mt.convert.network_fields import TYING, Field, find_problems, read_network, write_options
from flaxformer_mt.errors import UserError

EXPORTED = [name for name in NAMES if find_format(name).open is not None]
# A network that each format has.
HEADS = {"key_dim": None, "value_dim": None, "tying": "all", "embedding_scale": True}
OWN = {name: dataclasses.replace(TINY, **HEADS) for name in EXPORTED}
OWN |= {name: dataclasses.replace(TINY, **base) for name, base in BASES.items() if name != "embeddings"}
MARIAN = {"positions": "sinusoidal_halves", "norm_epsilon": 1e-6, "target_start": "zeros"}
OWN["marian-npz"] = dataclasses.replace(OWN["marian-npz"], **MARIAN)
OWN["bergamot"] = dataclasses.replace(OWN["marian-npz"], model_dim=64, ffn_dim=64)
OWN["hf-pre-norm"] = dataclasses.replace(OWN["hf-pre-norm"], norm_position="pre")


def test_a_command_names_the_formats_that_it_has():
    read = [name for name in NAMES if find_format(name).read is not None]
    assert (list(formats.EXPORTED), list(formats.IMPORTED)) == (EXPORTED, read)
    with pytest.raises(UserError, match=f"unknown format onnx; known formats: {', '.join(EXPORTED)}$"):
        find_format("onnx", formats.EXPORTED)


@pytest.mark.parametrize("name", EXPORTED)
def test_a_field_that_no_table_lists_is_refused_unless_it_changes_nothing(name):
    later = dataclasses.make_dataclass("Later", [("window", int, 0)], bases=(ModelConfig,), frozen=True)
    for window, expected in ((0, []), (7, ["model.window is 7; supported: 0"])):
        model = later(**vars(OWN[name]), window=window)
        assert find_format(name).problems(Config(model=model)) == expected


# Format, field, a value that its network does not have, and those it has.
REFUSED = """
handbuilt     norm_position           pre              post
handbuilt     norm                    rms              layer
handbuilt     norm_epsilon            1e-06            1e-05
handbuilt     first_position          0                1
handbuilt     activation              gelu             relu
handbuilt     tying                   target_output    none
handbuilt     padding_mask            none             both, source
handbuilt     decoder_self_attention  ssru             attention
kokoyi        attention_bias          True             False
kokoyi        final_norm              True             None, False
kokoyi        positions               learned          sinusoidal
kokoyi        padding_mask            source           none
decoder-only  architecture            encoder_decoder  decoder_only
decoder-only  activation              gelu_tanh        gelu
decoder-only  norm_epsilon            1e-05            0
decoder-only  norm_affine             True             False
decoder-only  positions               rotary           one_vector, learned
decoder-only  tying                   all              none
aiayn         embedding_norm          False            True
aiayn         output_bias             True             False
aiayn         padding_mask            none             both, source
torch-nn      architecture            decoder_only     encoder_decoder
torch-nn      activation              swiglu           relu, gelu
torch-nn      norm_affine             False            True
torch-nn      positions               rotary           sinusoidal, learned
torch-nn      embedding_bias          True             False
torch-nn      key_dim                 3                None, 4
torch-nn      value_dim               5                None, 4
marian        norm_position           pre              post (for pre: --format=hf-pre-norm)
marian        activation              swiglu           relu, gelu, gelu_tanh, silu
marian        norm                    rms              layer
marian        first_position          1                0
marian        positions               learned          sinusoidal
marian        decoder_self_attention  ssru             attention
hf-pre-norm   tying                   none             all, embeddings
hf-pre-norm   final_norm              False            None, True
ctranslate2   decoder_self_attention  ssru             attention
ctranslate2   padding_mask            none             source, both
torch         attention_scale         False            True
torch         target_start            zeros            symbol
marian-npz    positions               sinusoidal       sinusoidal_halves
marian-npz    norm_epsilon            1e-05            1e-06
marian-npz    norm                    rms              layer
marian-npz    activation              gelu             relu, silu
marian-npz    embedding_scale         False            True
bergamot      model_dim               96               multiples of 64
bergamot      ffn_dim                 100              multiples of 64
"""


@pytest.mark.parametrize("line", REFUSED.strip().split("\n"))
def test_what_a_format_cannot_express_is_refused_by_name_and_value(line):
    name, field, value, supported = line.split(maxsplit=3)
    assert find_format(name).problems(Config(model=OWN[name])) == []
    with contextlib.suppress(ValueError):
        value = ast.literal_eval(value)
    config = Config(model=dataclasses.replace(OWN[name], **{field: value}))
    assert find_format(name).problems(config)[0] == f"model.{field} is {value}; supported: {supported}"


FIELDS = (
    Field("num_encoder_layers", "enc_layers"),
    Field("model_dim", "(enc|dec)_size"),
    Field("activation", "act", {"relu": "relu", "swish": "silu", "old_swish": "silu"}, default="relu"),
    Field("embedding_norm", "norm", default=False),
    Field("tying", "share & tie", TYING, default=False),
    Field("norm_position", values=("post", "pre")),
)
OPTIONS = {
    "enc_layers": 3,
    "enc_size": 8,
    "dec_size": 8,
    "act": "swish",
    "norm": True,
    "share": True,
    "tie": False,
}


def test_one_table_reads_and_writes_options():
    path = Path("model.pt")
    model = read_network(FIELDS, OPTIONS | {"act": "old_swish", "unknown": 1}, path, others={"moe": (0,)})
    expected = {"num_encoder_layers": 3, "model_dim": 8, "activation": "silu", "tying": "embeddings"}
    assert model == ModelConfig(**expected, embedding_norm=True, norm_position="post")
    assert write_options(FIELDS, model) == OPTIONS
    few = read_network(FIELDS, {"enc_layers": 1, "enc_size": 8, "dec_size": 8}, path)
    assert (few.activation, few.embedding_norm, few.tying) == ("relu", False, "none")
    assert find_problems(FIELDS, Config(model=model)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enc_layers": None}, "model.pt lacks enc_layers; give the file of a complete"),
        ({"enc_layers": 1001}, "enc_layers is '1001'; it must be a whole number from 1 to 1000"),
        ({"enc_size": True, "dec_size": True}, "enc_size is 'True'; it must be a whole number"),
        ({"dec_size": 9}, "enc_size is 8 and dec_size is 9; they must be equal"),
        ({"act": ["relu"]}, "act is .*; supported: 'relu', 'swish', 'old_swish'\nother models are not"),
        ({"norm": 1}, "norm is '1'; supported: True, False"),
        ({"moe": 2}, "moe is '2'; supported: 0"),
    ],
)
def test_options_that_no_network_has_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        read_network(FIELDS, OPTIONS | changes, Path("model.pt"), others={"moe": (0,)})


def test_a_line_of_names_stands_for_all_parameters_of_a_part():
    shapes = {
        "shared_embedding/embedding": (11, 4),
        "encoder/layers_0/self_attention/query/kernel": (4, 2, 3),
        "encoder/layers_1/self_attention/query/kernel": (4, 2, 3),
        "encoder/final_norm/scale": (4,),
    }
    text = """
    (source|target)_embedding                    (enc|dec).table
    output                                       out
    encoder/layers_{n}/self_attention/query      enc.{n+1}.q
    (encoder|decoder)/final_norm                 (enc|dec).norm
    """
    absent = {"encoder/final_norm/bias": (4,), "decoder/final_norm/scale": (4,)}
    table = Table(shapes, read_names(text, prefix="m."), what="x", absent=absent)
    assert {name: table.shape_of(name) for name in table.names} == {
        **dict.fromkeys(("m.enc.table.weight", "m.dec.table.weight", "m.out.weight"), (11, 4)),
        **dict.fromkeys(("m.enc.1.q.weight", "m.enc.2.q.weight"), (6, 4)),
        **dict.fromkeys(("m.enc.norm.weight", "m.enc.norm.bias", "m.dec.norm.weight"), (4,)),
    }
