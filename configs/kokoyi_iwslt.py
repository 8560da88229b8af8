"""The mathematical Transformer of document 001, on IWSLT German-English.

    python train.py --config=configs/kokoyi_iwslt.py --config.data.text_dir=DIR

DIR contains train, valid and test, each as .de and .en, with spaces between words. A TFDS data set of the
two languages also works (--config.data.dataset=NAME). The model computes the same as the PyTorch original
(benchmarks/originals/kokoyi.py): heads as wide as the feed-forward layer, projections without bias, the
document's Xavier gains, post-norm, positions from 0, unscaled embeddings, of which the padding's is read but
not trained, an output matrix without bias.
Trained as the original: plain Adam, 16 pairs per batch, cross-entropy and token accuracy without padding,
logged at every update and every epoch.

As in the document, attention does not mask padding, so the translation of a sentence depends on its batch.
With --config.model.padding_mask=source it does not, but the model differs from the original. Further
differences: sources do not begin with bos, which carries no information; the mean loss of an epoch is over
its tokens, not over its batches; adjacent unknown words, of which a training text has none, are one. Batches
are shuffled as there, but padded to the next of 10 shapes instead of to their longest sentences; more shapes
(--config.data.num_shapes, --config.data.length_multiple=1) take longer to compile and come closer.
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
    """2+2 layers of width 16, 2 heads of width 64, word vocabularies."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            source_language="de",
            target_language="en",
            max_source_length=99,  # 100 there, where bos counts as well
            max_target_length=99,
            batching="shuffle",
            batch_tokens=1600,
            batch_pairs=16,
            num_shapes=10,
        ),
        # Every word of the training text, in each language.
        vocab=VocabConfig(kind="word", size=0, joint=False, byte_fallback=False, normalization="identity"),
        model=ModelConfig(
            num_encoder_layers=2,
            num_decoder_layers=2,
            model_dim=16,
            num_heads=2,
            key_dim=64,
            value_dim=64,
            ffn_dim=64,
            norm_position="post",
            embedding_scale=False,
            tying="none",
            padding_mask="none",
            attention_bias=False,
            dropout_rate=0.0,
            initializer="kokoyi",
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=1e-3,
            schedule="constant",
            warmup_steps=0,
            b2=0.999,
            epsilon=1e-8,
            clip_norm=0.0,
        ),
        train=TrainConfig(
            steps=37_000,  # three epochs of 197,000 pairs
            label_smoothing=0.0,
            log_accuracy=True,
            log_every=1,
            evaluate_every=6_000,
            checkpoint_every=2_000,
        ),
        search=SearchConfig(method="greedy", beam_size=1),
    )
