"""Tests run on the CPU, without a network, with types checked strictly."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
