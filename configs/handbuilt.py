"""The hand-built Transformer of document 000, on the toy corpus.

    python train.py --config=configs/handbuilt.py

The model computes the same as the PyTorch original (benchmarks/originals/handbuilt.py): fixed sinusoids with
positions from 1, two unscaled embeddings, biased projections with explicit sizes, post-norm blocks,
feed-forward layers as convolutions of kernel size 1 (--config.model.ffn_layer=dense computes the same), an
output without bias, no dropout. `export --format=handbuilt` writes the original's state dict. One
difference from the original: source and target sentences end with eos, so that decoding can stop.
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
    """2+2 layers of width 128, 4 heads with keys and values of width 32."""
    return Config(
        data=DataConfig(
            dataset="toy_de_en",
            max_source_length=48,
            max_target_length=48,
            batch_tokens=2048,
            num_shapes=6,
            length_multiple=2,
        ),
        vocab=VocabConfig(kind="bpe", size=1500, joint=False),
        model=ModelConfig(
            num_encoder_layers=2,
            num_decoder_layers=2,
            model_dim=128,
            num_heads=4,
            key_dim=32,
            value_dim=32,
            ffn_dim=512,
            ffn_layer="convolution",
            norm_position="post",
            first_position=1,
            max_positions=48,
            embedding_scale=False,
            tying="none",
            padding_mask="both",
            dropout_rate=0.0,
            initializer="torch",
        ),
        optim=OptimConfig(learning_rate=1e-3, schedule="linear", warmup_steps=200, clip_norm=1.0),
        train=TrainConfig(
            steps=1200,
            label_smoothing=0.0,
            evaluate_every=400,
            checkpoint_every=400,
            keep_checkpoints=2,
            loss_chunk_tokens=256,
        ),
        search=SearchConfig(method="greedy", beam_size=1),
    )
