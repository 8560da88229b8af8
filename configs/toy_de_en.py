"""German-English sentences from a small grammar: data, training and test in minutes on two CPU cores.

    python train.py

Measured on two cores of an AMD EPYC: 5.8 minutes of processor time, 96.9 BLEU (docs/results.md).
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
    """2+2 pre-norm layers of width 128; the corpus has a few hundred different words."""
    return Config(
        data=DataConfig(
            dataset="toy_de_en",
            max_source_length=48,
            max_target_length=48,
            batch_tokens=2048,
            num_shapes=6,
            length_multiple=2,
        ),
        vocab=VocabConfig(kind="bpe", size=2000, joint=True),
        model=ModelConfig(
            num_encoder_layers=2,
            num_decoder_layers=2,
            model_dim=128,
            num_heads=4,
            ffn_dim=512,
            dropout_rate=0.1,
        ),
        optim=OptimConfig(learning_rate=3e-3, schedule="linear", warmup_steps=200, ema_decay=0.99),
        train=TrainConfig(
            steps=900, evaluate_every=150, checkpoint_every=150, keep_checkpoints=2, loss_chunk_tokens=256
        ),
        search=SearchConfig(method="beam", beam_size=4, length_penalty=1.0),
    )
