"""attention-is-all-you-need-pytorch, document 003: the base model with joint BPE and the Noam schedule.

    python train.py --config=configs/aiayn.py --config.data.text_dir=DIR

DIR contains train, valid and test, each as .de and .en (the original trains on Multi30k). The model
computes the same as the PyTorch original (benchmarks/originals/aiayn.py): dropout and a norm after the
positions in both stacks, post-norm blocks with epsilon 1e-6, projections without bias, 200 positions, Xavier
on every matrix. The original's switches:

    -proj_share_weight -embs_share_weight: --config.model.tying=all (both), target_output, embeddings, none
    -scale_emb_or_prj prj: --config.model.logit_scale=True --config.model.embedding_scale=False
    -scale_emb_or_prj emb: --config.model.logit_scale=False --config.model.embedding_scale=True
    -scale_emb_or_prj none: both False

Trained as its README trains (batches of 256 pairs, 400 epochs of Multi30k, factor 2 of the Noam schedule
with 128,000 warm-up steps, all matrices tied, label smoothing), with BPE (same options in the README of the
original). Its published curves are of a second recipe, without BPE, on tokenized lower-cased text:

    --config.train.steps=22_800 --config.optim.learning_rate=0.5 --config.optim.warmup_steps=4000
    --config.vocab.kind=word --config.vocab.joint=False --config.vocab.byte_fallback=False
    --config.model.tying=target_output

Four differences from the original: sources do not begin with bos; the length penalty of a search does not
count bos; label smoothing includes the right word, so that 0.1 here gives the loss of 0.1 (V - 1) / V there,
with a vocabulary of V words; and a dropout rate of 0 also disables the dropout of attention weights, which is
always 0.1 there.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config, DataConfig, SearchConfig, TrainConfig, VocabConfig
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """6+6 layers of width 512, 8 heads, all embeddings tied, logits scaled.

    Model and optimizer are derived from the paper's base model, wmt14_en_de_base.py in the same folder.
    """
    base = load_config(Path(__file__).with_name("wmt14_en_de_base.py"))
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
        model=dataclasses.replace(
            base.model,
            key_dim=64,
            value_dim=64,
            norm_epsilon=1e-6,
            embedding_norm=True,
            max_positions=200,
            embedding_scale=False,
            logit_scale=True,
            padding_mask="both",
            attention_bias=False,
            attention_dropout_rate=None,  # 0.1, as dropout_rate
            initializer="aiayn",
            dtype="float32",
        ),
        optim=dataclasses.replace(base.optim, learning_rate=2.0, warmup_steps=128_000),
        train=TrainConfig(
            steps=45_000,  # 400 epochs of Multi30k
            label_smoothing=0.1,
            evaluate_every=1000,
            checkpoint_every=1000,
        ),
        search=SearchConfig(method="beam", beam_size=5, length_penalty=0.7, length_penalty_kind="length"),
    )
