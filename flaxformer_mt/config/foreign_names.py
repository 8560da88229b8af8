"""Names of config fields and flags in other toolkits, so that errors can name the equivalents here.

The toolkits are fairseq, OpenNMT-py, eole, Joey NMT, Marian, Sockeye and transformers; docs/migrating.md
lists their versions.
"""

from collections.abc import Collection

# Our flag, or the dotted name of our field (and of its flag) -> names elsewhere, without dashes.
FOREIGN_NAMES = {
    "run": "save_dir save_model model_dir restore_file model path models output_dir",
    "output": "output_dir out output_file results_path",
    "input": "src input_file",
    "source": "src input_file",
    "target": "tgt ref refs references",
    "reference": "tgt ref refs references",
    "source_language": "source_lang src_lang",
    "target_language": "target_lang tgt_lang",
    "init": "train_from finetune_from_model pretrained_model load_model params",
    "scorer": "valid_metrics valid_script_path",
    "bleu_tokenize": "metrics",
    "n_best": "nbest num_return_sequences",
    "data.text_dir": "train_data train_sets data_path",
    "data.source_language": "source_lang src_lang src",
    "data.target_language": "target_lang tgt_lang tgt",
    "data.max_source_length": "max_source_positions max_length",
    "data.max_target_length": "max_target_positions",
    "data.batch_tokens": "max_tokens batch_size mini_batch_words per_device_train_batch_size mini_batch",
    "vocab.size": "vocab_size nwordssrc nwordstgt tgt_vocab_size dim_vocabs bpe",
    "vocab.source_size": "src_vocab_size",
    "vocab.joint": "joined_dictionary share_vocab",
    "model.num_encoder_layers": "layers num_layers encoder_layers enc_layers enc_depth",
    "model.num_decoder_layers": "decoder_layers dec_layers dec_depth",
    "model.model_dim": "encoder_embed_dim decoder_embed_dim hidden_size dim_emb d_model rnn_size "
    "transformer_model_size",
    "model.num_heads": "encoder_attention_heads decoder_attention_heads heads transformer_heads n_heads",
    "model.ffn_dim": "encoder_ffn_embed_dim transformer_ff ff_size transformer_dim_ffn d_ff encoder_ffn_dim "
    "transformer_feed_forward_num_hidden",
    "model.norm_position": "encoder_normalize_before decoder_normalize_before layer_norm "
    "transformer_preprocess encoder_layer_style",
    "model.tying": "share_all_embeddings share_embeddings tied_embeddings tied_embeddings_all tied_softmax "
    "share_decoder_input_output_embed share_decoder_embeddings weight_tying_type tie_word_embeddings",
    "model.dropout_rate": "dropout transformer_dropout",
    "model.attention_dropout_rate": "attention_dropout transformer_dropout_attention",
    "model.ffn_dropout_rate": "activation_dropout transformer_dropout_ffn",
    "model.dtype": "fp16 bf16 compute_dtype amp",
    "optim.learning_rate": "lr learn_rate initial_learning_rate",
    "optim.schedule": "lr_scheduler decay_method scheduling lr_decay_inv_sqrt",
    "optim.warmup_steps": "warmup warmup_updates lr_warmup learning_rate_warmup",
    "optim.clip_norm": "clip max_grad_norm clip_grad_norm",
    "optim.accumulation": "update_freq accum_count batch_multiplier optimizer_delay "
    "gradient_accumulation_steps update_interval",
    "optim.ema_decay": "average_decay exponential_smoothing moving_average_decay store_ema",
    "train.steps": "epochs after_epochs max_epoch num_train_epochs max_update max_updates updates "
    "train_steps after max_steps",
    "train.evaluate_every": "valid_steps valid_interval validate_interval_updates validation_freq valid_freq "
    "eval_steps checkpoint_interval",
    "train.checkpoint_every": "save_checkpoint_steps save_interval save_interval_updates save_freq "
    "save_steps",
    "train.best_metric": "best_checkpoint_metric early_stopping_metric optimized_metric "
    "metric_for_best_model",
    "train.patience": "early_stopping max_num_checkpoint_not_improved",
    "search.max_length_ratio": "max_len_a max_length_factor",
    "search.max_length_offset": "max_len_b",
    "search.beam_size": "beam num_beams",
    "search.length_penalty": "lenpen alpha beam_alpha normalize length_penalty_alpha",
    "search.no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
    "search.batch_tokens": "max_tokens batch_size mini_batch_words per_device_train_batch_size mini_batch",
}
# What the values of some are here.
_UNITS = {
    "data.batch_tokens": "in tokens, on all devices together",
    "search.batch_tokens": "in tokens",
    "model.dtype": "which has bfloat16 and float32",
    "train.steps": "which counts steps; `show` says how many an epoch has",
}
# Flags that mean something else in commands with the other flag: in `show`, and in those that make pairs.
_OTHER_MEANING = {"--target": "--config", "--max_length_ratio": "--pair_length_ratio"}
# What is done by itself, or otherwise than by a flag -> what other toolkits call their flags for it.
_OTHERWISE = {
    "train goes on with a run by itself: give its --run again": (
        "resume resume_from_checkpoint load_checkpoint"
    ),
    "all devices are used by themselves; set CUDA_VISIBLE_DEVICES or JAX_PLATFORMS to choose among them": (
        "device devices gpu gpus gpuid gpu_ranks use_cuda world_size n_gpu"
    ),
    "the network is that of the config: --config=NAME, or --config.model.*": "arch encoder_type type",
    "batches have --config.data.batch_tokens; show --target says whether they fit": "mini_batch_fit",
    "pieces are joined by themselves": "remove_bpe post_process bpe_symbol",
    "delete the run directory, or give another --run": "overwrite overwrite_output_dir",
    "prepare and train make the vocabulary; --config.vocab.* says how": (
        "srcdict joined_dictionary src_vocab vocab_file"
    ),
}


def find_field(name: str) -> str:
    """Return the field for another toolkit's name: lr gives "optim.learning_rate"; unknown names give ""."""
    return next((ours for ours, names in FOREIGN_NAMES.items() if "." in ours and name in names.split()), "")


def explain_foreign_flag(name: str, flags: Collection[str]) -> str:
    """Explain another toolkit's flag: "here it is --config.train.steps"; "" if no flag corresponds to it."""
    meant: dict[str, str] = {}
    for flag in flags:
        if _OTHER_MEANING.get(flag) in flags:
            continue
        own = flag.removeprefix("--").removeprefix("config.")
        for ours in (own, f"search.{own}", f"model.{own}"):
            if name in FOREIGN_NAMES.get(ours, "").split():
                meant[flag] = ours
    if meant:
        # The flags of the command itself before those of its config; of these, the last is its own.
        flag = next((flag for flag in reversed(meant) if "." not in flag), next(iter(meant)))
        return f"here it is {flag}" + (f", {_UNITS[meant[flag]]}" if meant[flag] in _UNITS else "")
    return next((text for text, names in _OTHERWISE.items() if name in names.split()), "")
