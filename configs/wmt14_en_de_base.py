"""English to German on WMT 2014 with the base model of "Attention Is All You Need" (Vaswani et al. 2017).

    pip install '.[tfds-build]'         # once: TFDS builds this set with TensorFlow
    python -m flaxformer_mt prepare --config=wmt14_en_de_base
    python train.py --config=wmt14_en_de_base

For one large GPU or several (the paper: twelve hours on eight P100s). On a device with less memory use
gradient accumulation: --config.data.batch_tokens=6250 --config.optim.accumulation=4 gives as many tokens
per update in four smaller batches.

As in the paper: 6+6 post-norm layers of width 512, one vocabulary of 37,000 pieces and one matrix for both
embeddings and the output, dropout 0.1, label smoothing 0.1, Adam (0.9, 0.98, 1e-9), the learning rate of
equation 3 with 4,000 steps of warm-up, 25,000 source and 25,000 target tokens per batch, 100,000 steps,
average of the last five checkpoints, beam 4, alpha 0.6. Unlike the paper: SentencePiece vocabulary, matrix
products in bfloat16, sacreBLEU scores.
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
    """Return the base model of the paper's table 3."""
    return Config(
        data=DataConfig(
            dataset="wmt14_translate/de-en",
            source_language="en",
            target_language="de",
            valid_split="validation",
            batch_tokens=25_000,
            # Lengths that fit the tiles of TPUs and the attention kernels of TPUs and GPUs.
            length_multiple=16,
        ),
        vocab=VocabConfig(kind="bpe", size=37_000, joint=True),
        model=ModelConfig(
            num_encoder_layers=6,
            num_decoder_layers=6,
            model_dim=512,
            num_heads=8,
            ffn_dim=2048,
            norm_position="post",
            dropout_rate=0.1,
            # The paper applies dropout to sublayer outputs and embeddings, not inside the sublayers.
            attention_dropout_rate=0.0,
            ffn_dropout_rate=0.0,
            dtype="bfloat16",
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=1.0,
            schedule="noam",
            warmup_steps=4000,
            b1=0.9,
            b2=0.98,
            epsilon=1e-9,
            clip_norm=0.0,
        ),
        train=TrainConfig(
            steps=100_000,
            label_smoothing=0.1,
            # A fourth of the longest batch: on one TPU v5e or H100 the peak of memory is below 7 GiB.
            loss_chunk_tokens=6144,
            evaluate_every=5000,
            # The paper saved a checkpoint every ten minutes, about every 1,400 steps of the base model.
            checkpoint_every=1400,
            keep_checkpoints=5,
            average_last=5,
            final_checkpoint="average",
        ),
        search=SearchConfig(beam_size=4, length_penalty=0.6, max_length_ratio=1.0, max_length_offset=50),
    )
