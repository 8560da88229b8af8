"""The data pipeline from sentence pairs to batches of token ids: token stores, epoch plans, loader."""
