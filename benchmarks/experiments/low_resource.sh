#!/usr/bin/env bash
# Multi30k German-English from 10,000 pairs: back-translation and minimum Bayes risk ("Low-resource" in benchmarks/ablations.md).
# Needs low/, the first 10,000 training pairs of Multi30k with valid and test as they are, and mono.en, the English
# side of the other 19,000 pairs.
set -euo pipefail
SMALL="--config=configs/multi30k_de_en.py --config.vocab.size=4000 --config.model.model_dim=128 --config.model.ffn_dim=512
    --config.model.dropout_rate=0.2 --config.optim.learning_rate=4e-3 --config.optim.warmup_steps=500 --config.optim.ema_decay=0.998
    --config.train.steps=2000 --config.train.evaluate_every=1000 --config.train.checkpoint_every=500 --config.data.num_shapes=6
    --config.data.max_source_length=60 --config.data.max_target_length=60 --config.data.text_dir=low"
LONGER="--config.train.steps=4000 --config.train.evaluate_every=2000 --config.train.checkpoint_every=1000"
REVERSE="--config.data.source_language=en --config.data.target_language=de"
MORE="--config.data.dataset=parallel_text,parallel_text@backtranslated --config.vocab.symbols=<BT>"
python train.py $SMALL --run=runs/low
python train.py $SMALL $REVERSE --run=runs/low_reverse
python -m flaxformer_mt backtranslate --run=runs/low_reverse --input=mono.en --output=backtranslated --resume
python train.py $SMALL $MORE --run=runs/low_more
python train.py $SMALL $LONGER --run=runs/low_longer
python train.py $SMALL $LONGER $MORE --run=runs/low_more_longer

# The recipe's size, in bfloat16; real pairs are seen twice as often.
RECIPE="--config=multi30k_de_en --config.model.dtype=bfloat16 --config.vocab.size=4000 --config.data.text_dir=low
    --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000"
LARGE="--config.data.dataset=parallel_text,parallel_text@bt_low --config.data.weights=2,1 --config.vocab.symbols=<BT>"
python train.py $RECIPE --config.train.steps=3000 $REVERSE --run=runs/base_reverse
python -m flaxformer_mt backtranslate --run=runs/base_reverse --input=mono.en --output=bt_low
for steps in 5000 8000; do
    patience=$((steps == 8000 ? 3 : 0))
    python train.py $RECIPE --config.train.steps=$steps --config.train.patience=$patience --run=runs/base_$steps
    python train.py $RECIPE $LARGE --config.train.steps=$steps --config.train.patience=$patience --run=runs/base_more_$steps
done

# Minimum Bayes risk; beam.txt is the test set translated with beam 5.
python -m flaxformer_mt translate --run=runs/low --input=low/test.de --output=beam.txt
python -m flaxformer_mt evaluate --run=runs/low --mbr=chrf --beam_size=16 --against=beam.txt
