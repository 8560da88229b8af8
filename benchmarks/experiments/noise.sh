#!/usr/bin/env bash
# Noise in training text ("Noise" in benchmarks/ablations.md). Needs data/multi30k. The test sets with noise: typos by
# OpusTrainer 0.5's TypoModifier(1.0) with its own probabilities and random.seed(7), case by Python's upper and lower.
set -euo pipefail
NARROW="--config=configs/multi30k_de_en.py --config.data.text_dir=data/multi30k --config.model.dtype=bfloat16 --config.vocab.size=4000
    --config.model.model_dim=128 --config.model.ffn_dim=512 --config.model.dropout_rate=0.1 --config.optim.learning_rate=4e-3
    --config.optim.warmup_steps=400 --config.optim.ema_decay=0.998 --config.train.steps=1600 --config.train.evaluate_every=1600
    --config.train.checkpoint_every=800 --config.train.final_checkpoint=last --config.data.num_shapes=6
    --config.data.max_source_length=60 --config.data.max_target_length=60"
python train.py $NARROW --run=runs/without_noise
python train.py $NARROW --config.data.noise.typos=0.5 --config.data.noise.lower_case=0.1 --config.data.noise.upper_case=0.1 \
    --config.data.noise.end_punctuation=0.1 --run=runs/with_noise
