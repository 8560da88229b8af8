"""Low-rank adaptation (LoRA) of MADLAD-400 (3 billion parameters) on your own German-English files.

    python -m flaxformer_mt import --input=hf:google/madlad400-3b-mt --run=runs/madlad --languages=de,en
    python train.py --config=configs/finetune_madlad.py --init=runs/madlad --config.data.text_dir=my_data

The network and the vocabulary are those of the import, whatever this file says. For other languages, set
data.source_language and data.target_language.
"""

from flaxformer_mt.config import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)


def get_config() -> Config:
    """Changes of rank 16 of all matrices of attention and feed-forward layers, in bfloat16."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            tag_style="madlad",
            max_source_length=128,
            max_target_length=128,
            batch_tokens=4096,
            num_shapes=4,
        ),
        vocab=VocabConfig(kind="pretrained", size=256_000, pad_id=1, bos_id=0, eos_id=2, unk_id=0),
        model=ModelConfig(
            num_encoder_layers=32,
            num_decoder_layers=32,
            model_dim=1024,
            num_heads=16,
            key_dim=128,
            value_dim=128,
            ffn_dim=8192,
            activation="geglu_tanh",
            norm="rms",
            norm_epsilon=1e-6,
            positions="relative",
            embedding_scale=False,
            attention_scale=False,
            attention_bias=False,
            ffn_bias=False,
            tying="embeddings",
            dropout_rate=0.0,
            dtype="bfloat16",
            remat="full",
        ),
        optim=OptimConfig(
            learning_rate=3e-4,
            schedule="linear",
            warmup_steps=100,
            accumulation=4,
            lora=LoraConfig(rank=16, alpha=32.0),
        ),
        train=TrainConfig(
            steps=2000,
            evaluate_every=500,
            checkpoint_every=500,
            keep_checkpoints=1,
            loss_chunk_tokens=1024,
        ),
        search=SearchConfig(method="beam", beam_size=4, length_penalty=1.0, length_penalty_kind="length"),
    )
