"""The decoder-only Transformer of document 002, as a translation model on the toy corpus.

    python train.py --config=configs/decoder_only.py

A row is source, start symbol, target; the loss is computed on the target. The same network as a language
model of English:

    python train.py --config=configs/decoder_only.py --run=runs/english \\
        --config.data.source_language= --config.train.best_metric=loss

The model computes the same as the PyTorch original (benchmarks/originals/decoder_only.py): a causal stack
without cross-attention, embeddings and learned positions with biases, explicit key and value sizes, exact
GELU, normalization by the population standard deviation without parameters or epsilon, dropout on sublayer
outputs, logits with bias. Each position has its own vector, as the document intends;
--config.model.positions=one_vector adds the same vector at all positions, which is what the document's
formula says literally.
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
    """4 layers of width 128, at most 96 tokens of source and target together."""
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
            architecture="decoder_only",
            num_decoder_layers=4,
            model_dim=128,
            num_heads=4,
            key_dim=32,
            value_dim=32,
            ffn_dim=512,
            activation="gelu",
            norm_position="post",
            norm_affine=False,
            norm_epsilon=0.0,
            positions="learned",
            max_positions=96,
            embedding_scale=False,
            embedding_bias=True,
            tying="none",
            output_bias=True,
            dropout_rate=0.1,
            embedding_dropout_rate=0.0,
            attention_dropout_rate=0.0,
            ffn_dropout_rate=0.0,
            initializer="torch",
        ),
        optim=OptimConfig(learning_rate=1e-3, schedule="linear", warmup_steps=300, ema_decay=0.99),
        train=TrainConfig(
            steps=1500,
            label_smoothing=0.0,
            evaluate_every=500,
            checkpoint_every=500,
            keep_checkpoints=2,
            loss_chunk_tokens=256,
        ),
        search=SearchConfig(method="beam", beam_size=4, length_penalty=1.0),
    )
