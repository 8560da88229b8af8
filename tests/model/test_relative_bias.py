"""Relative biases and fairseq's sinusoids: the numbers of the systems that have trained with them."""

import numpy as np
import pytest

from flaxformer_mt.kernels.relative_bias import find_buckets
from flaxformer_mt.model.positions import sinusoidal_half_table

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "longest"), [(32, 128), (8, 20), (64, 256), (32, 100)])
def test_buckets_are_those_of_t5(count, longest, bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = np.arange(-700, 701)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(distances), bidirectional, count, longest)
    found = find_buckets(distances, count, longest, bidirectional)
    np.testing.assert_array_equal(found, theirs.numpy())


@pytest.mark.parametrize("width", [4, 14, 16])
def test_the_table_of_halves_is_that_of_m2m100(width):
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(400, width).numpy()
    np.testing.assert_allclose(sinusoidal_half_table(400, width), theirs, rtol=0, atol=4e-5)
    np.testing.assert_allclose(sinusoidal_half_table(60, width), theirs[:60], rtol=0, atol=5e-6)
