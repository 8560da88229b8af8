"""Kernels: platform-specific computations as pure functions, each with a reference in plain jnp.

`choose_kernels` returns the table of kernels that a model is built with. Axis letters are defined in
shapes.py.
"""

from flaxformer_mt.kernels.attention_kernels import Drop
from flaxformer_mt.kernels.kernel_table import Kernels, choose_kernels
from flaxformer_mt.kernels.masks import MaskRule, drop_ends
