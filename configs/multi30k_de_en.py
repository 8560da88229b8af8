"""Multi30k German-English: image captions, 29,000 pairs, 20 to 50 minutes on two CPU cores.

    python train.py --config=configs/multi30k_de_en.py --config.data.text_dir=DIR

DIR contains train, valid and test, each as .de and .en (test is test_2016_flickr); or use the Hub's set:
--config.data.dataset=hf:bentrevett/multi30k. Measured on two cores of an AMD EPYC with beam size 5: 49
minutes and 42.38 BLEU; with --config.model.dtype=bfloat16, 20 to 35 minutes and 41.53 to 42.48 BLEU in three
runs (docs/results.md).
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
    """3+3 pre-norm layers of width 256 with dropout 0.3; the learning rate falls linearly to zero."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            source_language="de",
            target_language="en",
            max_source_length=100,
            max_target_length=100,
            batch_tokens=2048,
            num_shapes=10,
            length_multiple=2,
        ),
        vocab=VocabConfig(kind="bpe", size=8000, joint=True),
        model=ModelConfig(
            num_encoder_layers=3,
            num_decoder_layers=3,
            model_dim=256,
            num_heads=4,
            ffn_dim=1024,
            norm_position="pre",
            dropout_rate=0.3,
            attention_dropout_rate=0.1,
            ffn_dropout_rate=0.0,
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=2.5e-3,
            schedule="linear",
            warmup_steps=1000,
            clip_norm=1.0,
            ema_decay=0.999,
        ),
        train=TrainConfig(
            steps=6600,
            evaluate_every=600,
            checkpoint_every=600,
            keep_checkpoints=3,
            loss_chunk_tokens=512,
        ),
        search=SearchConfig(method="beam", beam_size=5, length_penalty=1.0),
    )
