"""attention-is-all-you-need-pytorch, document 003: the base model with joint BPE and the Noam schedule.

    python train.py --config=configs/aiayn.py --config.data.text_dir=DIR

DIR holds train, valid and test, each as .de and .en (Multi30k is what that project trains on). Equal to its
PyTorch original: dropout and a norm after the positions in both stacks, post-norm blocks with epsilon 1e-6,
projections without bias, 200 positions, Xavier on every matrix. Its switches:

    -proj_share_weight -embs_share_weight: --config.model.tying=all (both), target_output, embeddings, none
    -scale_emb_or_prj prj: --config.model.logit_scale=True --config.model.embedding_scale=False
    -scale_emb_or_prj emb: --config.model.logit_scale=False --config.model.embedding_scale=True
    -scale_emb_or_prj none: both False

It departs in three things: sources do not begin with bos; smoothing spreads over the whole vocabulary, the
right word included, which is the same loss for a smoothing of 0.1 (V - 1) / V; and a dropout of 0 also ends
that of attention weights, which there stays at 0.1.
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
    """6+6 layers of width 512, 8 heads, all embeddings tied, logits scaled."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            source_language="de",
            target_language="en",
            max_source_length=100,
            max_target_length=100,
            batch_tokens=12_800,
            batch_pairs=256,
            num_shapes=10,
        ),
        vocab=VocabConfig(kind="bpe", size=10_000, joint=True),
        model=ModelConfig(
            num_encoder_layers=6,
            num_decoder_layers=6,
            model_dim=512,
            num_heads=8,
            key_dim=64,
            value_dim=64,
            ffn_dim=2048,
            norm_position="post",
            norm_epsilon=1e-6,
            embedding_norm=True,
            max_positions=200,
            embedding_scale=False,
            logit_scale=True,
            tying="all",
            padding_mask="both",
            attention_bias=False,
            dropout_rate=0.1,
            ffn_dropout_rate=0.0,
            initializer="aiayn",
        ),
        optim=OptimConfig(
            optimizer="adam",
            learning_rate=2.0,
            schedule="noam",
            warmup_steps=4000,
            b1=0.9,
            b2=0.98,
            epsilon=1e-9,
            clip_norm=0.0,
        ),
        train=TrainConfig(
            steps=45_000,  # 400 epochs of Multi30k
            label_smoothing=0.1,
            evaluate_every=1000,
            checkpoint_every=1000,
        ),
        search=SearchConfig(method="beam", beam_size=5, length_penalty=0.7),
    )
