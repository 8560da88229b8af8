"""Names of options in other toolkits, and what this package calls them.

Names that users of fairseq, OpenNMT-py, eole, Joey NMT, Marian and transformers' Seq2SeqTrainer know, and
those that people try.
"""

# Name, without dashes and with underscores -> flags that mean the same, the one of training first.
_SAME: dict[str, tuple[str, ...]] = {
    # network
    **dict.fromkeys(("layers", "num_layers"), ("--config.model.num_encoder_layers",)),
    **dict.fromkeys(("encoder_layers", "enc_layers", "enc_depth"), ("--config.model.num_encoder_layers",)),
    **dict.fromkeys(("decoder_layers", "dec_layers", "dec_depth"), ("--config.model.num_decoder_layers",)),
    **dict.fromkeys(
        ("encoder_embed_dim", "decoder_embed_dim", "hidden_size", "dim_emb", "d_model", "rnn_size"),
        ("--config.model.model_dim",),
    ),
    **dict.fromkeys(
        ("encoder_ffn_embed_dim", "transformer_ff", "ff_size", "transformer_dim_ffn", "d_ff"),
        ("--config.model.ffn_dim",),
    ),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "heads", "transformer_heads", "n_heads"),
        ("--config.model.num_heads",),
    ),
    **dict.fromkeys(
        ("encoder_normalize_before", "decoder_normalize_before", "layer_norm", "transformer_preprocess"),
        ("--config.model.norm_position",),
    ),
    **dict.fromkeys(
        ("share_all_embeddings", "share_embeddings", "tied_embeddings", "tied_embeddings_all"),
        ("--config.model.tying",),
    ),
    **dict.fromkeys(("dropout", "transformer_dropout"), ("--config.model.dropout_rate",)),
    **dict.fromkeys(("fp16", "bf16", "compute_dtype", "amp"), ("--config.model.dtype", "--dtype")),
    # data
    **dict.fromkeys(
        ("max_tokens", "batch_size", "mini_batch_words", "per_device_train_batch_size", "mini_batch"),
        ("--config.data.batch_tokens", "--batch_tokens"),
    ),
    **dict.fromkeys(("train_data", "train_sets", "data_path"), ("--config.data.text_dir",)),
    **dict.fromkeys(("max_source_positions", "max_length"), ("--config.data.max_source_length",)),
    **dict.fromkeys(("max_target_positions",), ("--config.data.max_target_length",)),
    **dict.fromkeys(("vocab_size", "nwordssrc", "dim_vocabs", "bpe"), ("--config.vocab.size",)),
    **dict.fromkeys(("source_lang", "src_lang"), ("--source_language", "--config.data.source_language")),
    **dict.fromkeys(("target_lang", "tgt_lang"), ("--target_language", "--config.data.target_language")),
    # training
    **dict.fromkeys(
        ("epochs", "max_epoch", "max_update", "train_steps", "after", "num_train_epochs", "max_steps"),
        ("--config.train.steps",),
    ),
    **dict.fromkeys(("lr", "learn_rate"), ("--config.optim.learning_rate",)),
    **dict.fromkeys(("lr_scheduler", "decay_method", "scheduling"), ("--config.optim.schedule",)),
    **dict.fromkeys(
        ("warmup", "warmup_updates", "lr_warmup", "learning_rate_warmup"), ("--config.optim.warmup_steps",)
    ),
    **dict.fromkeys(
        ("update_freq", "accum_count", "batch_multiplier", "optimizer_delay", "gradient_accumulation_steps"),
        ("--config.optim.accumulation",),
    ),
    **dict.fromkeys(("clip", "max_grad_norm", "clip_grad_norm"), ("--config.optim.clip_norm",)),
    **dict.fromkeys(
        ("average_decay", "exponential_smoothing", "moving_average_decay"), ("--config.optim.ema_decay",)
    ),
    **dict.fromkeys(("early_stopping",), ("--config.train.patience",)),
    **dict.fromkeys(
        ("valid_steps", "valid_interval", "validate_interval_updates", "validation_freq", "valid_freq"),
        ("--config.train.evaluate_every",),
    ),
    **dict.fromkeys(
        ("save_checkpoint_steps", "save_interval", "save_interval_updates", "save_freq", "save_steps"),
        ("--config.train.checkpoint_every",),
    ),
    **dict.fromkeys(
        ("save_dir", "save_model", "model_dir", "restore_file", "model", "path", "models"),
        ("--run",),
    ),
    **dict.fromkeys(("output_dir",), ("--output", "--run")),
    **dict.fromkeys(("train_from", "finetune_from_model", "pretrained_model", "load_model"), ("--init",)),
    # search
    **dict.fromkeys(("beam", "num_beams"), ("--beam_size", "--config.search.beam_size")),
    **dict.fromkeys(
        ("lenpen", "alpha", "beam_alpha", "normalize"), ("--length_penalty", "--config.search.length_penalty")
    ),
    **dict.fromkeys(("nbest", "num_return_sequences"), ("--n_best",)),
    **dict.fromkeys(("src",), ("--input", "--source", "--config.data.source_language")),
    **dict.fromkeys(("input_file",), ("--input", "--source")),
    **dict.fromkeys(("tgt",), ("--target", "--reference", "--config.data.target_language")),
    **dict.fromkeys(("ref", "refs", "references"), ("--reference", "--target")),
    **dict.fromkeys(("out", "output_file", "results_path"), ("--output",)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "block_ngram_repeat"),
        ("--no_repeat_ngram", "--config.search.no_repeat_ngram"),
    ),
    **dict.fromkeys(("metrics",), ("--bleu_tokenize",)),
}

# What is done by itself, or otherwise than by a flag.
_OTHERWISE = {
    **dict.fromkeys(
        ("resume", "resume_from_checkpoint", "load_checkpoint"),
        "train goes on with a run by itself: give its --run again",
    ),
    **dict.fromkeys(
        ("device", "devices", "gpu", "gpus", "gpuid", "gpu_ranks", "use_cuda", "world_size", "n_gpu"),
        "all devices are used by themselves; set CUDA_VISIBLE_DEVICES or JAX_PLATFORMS to choose among them",
    ),
    **dict.fromkeys(("overwrite", "overwrite_output_dir"), "delete the run directory, or give another --run"),
    **dict.fromkeys(
        ("srcdict", "joined_dictionary", "src_vocab", "vocab_file"),
        "prepare and train make the vocabulary; --config.vocab.* says how",
    ),
}

# What a value of these means here.
_UNITS = {
    **dict.fromkeys(
        ("epochs", "max_epoch", "num_train_epochs"),
        "which counts updates; `show` says how many an epoch has",
    ),
    **dict.fromkeys(
        ("max_tokens", "batch_size", "mini_batch", "mini_batch_words", "per_device_train_batch_size"),
        "in tokens, on all devices together",
    ),
    **dict.fromkeys(("fp16", "amp"), "which has bfloat16 and float32"),
}


def find_own_option(flag: str, known: set[str]) -> str | None:
    """Return what to say of an option that another toolkit has: "here it is --config.train.steps".

    Args:
      flag: as it was given, --max-tokens or --config.data.batch_size.
      known: the flags that the command has.
    """
    name = flag.lstrip("-").rpartition(".")[2].replace("-", "_")
    own = [option for option in _SAME.get(name, ()) if option in known]
    if own:
        unit = f", {_UNITS[name]}" if name in _UNITS else ""
        return f"here it is {own[0]}{unit}"
    return _OTHERWISE.get(name)


def find_own_field(name: str) -> str | None:
    """Return the field that means the same as a name of another toolkit: max_update is config.train.steps."""
    fields = (option.removeprefix("--") for option in _SAME.get(name, ()) if option.startswith("--config."))
    return next(fields, None)
