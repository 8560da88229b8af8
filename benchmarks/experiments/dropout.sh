#!/usr/bin/env bash
# Dropout in the configs of `new`, three sizes of text ("Dropout" in benchmarks/ablations.md). Needs data/multi30k.
set -euo pipefail
PYTHON=${PYTHON:-python}
for pairs in 5000 10000 29000; do
    mkdir -p runs/dropout data/multi30k_$pairs
    for language in de en; do
        head -n $pairs data/multi30k/train.$language >data/multi30k_$pairs/train.$language
        cp data/multi30k/{valid,test}.$language data/multi30k_$pairs
    done
    $PYTHON -m flaxformer_mt new data/multi30k_$pairs/train.{de,en} --run=runs/dropout/$pairs
    for rate in 0.1 0.2 0.3; do
        [ -e runs/dropout/${pairs}_$rate/report.json ] || $PYTHON train.py --config=runs/dropout/$pairs.py \
            --run=runs/dropout/${pairs}_$rate --config.model.dropout_rate=$rate --config.train.patience=0 \
            --config.train.steps=$((pairs == 29000 ? 1800 : 4000)) --config.train.evaluate_every=$((pairs == 29000 ? 900 : 400))
    done
done
