#!/usr/bin/env bash
# LoRA beside full fine-tuning: a model of width 512, and a start with fewer pieces ("LoRA" in benchmarks/ablations.md).
# Needs data/multi30k; data/tatoeba with both.model, a vocabulary of both; data/start (Tatoeba, its lines joined with two
# neighbors, and the dictionary Ding, Debian's trans-de-en 1.9-6) with fewer.model, 4,000 pieces of these and of Multi30k
# twice; data/m10000 and data/m3000, the first pairs of Multi30k, with valid and test as they are.
set -euo pipefail

WIDE="--config=configs/multi30k_de_en.py --config.model.dtype=bfloat16 --config.model.model_dim=512 --config.model.num_heads=8
    --config.model.ffn_dim=2048 --config.vocab.source_model=both.model --config.data.num_shapes=6 --config.optim.ema_decay=0.998"
python train.py $WIDE --config.data.text_dir=data/tatoeba --config.model.dropout_rate=0.1 --config.model.attention_dropout_rate=0.0 \
    --config.optim.learning_rate=1.2e-3 --config.optim.warmup_steps=400 --config.train.steps=2200 --config.train.evaluate_every=1100 \
    --config.train.checkpoint_every=550 --run=runs/wide
SHORT="--init=runs/wide --config.data.text_dir=data/multi30k --config.model.attention_dropout_rate=0.1 --config.optim.warmup_steps=150
    --config.train.steps=900 --config.train.evaluate_every=300 --config.train.checkpoint_every=300"
LORA="--config.optim.lora.also_train=*/bias,*/scale --config.optim.lora.targets=*/kernel,*/embedding"
python train.py $WIDE $SHORT --config.optim.learning_rate=6e-4 --config.model.dropout_rate=0.3 --run=runs/wide_full
python train.py $WIDE $SHORT --config.optim.learning_rate=1e-3 --config.model.dropout_rate=0.1 --run=runs/wide_full_too
python train.py $WIDE $SHORT $LORA --config.optim.learning_rate=3e-3 --config.model.dropout_rate=0.1 --config.optim.lora.rank=10 \
    --config.optim.lora.embedding_rank=64 --config.optim.lora.alpha=20 --run=runs/wide_lora
python train.py $WIDE $SHORT $LORA --config.optim.learning_rate=5e-3 --config.optim.warmup_steps=100 --config.model.dropout_rate=0.1 \
    --config.optim.lora.rank=4 --config.optim.lora.embedding_rank=110 --config.optim.lora.alpha=8 --run=runs/wide_lora_too

FEWER="--config=configs/multi30k_de_en.py --config.model.dtype=bfloat16 --config.vocab.source_model=fewer.model --config.vocab.size=4000"
python train.py $FEWER --config.data.text_dir=data/start --config.model.dropout_rate=0.1 --config.model.attention_dropout_rate=0.0 \
    --config.train.steps=11500 --config.train.evaluate_every=2300 --config.train.checkpoint_every=2300 --run=runs/start
TUNE="--config=configs/multi30k_de_en.py --config.model.dtype=bfloat16 --init=runs/start --config.model.dropout_rate=0.1"
ALL="--config.data.text_dir=data/multi30k --config.optim.warmup_steps=300 --config.train.steps=3000 --config.train.evaluate_every=1000
    --config.train.checkpoint_every=1000"
LORA="--config.optim.lora.rank=8 --config.optim.lora.embedding_rank=7 $LORA"
python train.py $TUNE $ALL --config.optim.learning_rate=1e-3 --run=runs/all
python train.py $TUNE $ALL --config.optim.learning_rate=4e-3 $LORA --config.data.batch_tokens=1024 --config.data.num_shapes=8 \
    --config.train.steps=6000 --config.train.evaluate_every=2000 --config.train.checkpoint_every=2000 --run=runs/all_small_batches
python train.py $TUNE $ALL --config.optim.learning_rate=2e-3 $LORA --config.optim.lora.alpha=128 --run=runs/all_alpha
python train.py $TUNE $ALL --config.optim.learning_rate=2e-3 $LORA --config.optim.lora.rank=32 --config.optim.lora.embedding_rank=0 \
    --config.optim.lora.alpha=256 --run=runs/all_rank_32
PART="--config.data.num_shapes=4 --config.optim.warmup_steps=100"
MIDDLE="$PART --config.data.text_dir=data/m10000 --config.optim.ema_decay=0.998 --config.train.steps=1500
    --config.train.evaluate_every=300 --config.train.checkpoint_every=300"
LITTLE="$PART --config.data.text_dir=data/m3000 --config.optim.ema_decay=0.99 --config.train.steps=600
    --config.train.evaluate_every=100 --config.train.checkpoint_every=100"
python train.py $TUNE $MIDDLE --config.optim.learning_rate=1e-3 --run=runs/middle
python train.py $TUNE $MIDDLE --config.optim.learning_rate=4e-3 $LORA --run=runs/middle_lora
python train.py $TUNE $LITTLE --config.optim.learning_rate=1e-3 --run=runs/little
python train.py $TUNE $LITTLE --config.optim.learning_rate=4e-3 $LORA --run=runs/little_lora
python train.py $TUNE $LITTLE --config.optim.learning_rate=2e-3 $LORA --config.optim.lora.alpha=128 --config.optim.warmup_steps=200 \
    --config.optim.ema_decay=0.998 --config.train.steps=2400 --config.train.evaluate_every=400 --config.train.checkpoint_every=400 \
    --run=runs/little_long
