#!/usr/bin/env bash
# R-Drop with 10,000 pairs ("R-Drop" in benchmarks/ablations.md). Needs low/, as low_resource.sh does.
set -euo pipefail
SMALL="--config=configs/multi30k_de_en.py --config.vocab.size=4000 --config.model.model_dim=128 --config.model.ffn_dim=512
    --config.model.dropout_rate=0.2 --config.model.dtype=bfloat16 --config.optim.learning_rate=4e-3 --config.optim.warmup_steps=300
    --config.optim.ema_decay=0.998 --config.data.num_shapes=3 --config.data.max_source_length=60 --config.data.max_target_length=60
    --config.train.steps=1000 --config.train.evaluate_every=2000 --config.data.text_dir=low"
for seed in 1 2 3; do
  python train.py $SMALL --config.seed=$seed --run=runs/recipe_$seed
  python train.py $SMALL --config.seed=$seed --config.train.rdrop_weight=5 --run=runs/rdrop_$seed
done
