"""Fine-tuning of NLLB-200 (600 million parameters) on your own German-English files.

    python -m flaxformer_mt import --input=hf:facebook/nllb-200-distilled-600M --run=runs/nllb
    python train.py --config=configs/finetune_nllb.py --init=runs/nllb --config.data.text_dir=my_data

The network and the vocabulary are those of the import, whatever this file says. For other languages, set
data.source_language and data.target_language: two-letter codes, or NLLB's own, such as ckb_Arab.
"""

from flaxformer_mt.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)


def get_config() -> Config:
    """All parameters but the embeddings are trained, in bfloat16 with float32 parameters."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            tag_style="nllb",
            max_source_length=128,
            max_target_length=128,
            batch_tokens=8192,
            num_shapes=4,
        ),
        vocab=VocabConfig(kind="pretrained", size=256_206, pad_id=1, bos_id=2, eos_id=2, unk_id=3),
        model=ModelConfig(
            num_encoder_layers=12,
            num_decoder_layers=12,
            model_dim=1024,
            num_heads=16,
            ffn_dim=4096,
            positions="sinusoidal_halves",
            first_position=2,
            max_positions=1024,
            dropout_rate=0.1,
            attention_dropout_rate=0.0,
            dtype="bfloat16",
        ),
        optim=OptimConfig(
            optimizer="adamw",
            learning_rate=5e-5,
            schedule="linear",
            warmup_steps=200,
            accumulation=4,
            freeze=("*_embedding",),
        ),
        train=TrainConfig(
            steps=5000,
            evaluate_every=500,
            checkpoint_every=500,
            keep_checkpoints=1,
            loss_chunk_tokens=2048,
        ),
        search=SearchConfig(method="beam", beam_size=4, length_penalty=1.0, length_penalty_kind="length"),
    )
