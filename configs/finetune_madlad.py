"""Low-rank adaptation (LoRA) of MADLAD-400 (3 billion parameters) on your own German-English files.

    python -m flaxformer_mt import --input=hf:google/madlad400-3b-mt --run=runs/madlad --languages=de,en
    python train.py --config=configs/finetune_madlad.py --init=runs/madlad --config.data.text_dir=my_data

The network and the vocabulary are those of the import, whatever this file says. For other languages, set
data.source_language and data.target_language.
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config, LoraConfig, ModelConfig, OptimConfig, VocabConfig
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """Change of rank 16 of all matrices of attention and feed-forward layers, in bfloat16.

    Derived from finetune_nllb.py in the same folder.
    """
    base = load_config(Path(__file__).with_name("finetune_nllb.py"))
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, tag_style="madlad", batch_tokens=4096),
        vocab=VocabConfig(kind="pretrained", size=256_000, pad_id=1, bos_id=0, eos_id=2, unk_id=0),
        model=ModelConfig(
            num_encoder_layers=32,
            num_decoder_layers=32,
            model_dim=1024,
            num_heads=16,
            key_dim=128,
            value_dim=128,
            ffn_dim=8192,
            activation="geglu_tanh",
            norm="rms",
            norm_epsilon=1e-6,
            positions="relative",
            embedding_scale=False,
            attention_scale=False,
            attention_bias=False,
            ffn_bias=False,
            tying="embeddings",
            dropout_rate=0.0,
            dtype="bfloat16",
            remat="full",
        ),
        optim=OptimConfig(
            learning_rate=3e-4,
            schedule="linear",
            warmup_steps=100,
            accumulation=4,
            lora=LoraConfig(rank=16, alpha=32.0),
        ),
        train=dataclasses.replace(base.train, steps=2000, loss_chunk_tokens=1024),
    )
