"""Training Transformers for machine translation in JAX/Flax."""
