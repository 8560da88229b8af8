"""The PyTorch modules of this folder: names and shapes of their state dicts, quirks of each document."""

import itertools
import math
import re

import pytest

torch = pytest.importorskip("torch")

from benchmarks.originals import aiayn, decoder_only, embeddings, handbuilt, kokoyi, state_dicts
from benchmarks.originals.sinusoids import sinusoid_table

# Width 8, heads 2, d_k 3, d_v 5, feed-forward 16, vocabularies 11 and 13. Pads are 0.
SOURCE = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]])
TARGET = torch.tensor([[2, 5, 7, 9, 4], [2, 6, 8, 0, 0]])


def make_handbuilt(ffn: str = "conv") -> handbuilt.Transformer:
    torch.manual_seed(0)
    sizes = dict(src_vocab=11, tgt_vocab=13, src_len=8, tgt_len=7, d_embedding=8, n_heads=2, d_k=3, d_v=5)
    return handbuilt.Transformer(**sizes, d_ff=16, encoder_n_layers=2, decoder_n_layers=1, ffn=ffn)


def make_kokoyi() -> kokoyi.Transformer:
    torch.manual_seed(0)
    return kokoyi.Transformer(L=2, num_heads=2, embed_dim=8, hidden_dim=6, out_dim=13)


def make_decoder_only(**changes) -> decoder_only.TransformerDecoder:
    torch.manual_seed(0)
    sizes = dict(vocab_size=13, embedding_size=8, window_size=4, d_k=3, d_v=5, n_heads=2, hidden=16)
    return decoder_only.TransformerDecoder(**(sizes | dict(n_blocks=2, dropout=0.1) | changes)).eval()


def make_aiayn(**changes) -> aiayn.Transformer:
    torch.manual_seed(0)
    sizes = dict(n_src_vocab=13, n_trg_vocab=13, src_pad_idx=0, trg_pad_idx=0, d_word_vec=8, d_model=8)
    more = dict(d_inner=16, n_layers=2, n_head=2, d_k=3, d_v=5, n_position=10)
    return aiayn.Transformer(**(sizes | more | changes)).eval()


def make_positions(**changes) -> embeddings.PositionalEncoding:
    return embeddings.PositionalEncoding(**(dict(d_model=8, dropout=0.0, max_len=60) | changes))


CASES = {
    "handbuilt": (make_handbuilt, state_dicts.HANDBUILT_CONV, 63),
    "handbuilt_fc": (lambda: make_handbuilt(ffn="fc"), state_dicts.HANDBUILT_FC, 63),
    "kokoyi": (make_kokoyi, state_dicts.KOKOYI, 61),
    "decoder_only": (make_decoder_only, state_dicts.DECODER_ONLY, 42),
    "one_hot": (lambda: make_decoder_only(positions="one_hot"), state_dicts.DECODER_ONLY, 42),
    "aiayn": (make_aiayn, state_dicts.AIAYN, 69),
    "aiayn_untied": (lambda: make_aiayn(trg_emb_prj_weight_sharing=False), state_dicts.AIAYN, 69),
    "embeddings": (lambda: embeddings.Embeddings(d_model=8, vocab=11), {"lut.weight": (11, 8)}, 1),
    "positions": (make_positions, {"pe": (1, 60, 8)}, 1),
}


@pytest.mark.parametrize("make, table, tensors", CASES.values(), ids=CASES)
def test_the_state_dict_has_the_documents_names_and_shapes(make, table, tensors):
    found = {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}
    assert found == table
    assert len(found) == tensors


def test_the_table_of_positions_is_the_formula_with_a_sine_at_the_end_of_an_odd_width():
    table = sinusoid_table(7, 5)
    assert table.dtype == torch.float64
    for position, column in itertools.product(range(7), range(5)):
        angle = position / 10000 ** ((column - column % 2) / 5)
        expected = math.cos(angle) if column % 2 else math.sin(angle)
        assert table[position, column].item() == pytest.approx(expected, abs=1e-12)


def test_handbuilt_gives_logits_and_the_weights_of_each_layer():
    logits, encoder, decoder, cross = make_handbuilt()(SOURCE, TARGET)
    assert logits.shape == (2, 5, 13)
    assert [tuple(w.shape) for w in encoder] == [(2, 2, 4, 4)] * 2
    assert [tuple(w.shape) for w in decoder] == [(2, 2, 5, 5)]
    assert [tuple(w.shape) for w in cross] == [(2, 2, 5, 4)]
    for weights in (*encoder, *cross):
        assert (weights[1, ..., 2:] == 0).all() and (weights[0, ..., :3] > 0).all()
    assert (decoder[0].triu(1) == 0).all() and (decoder[0][1, ..., 3:] == 0).all()


def test_handbuilt_attends_to_all_keys_alike_where_all_are_blocked():
    model = make_handbuilt()
    logits, encoder, decoder, cross = model(torch.tensor([[0, 0, 0, 0]]), torch.tensor([[0, 5, 7]]))
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(encoder[0], torch.full((1, 2, 4, 4), 1 / 4))
    torch.testing.assert_close(cross[0], torch.full((1, 2, 3, 4), 1 / 4))
    # Later tokens too: the first target token is padding, and all other keys come after it.
    torch.testing.assert_close(decoder[0][0, :, 0], torch.full((2, 3), 1 / 3))
    assert (decoder[0][0, :, 1] == torch.tensor([0.0, 1.0, 0.0])).all()


def test_handbuilt_counts_positions_from_1_with_a_frozen_parameter():
    model = make_handbuilt()
    table = model.encoder.pos_emb.weight
    assert isinstance(table, torch.nn.Parameter) and not table.requires_grad
    torch.testing.assert_close(table, sinusoid_table(9, 8).float(), rtol=0, atol=0)
    before, *_ = model(SOURCE, TARGET)
    with torch.no_grad():
        table[0] = math.nan
        table[5:] = math.nan
    torch.testing.assert_close(model(SOURCE, TARGET)[0], before, rtol=0, atol=0)
    with torch.no_grad():
        table[4] = math.nan  # of the fourth token, a pad in both rows
    assert not torch.isfinite(model(SOURCE, TARGET)[0]).any()


def test_handbuilt_refuses_what_is_longer_than_its_tables():
    model = make_handbuilt()
    assert model(torch.ones(1, 8).long(), torch.ones(1, 7).long())[0].shape == (1, 7, 13)
    for source_length, target_length in [(9, 7), (8, 8)]:
        with pytest.raises(IndexError):
            model(torch.ones(1, source_length).long(), torch.ones(1, target_length).long())


def test_handbuilt_convolutions_of_width_one_are_matrices():
    conv, fc = make_handbuilt(), make_handbuilt(ffn="fc")
    state = {
        re.sub(r"\.conv([12])\.", r".fc\1.", name): tensor.squeeze(-1) if tensor.dim() == 3 else tensor
        for name, tensor in conv.state_dict().items()
    }
    fc.load_state_dict(state)
    torch.testing.assert_close(conv(SOURCE, TARGET)[0], fc(SOURCE, TARGET)[0], rtol=0, atol=1e-5)


def embedded() -> tuple[torch.Tensor, torch.Tensor]:
    source, target = kokoyi.init_embedding(11, 8), kokoyi.init_embedding(13, 8)
    return kokoyi.embed(SOURCE, source), kokoyi.embed(TARGET, target)


def test_kokoyi_reads_the_paddings_row_and_does_not_train_it():
    table = kokoyi.init_embedding(11, 8)
    vectors = kokoyi.embed(SOURCE, table)
    torch.testing.assert_close(vectors, table[SOURCE], rtol=0, atol=0)
    vectors.sum().backward()
    assert (table.grad[0] == 0).all() and (table.grad[3:8] == 1).all()


def test_kokoyi_logits_depend_on_padding():
    model = make_kokoyi()
    x, y = embedded()
    short, long = model(x[1:, :2], y[1:]), model(x[1:], y[1:])
    assert short.shape == long.shape == (1, 5, 13)
    assert (short - long).abs().max() > 1e-3


def test_kokoyi_has_the_causal_mask_alone():
    weights = []
    model = make_kokoyi()
    x, y = embedded()
    logits = model(x, y, batch_level=[1, 1], weights_list=weights)
    expected = [(2, 2, 4, 4)] * 2 + [(2, 2, 5, 5), (2, 2, 5, 4)] * 2
    assert [tuple(w.shape) for w in weights] == expected
    for index, w in enumerate(weights):
        if index in (2, 4):
            assert (w.triu(1) == 0).all() and (w.tril() > 0).sum() == 2 * 2 * 15
        else:
            assert (w > 0).all()
    torch.testing.assert_close(model(x[0], y[0], batch_level=[0, 0]), logits[0])
    with pytest.raises(ValueError, match=r"\[1, 1\].*\[0, 0\]"):
        model(x[0], y[0], batch_level=[1, 1])


def test_kokoyi_divides_scores_by_the_root_of_one_heads_width():
    torch.manual_seed(0)
    attention, weights = kokoyi.MHAttn(num_heads=2, embed_dim=8, hidden_dim=6), []
    x, h = torch.randn(5, 8), torch.randn(4, 8)
    output = attention(x, h, weights)
    heads = []
    for head in range(2):
        q, k, v = x @ attention.Wq[head], h @ attention.Wk[head], h @ attention.Wv[head]
        expected = torch.softmax(q @ k.T / 6**0.5, dim=-1)
        torch.testing.assert_close(weights[0][head], expected)
        heads.append(expected @ v)
    torch.testing.assert_close(output, torch.cat(heads, dim=-1) @ attention.Wo)


def test_kokoyi_counts_positions_from_0_in_odd_widths_too():
    x = torch.zeros(2, 3, 5)
    torch.testing.assert_close(kokoyi.with_positions(x), sinusoid_table(3, 5).float().expand(2, 3, 5))
    torch.manual_seed(0)
    model = kokoyi.Transformer(L=1, num_heads=2, embed_dim=5, hidden_dim=4, out_dim=13)
    assert torch.isfinite(model(x, x)).all()


def test_kokoyi_lists_parameters_in_the_order_of_the_declaration():
    encoder, decoder, w = make_kokoyi().get_parameters()
    layer = encoder[0]
    assert layer.get_parameters() == (layer.attn, [layer.norm1, layer.norm2], layer.ffn)
    *sublayers, norms = decoder[0].get_parameters()
    assert [type(sublayer) for sublayer in sublayers] == [kokoyi.MaskedMHAttn, kokoyi.MHAttn, kokoyi.FFN]
    assert norms == [decoder[0].norm1, decoder[0].norm2, decoder[0].norm3]
    assert w.shape == (8, 13)


def test_kokoyi_initialises_with_its_own_gains_and_torchs_fans():
    torch.manual_seed(0)
    heads, width, hidden = 3, 64, 32
    model = kokoyi.Transformer(L=1, num_heads=heads, embed_dim=width, hidden_dim=hidden, out_dim=50)
    gain = math.sqrt(width + hidden) / math.sqrt(width + heads * hidden)
    bounds = [
        (model.W, math.sqrt(2) * math.sqrt(6 / (width + 50))),
        (kokoyi.init_embedding(50, width), math.sqrt(2) * math.sqrt(6 / (width + 50))),
        (model.DecLayers[0].mask_attn.Wq, gain * math.sqrt(6 / (width * hidden + heads * hidden))),
        (model.EncLayers[0].attn.Wo, gain * math.sqrt(6 / (width + heads * hidden))),
    ]
    for tensor, bound in bounds:
        assert 0.99 * bound < tensor.abs().max() <= bound


def test_decoder_only_gives_the_last_positions_logits_and_each_blocks_weights():
    model, weights = make_decoder_only(), []
    every = model.all_logits(TARGET, weights)
    assert every.shape == (2, 5, 13)
    torch.testing.assert_close(model(TARGET), every[:, -1])
    assert [tuple(w.shape) for w in weights] == [(2, 2, 5, 5)] * 2
    for w in weights:  # padding is a token as any other
        assert (w.triu(1) == 0).all() and (w.tril() > 0).sum() == 2 * 2 * 15
    one_hot = torch.nn.functional.one_hot(TARGET, 13).float()
    torch.testing.assert_close(model.all_logits(one_hot), every)


def test_decoder_only_embeds_with_a_column_and_the_bias():
    embedding = make_decoder_only().embedding
    expected = embedding.embedding.weight[:, 7] + embedding.embedding.bias
    torch.testing.assert_close(embedding(torch.tensor(7)), expected)


def test_decoder_only_tells_no_positions_apart_as_written_and_all_in_one_hot():
    ids, exchanged = torch.tensor([[3, 4, 5]]), torch.tensor([[4, 3, 5]])
    as_written = make_decoder_only(n_blocks=1)
    torch.testing.assert_close(as_written(ids), as_written(exchanged))
    assert as_written(torch.ones(1, 9).long()).shape == (1, 13)  # a window of 4
    position = as_written.position.embedding
    vector = position.weight @ torch.arange(5.0) + position.bias
    torch.testing.assert_close(as_written.position(as_written.pids), vector)

    one_hot = make_decoder_only(n_blocks=1, positions="one_hot")
    assert (one_hot(ids) - one_hot(exchanged)).abs().max() > 1e-3
    assert one_hot(torch.ones(1, 5).long()).shape == (1, 13)
    with pytest.raises(RuntimeError):
        one_hot(torch.ones(1, 6).long())
    with pytest.raises(ValueError, match="learned"):
        make_decoder_only(positions="learned")


def test_decoder_only_normalizes_without_epsilon():
    norm = decoder_only.LayerNorm()
    x = torch.tensor([[[1e-6, 3e-6, 5e-6, 7e-6]]])
    expected = torch.tensor([[[-3.0, -1.0, 1.0, 3.0]]]) / 5**0.5
    torch.testing.assert_close(norm(x), expected, rtol=1e-4, atol=0)
    assert torch.isnan(norm(torch.ones(1, 1, 4))).all()
    assert not list(norm.parameters())


def test_decoder_only_takes_the_exact_gelu():
    layer = make_decoder_only().blocks[0].ffl1
    with torch.no_grad():
        layer.w.weight.zero_()
        layer.w.bias.fill_(1.5)
    exact = 1.5 * 0.5 * (1 + math.erf(1.5 / 2**0.5))  # the approximation by tanh is 1e-4 off
    torch.testing.assert_close(layer(torch.ones(1, 1, 8)), torch.full((1, 1, 16), exact), rtol=0, atol=1e-6)


def test_decoder_only_drops_out_of_what_is_added_alone():
    model = make_decoder_only(dropout=1.0, positions="one_hot").train()
    x = model.embedding(TARGET) + model.position(torch.arange(5))
    norm = decoder_only.LayerNorm()
    expected = model.w(norm(norm(norm(norm(x)))))
    torch.testing.assert_close(model.all_logits(TARGET), expected)


def test_aiayn_gives_flat_logits_and_stacks_give_tuples():
    model = make_aiayn()
    seen = aiayn.get_pad_mask(SOURCE, 0)
    seen_by_target = aiayn.get_pad_mask(TARGET, 0) & aiayn.get_subsequent_mask(TARGET)
    memory, encoder = model.encoder(SOURCE, seen, return_attns=True)
    assert len(model.encoder(SOURCE, seen)) == 1
    x, decoder, cross = model.decoder(TARGET, seen_by_target, memory, seen, return_attns=True)
    logits = model(SOURCE, TARGET)
    assert logits.shape == (10, 13)
    torch.testing.assert_close(logits.view(2, 5, 13), x @ model.trg_word_prj.weight.T / 8**0.5)
    assert [tuple(w.shape) for w in (*encoder, *decoder, *cross)] == (
        [(2, 2, 4, 4)] * 2 + [(2, 2, 5, 5)] * 2 + [(2, 2, 5, 4)] * 2
    )
    for weights in (*encoder, *cross):
        assert (weights[1, ..., 2:] == 0).all() and (weights[0, ..., :3] > 0).all()
    for weights in decoder:
        assert (weights.triu(1) == 0).all() and (weights[1, ..., 3:] == 0).all()


def test_aiayn_attends_to_all_keys_alike_where_none_is_visible():
    model = make_aiayn()
    ids = torch.tensor([[0, 5, 7]])
    visible = aiayn.get_pad_mask(ids, 0) & aiayn.get_subsequent_mask(ids)
    _, weights = model.encoder(ids, visible, return_attns=True)
    torch.testing.assert_close(weights[0][0, :, 0], torch.full((2, 3), 1 / 3))
    assert (weights[0][0, :, 1] == torch.tensor([0.0, 1.0, 0.0])).all()
    assert torch.isfinite(model(torch.zeros(1, 4).long(), ids)).all()


def test_aiayn_scales_embeddings_or_logits():
    unscaled, embeddings_scaled, logits_scaled = (
        make_aiayn(scale_emb_or_prj=option)(SOURCE, TARGET) for option in ("none", "emb", "prj")
    )
    torch.testing.assert_close(logits_scaled, unscaled / 8**0.5)
    assert (embeddings_scaled - unscaled).abs().max() > 1e-2


def test_aiayn_ignores_scale_flags_without_sharing():
    unscaled, embeddings_scaled, logits_scaled = (
        make_aiayn(scale_emb_or_prj=option, trg_emb_prj_weight_sharing=False)(SOURCE, TARGET)
        for option in ("none", "emb", "prj")
    )
    torch.testing.assert_close(embeddings_scaled, unscaled, rtol=0, atol=0)
    torch.testing.assert_close(logits_scaled, unscaled, rtol=0, atol=0)


def test_aiayn_ties_three_names_to_one_tensor():
    model = make_aiayn(n_src_vocab=20)
    source, target = model.encoder.src_word_emb, model.decoder.trg_word_emb
    assert source.weight is target.weight is model.trg_word_prj.weight
    assert source.num_embeddings == 20 and source.weight.shape == (13, 8)
    assert (target.weight[0] != 0).any()  # xavier fills the row of the padding too
    state = model.state_dict() | {"trg_word_prj.weight": torch.full((13, 8), 0.25)}
    model.load_state_dict(state)
    assert (source.weight == 0.25).all()

    model = make_aiayn(trg_emb_prj_weight_sharing=False)
    assert model.encoder.src_word_emb.weight is model.decoder.trg_word_emb.weight
    assert model.trg_word_prj.weight is not model.decoder.trg_word_emb.weight
    model = make_aiayn(emb_src_trg_weight_sharing=False)
    assert model.encoder.src_word_emb.weight is not model.decoder.trg_word_emb.weight
    assert model.trg_word_prj.weight is model.decoder.trg_word_emb.weight


def test_aiayn_refuses_what_is_longer_than_its_table():
    model = make_aiayn()
    assert model(torch.ones(1, 10).long(), TARGET[:1]).shape == (5, 13)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 11).long(), TARGET[:1])


def test_aiayn_normalizes_before_the_first_layer_with_its_own_epsilon():
    model = make_aiayn(n_layers=0)
    table = model.encoder.position_enc.pos_table[0]
    torch.testing.assert_close(table, sinusoid_table(10, 8).float(), rtol=0, atol=0)
    x = model.encoder.src_word_emb.weight[SOURCE] + table[:4]
    (memory,) = model.encoder(SOURCE, aiayn.get_pad_mask(SOURCE, 0))
    torch.testing.assert_close(memory, torch.nn.functional.layer_norm(x, (8,), eps=1e-6))
    norms = [m for m in make_aiayn().modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 12 and {norm.eps for norm in norms} == {1e-6}


def test_aiayn_drops_attention_weights_even_without_dropout():
    model = make_aiayn(dropout=0.0)
    still = model(SOURCE, TARGET)
    torch.testing.assert_close(model(SOURCE, TARGET), still, rtol=0, atol=0)
    model.train()
    assert (model(SOURCE, TARGET) - still).abs().max() > 1e-3
    rates = [m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert sorted(set(rates)) == [0.0, 0.1] and rates.count(0.1) == 6


def test_embeddings_are_scaled_and_padding_is_a_word():
    torch.manual_seed(0)
    module = embeddings.Embeddings(d_model=8, vocab=11)
    torch.testing.assert_close(module(SOURCE), module.lut.weight[SOURCE] * 8**0.5)
    assert module.lut.padding_idx is None and (module.lut.weight[0] != 0).all()


def test_embeddings_positions_start_at_0_and_stay_in_float32():
    module = make_positions(d_model=512, max_len=5000)
    assert module.pe.dtype == torch.float32 and not module.pe.requires_grad
    torch.testing.assert_close(module(torch.zeros(1, 3, 512)), module.pe[:, :3], rtol=0, atol=0)
    assert module.pe[0, 0].tolist() == [0.0, 1.0] * 256
    off = (module.pe[0].double() - sinusoid_table(5000, 512)).abs()
    assert off[:60].max() < 1e-5 and 1e-4 < off.max() < 1e-3


def test_embeddings_positions_drop_out_of_the_sum():
    torch.manual_seed(0)
    module = make_positions(dropout=0.5)
    x = torch.full((1, 60, 8), 3.0)
    dropped = module(x)
    kept = dropped != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(dropped[kept], (2 * (x + module.pe))[kept])


def test_embeddings_positions_refuse_long_inputs_and_odd_widths():
    module = make_positions()
    with pytest.raises(RuntimeError):
        module(torch.zeros(1, 61, 8))
    with pytest.raises(RuntimeError):
        make_positions(d_model=7)
