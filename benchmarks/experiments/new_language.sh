#!/usr/bin/env bash
# A model learns a relexified language ("A new language" in benchmarks/ablations.md). Needs the extras torch and huggingface.
set -euo pipefail
export PYTHONPATH=.
W=data/new_language
python benchmarks/new_language.py texts --work=$W
python -m flaxformer_mt import $W/random --run=$W/start --languages=de,en
python -m flaxformer_mt train --init=$W/start --run=$W/parent --config.data.max_source_length=64 --config.data.max_target_length=64 \
    --config.data.dataset=parallel_text@$W/old:de-en,parallel_text@$W/old:en-de --config.data.batch_tokens=2048 \
    --config.data.num_shapes=4 --config.optim.learning_rate=4e-3 --config.optim.schedule=linear --config.optim.warmup_steps=200 \
    --config.optim.ema_decay=0.99 --config.train.steps=1500 --config.train.evaluate_every=1500 --config.train.checkpoint_every=1500 \
    --config.train.loss_chunk_tokens=256 --config.search.method=greedy --config.search.max_length_offset=5
python -m flaxformer_mt export $W/parent --format=hf --output=$W/hub

OLD=$W/old/train.de,$W/old/train.en NEW=$W/new/train.qaa_Latn,$W/new/train.en
python -m flaxformer_mt import $W/hub --run=$W/means --languages=de,en,qaa_Latn --new_language=qaa_Latn:deu_Latn --vocab_text=$OLD,$NEW
python -m flaxformer_mt new $W/new/train.qaa_Latn $W/new/train.en --from=$W/means --replay=parallel_text@$W/old:de-en --run=$W/recipe
# Copies and means beside random rows, at a constant learning rate, so that the number of updates changes nothing; a quarter is old.
CURVE="--config=$W/recipe.py --config.data.weights=1,1,0.111,0.111 --config.optim.schedule=constant --config.optim.warmup_steps=100
    --config.train.evaluate_every=50 --config.train.checkpoint_every=1000 --config.train.patience=0
    --config.train.final_checkpoint=last --config.search.max_length_offset=5"
for seed in 1 2 3; do
    python benchmarks/new_language.py random_rows --work=$W --run=$W/means --parent=$W/parent --seed=$seed
    python -m flaxformer_mt train $CURVE --config.seed=$seed --config.train.steps=500 --init=$W/means --run=$W/means_$seed
    python -m flaxformer_mt train $CURVE --config.seed=$seed --config.train.steps=800 --init=$W/random_rows_$seed --run=$W/random_$seed
done
for threshold in 5 10 20 30; do
    python benchmarks/new_language.py curves $W/means_? $W/random_? --threshold=$threshold
done

# Forgetting: half, a quarter and none of the pairs are old; the recipe would take 4,500 updates.
LONG="--config=$W/recipe.py --init=$W/means --config.seed=1 --config.train.steps=3000 --config.train.evaluate_every=500 --config.optim.warmup_steps=600
    --config.search.max_length_offset=5"
python -m flaxformer_mt train $LONG --run=$W/half
python -m flaxformer_mt train $LONG --run=$W/quarter --config.data.weights=1,1,0.111,0.111
python -m flaxformer_mt train $LONG --run=$W/none --config.train.evaluate_every=1500 --config.data.weights= \
    --config.data.dataset=parallel_text@$W/new:qaa_Latn-en,parallel_text@$W/new:en-qaa_Latn
for direction in de,en en,de; do
    python -m flaxformer_mt evaluate $W/none --source=$W/old/test.${direction%,*} --reference=$W/old/test.${direction#*,} \
        --source_language=${direction%,*} --target_language=${direction#*,}
done
