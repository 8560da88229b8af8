"""Multi30k English-German, lower-cased and tokenised: the published tiny set-up (Wu et al., ACL 2021).

    python train.py --config=configs/multi30k_en_de_tiny.py --config.data.text_dir=DIR

DIR holds train, valid and test, each as .en and .de, lower-cased and split into Moses tokens (test is
test_2016_flickr). BLEU counts those tokens as they are.

Measured on two cores of an AMD EPYC: 117 minutes, 41.5 BLEU (docs/results.md).
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
    """4+4 layers of width 128, FFN 256, 4 heads, pre-norm, dropout 0.3, 10,000 joint pieces, all tied."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            source_language="en",
            target_language="de",
            max_source_length=100,
            max_target_length=100,
            batch_tokens=4096,
            num_shapes=10,
            length_multiple=2,
        ),
        vocab=VocabConfig(kind="bpe", size=10000, joint=True),
        model=ModelConfig(
            num_encoder_layers=4,
            num_decoder_layers=4,
            model_dim=128,
            num_heads=4,
            ffn_dim=256,
            norm_position="pre",
            dropout_rate=0.3,
            attention_dropout_rate=0.0,
            ffn_dropout_rate=0.0,
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=5e-3,
            schedule="linear",
            warmup_steps=1500,
            clip_norm=1.0,
            ema_decay=0.999,
        ),
        train=TrainConfig(
            steps=10000,
            evaluate_every=1000,
            checkpoint_every=500,
            keep_checkpoints=3,
            final_checkpoint="last",  # where the rate has come down to zero
            loss_chunk_tokens=256,
            bleu_tokenize="none",
        ),
        search=SearchConfig(method="beam", beam_size=5, length_penalty=1.0),
    )
