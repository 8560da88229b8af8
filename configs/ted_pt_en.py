"""Portuguese to English on TED talks (52,000 pairs), the TFDS set ted_hrlr_translate/pt_to_en.

    pip install '.[tfds-build]'         # once: TFDS builds this set with TensorFlow
    python -m flaxformer_mt prepare --config=ted_pt_en
    python train.py --config=ted_pt_en

For one GPU. The model is sized for little data: width 256, dropout 0.3, a small joint vocabulary.
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
    """4+4 layers of width 256 with dropout 0.3."""
    return Config(
        data=DataConfig(
            dataset="ted_hrlr_translate/pt_to_en",
            source_language="pt",
            target_language="en",
            valid_split="validation",
            batch_tokens=4096,
        ),
        vocab=VocabConfig(kind="bpe", size=8000, joint=True),
        model=ModelConfig(
            num_encoder_layers=4,
            num_decoder_layers=4,
            model_dim=256,
            num_heads=4,
            ffn_dim=1024,
            dropout_rate=0.3,
        ),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=2000, ema_decay=0.999),
        train=TrainConfig(steps=30_000, evaluate_every=1000, checkpoint_every=1000, patience=8),
        search=SearchConfig(beam_size=5, length_penalty=1.0),
    )
