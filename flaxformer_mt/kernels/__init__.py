"""Kernels: what a platform computes in its own way, as pure functions, each with a reference in plain jnp.

`choose_kernels` returns the table that a model is made with.
"""

from flaxformer_mt.kernels.attention_kernels import Drop
from flaxformer_mt.kernels.kernel_table import Kernels, choose_kernels
from flaxformer_mt.kernels.masks import MaskRule, drop_ends
