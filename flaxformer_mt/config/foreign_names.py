"""What options of fairseq, OpenNMT-py, eole, Joey NMT, Marian and Seq2SeqTrainer are called here.

Other names that people try are among them.
"""

from collections.abc import Mapping


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return what a table has for each of its names, which are without dashes and with underscores."""
    return {name: meaning for meaning, names in table.items() for name in names.split()}


# Flags that mean the same, the one of training first -> names.
_SAME = _by_name(
    {
        # network
        "--config.model.num_encoder_layers": "layers num_layers encoder_layers enc_layers enc_depth",
        "--config.model.num_decoder_layers": "decoder_layers dec_layers dec_depth",
        "--config.model.model_dim": (
            "encoder_embed_dim decoder_embed_dim hidden_size dim_emb d_model rnn_size"
        ),
        "--config.model.ffn_dim": "encoder_ffn_embed_dim transformer_ff ff_size transformer_dim_ffn d_ff",
        "--config.model.num_heads": (
            "encoder_attention_heads decoder_attention_heads heads transformer_heads n_heads"
        ),
        "--config.model.norm_position": (
            "encoder_normalize_before decoder_normalize_before layer_norm transformer_preprocess"
        ),
        "--config.model.tying": "share_all_embeddings share_embeddings tied_embeddings tied_embeddings_all",
        "--config.model.dropout_rate": "dropout transformer_dropout",
        "--config.model.dtype --dtype": "fp16 bf16 compute_dtype amp",
        # data
        "--config.data.batch_tokens --batch_tokens": (
            "max_tokens batch_size mini_batch_words per_device_train_batch_size mini_batch"
        ),
        "--config.data.text_dir": "train_data train_sets data_path",
        "--config.data.max_source_length": "max_source_positions max_length",
        "--config.data.max_target_length": "max_target_positions",
        "--config.vocab.size": "vocab_size nwordssrc dim_vocabs bpe",
        "--source_language --config.data.source_language": "source_lang src_lang",
        "--target_language --config.data.target_language": "target_lang tgt_lang",
        # training
        "--config.train.steps": (
            "epochs after_epochs max_epoch num_train_epochs max_update train_steps after max_steps"
        ),
        "--config.optim.learning_rate": "lr learn_rate",
        "--config.optim.schedule": "lr_scheduler decay_method scheduling",
        "--config.optim.warmup_steps": "warmup warmup_updates lr_warmup learning_rate_warmup",
        "--config.optim.accumulation": (
            "update_freq accum_count batch_multiplier optimizer_delay gradient_accumulation_steps"
        ),
        "--config.optim.clip_norm": "clip max_grad_norm clip_grad_norm",
        "--config.optim.ema_decay": "average_decay exponential_smoothing moving_average_decay",
        "--config.train.patience": "early_stopping",
        "--config.train.evaluate_every": (
            "valid_steps valid_interval validate_interval_updates validation_freq valid_freq"
        ),
        "--config.train.checkpoint_every": (
            "save_checkpoint_steps save_interval save_interval_updates save_freq save_steps"
        ),
        "--run": "save_dir save_model model_dir restore_file model path models",
        "--output --run": "output_dir",
        "--init": "train_from finetune_from_model pretrained_model load_model",
        # search
        "--beam_size --config.search.beam_size": "beam num_beams",
        "--length_penalty --config.search.length_penalty": "lenpen alpha beam_alpha normalize",
        "--n_best": "nbest num_return_sequences",
        "--input --source --config.data.source_language": "src",
        "--input --source": "input_file",
        "--target --reference --config.data.target_language": "tgt",
        "--reference --target": "ref refs references",
        "--output": "out output_file results_path",
        "--no_repeat_ngram --config.search.no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
        "--bleu_tokenize": "metrics",
    }
)

# What is done by itself, or otherwise than by a flag -> names.
_OTHERWISE = _by_name(
    {
        "train goes on with a run by itself: give its --run again": (
            "resume resume_from_checkpoint load_checkpoint"
        ),
        (
            "all devices are used by themselves; set CUDA_VISIBLE_DEVICES or JAX_PLATFORMS to choose among "
            "them"
        ): "device devices gpu gpus gpuid gpu_ranks use_cuda world_size n_gpu",
        "the network is that of the config: --config=NAME, or --config.model.*": "arch encoder_type type",
        "pieces are joined by themselves": "remove_bpe post_process bpe_symbol",
        "delete the run directory, or give another --run": "overwrite overwrite_output_dir",
        "prepare and train make the vocabulary; --config.vocab.* says how": (
            "srcdict joined_dictionary src_vocab vocab_file"
        ),
    }
)

# What a value means here -> names.
_UNITS = _by_name(
    {
        "which counts updates; `show` says how many an epoch has": (
            "epochs after_epochs max_epoch num_train_epochs"
        ),
        "in tokens, on all devices together": (
            "max_tokens batch_size mini_batch mini_batch_words per_device_train_batch_size"
        ),
        "which has bfloat16 and float32": "fp16 amp",
    }
)


def find_our_option(flag: str, known: set[str]) -> str | None:
    """Return what to say of an option that another toolkit has: "here it is --config.train.steps"."""
    name = flag.lstrip("-").rpartition(".")[2].replace("-", "_")
    flags = [option for option in _SAME.get(name, "").split() if option in known]
    if flags:
        unit = f", {_UNITS[name]}" if name in _UNITS else ""
        return f"here it is {flags[0]}{unit}"
    return _OTHERWISE.get(name)


def find_our_field(name: str) -> str | None:
    options = _SAME.get(name, "").split()
    return next((option.removeprefix("--") for option in options if option.startswith("--config.")), None)
