"""Data pipeline from sentence pairs to batches of token ids: token store, epoch plan, loader."""
