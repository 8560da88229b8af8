"""Names and shapes of the documents' state dicts, for one small configuration, apart from the modules.

Width 8, 2 heads, d_k 3, d_v 5, feed-forward 16, vocabularies 11 and 13, 2 layers; the decoder of 000 has one
layer, a head of 001 is 6 wide. Knows nothing of PyTorch.
"""

import itertools
import re

Shapes = dict[str, tuple[int, ...]]


def written_out(table: Shapes) -> Shapes:
    """Each name on its own, of a table whose names hold {alternatives}.

    A name that ends in + stands for .weight of the shape and .bias of its first axis: `a.{0,1}+` gives
    a.0.weight, a.0.bias, a.1.weight and a.1.bias.
    """
    names = {}
    for pattern, shape in table.items():
        choices = [part.split(",") for part in re.split(r"[{}]", pattern.removesuffix("+"))]
        for parts in itertools.product(*choices):
            name = "".join(parts)
            expected = {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
            names |= expected if pattern.endswith("+") else {name: shape}
    return names


_HANDBUILT_ATTENTION = ("encoder.layers.{0,1}.enc_self_attn", "decoder.layers.0.{dec_self_attn,dec_enc_attn}")
_HANDBUILT_FEED_FORWARD = "{encoder.layers.0,encoder.layers.1,decoder.layers.0}.pos_ffn"
_HANDBUILT = {
    "encoder.src_emb.weight": (11, 8),
    "encoder.pos_emb.weight": (9, 8),
    "decoder.tgt_emb.weight": (13, 8),
    "decoder.pos_emb.weight": (8, 8),
    **{f"{place}.{{W_Q,W_K}}+": (6, 8) for place in _HANDBUILT_ATTENTION},
    **{f"{place}.W_V+": (10, 8) for place in _HANDBUILT_ATTENTION},
    **{f"{place}.linear+": (8, 10) for place in _HANDBUILT_ATTENTION},
    **{f"{place}.layer_norm+": (8,) for place in (*_HANDBUILT_ATTENTION, _HANDBUILT_FEED_FORWARD)},
    "projection.weight": (13, 8),
}
HANDBUILT_CONV = written_out(
    _HANDBUILT
    | {
        f"{_HANDBUILT_FEED_FORWARD}.conv1+": (16, 8, 1),
        f"{_HANDBUILT_FEED_FORWARD}.conv2+": (8, 16, 1),
    }
)
HANDBUILT_FC = written_out(
    _HANDBUILT | {f"{_HANDBUILT_FEED_FORWARD}.fc1+": (16, 8), f"{_HANDBUILT_FEED_FORWARD}.fc2+": (8, 16)},
)
_KOKOYI_ATTENTION = ("EncLayers.{0,1}.attn", "DecLayers.{0,1}.{mask_attn,attn}")
KOKOYI = written_out(
    {
        "W": (8, 13),
        **{f"{place}.{{Wq,Wk,Wv}}": (2, 8, 6) for place in _KOKOYI_ATTENTION},
        **{f"{place}.Wo": (12, 8) for place in _KOKOYI_ATTENTION},
        "EncLayers.{0,1}.{norm1,norm2}+": (8,),
        "DecLayers.{0,1}.{norm1,norm2,norm3}+": (8,),
        "{EncLayers,DecLayers}.{0,1}.ffn.Linears.0+": (6, 8),
        "{EncLayers,DecLayers}.{0,1}.ffn.Linears.1+": (8, 6),
    },
)
DECODER_ONLY = written_out(
    {
        "embedding.embedding+": (8, 13),
        "position.embedding+": (8, 5),
        "blocks.{0,1}.attention.heads.{0,1}.{wq,wk}+": (3, 8),
        "blocks.{0,1}.attention.heads.{0,1}.wv+": (5, 8),
        "blocks.{0,1}.attention.w+": (8, 10),
        "blocks.{0,1}.ffl1.w+": (16, 8),
        "blocks.{0,1}.ffl2.w+": (8, 16),
        "w+": (13, 8),
    },
)
_AIAYN_ATTENTION = ("encoder.layer_stack.{0,1}.slf_attn", "decoder.layer_stack.{0,1}.{slf_attn,enc_attn}")
AIAYN = written_out(
    {
        "{encoder.src_word_emb,decoder.trg_word_emb,trg_word_prj}.weight": (13, 8),
        "{encoder,decoder}.position_enc.pos_table": (1, 10, 8),
        **{f"{place}.{{w_qs,w_ks}}.weight": (6, 8) for place in _AIAYN_ATTENTION},
        **{f"{place}.w_vs.weight": (10, 8) for place in _AIAYN_ATTENTION},
        **{f"{place}.fc.weight": (8, 10) for place in _AIAYN_ATTENTION},
        **{f"{place}.layer_norm+": (8,) for place in _AIAYN_ATTENTION},
        "{encoder,decoder}.layer_stack.{0,1}.pos_ffn.w_1+": (16, 8),
        "{encoder,decoder}.layer_stack.{0,1}.pos_ffn.w_2+": (8, 16),
        "{encoder,decoder}.layer_stack.{0,1}.pos_ffn.layer_norm+": (8,),
        "{encoder,decoder}.layer_norm+": (8,),
    },
)
