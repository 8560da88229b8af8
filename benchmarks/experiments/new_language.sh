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
SHORT="--config=$W/recipe.py --config.train.steps=400 --config.train.evaluate_every=40 --config.train.checkpoint_every=400
    --config.optim.warmup_steps=100 --config.train.patience=0 --config.train.final_checkpoint=last --config.search.max_length_offset=5"
ALONE="--config.data.dataset=parallel_text@$W/new:qaa_Latn-en,parallel_text@$W/new:en-qaa_Latn --config.data.weights="
for seed in 1 2 3; do
    python benchmarks/new_language.py random_rows --work=$W --run=$W/means --parent=$W/parent --seed=$seed
    python -m flaxformer_mt train $SHORT --config.seed=$seed --init=$W/means --run=$W/means_$seed
    python -m flaxformer_mt train $SHORT --config.seed=$seed --init=$W/random_rows_$seed --run=$W/random_$seed
    python -m flaxformer_mt train $SHORT --config.seed=$seed --init=$W/means --run=$W/alone_$seed $ALONE
    for direction in de,en en,de; do
        python -m flaxformer_mt evaluate $W/alone_$seed --source=$W/old/test.${direction%,*} --reference=$W/old/test.${direction#*,} \
            --source_language=${direction%,*} --target_language=${direction#*,}
    done
done
python benchmarks/new_language.py curves $W/means_? $W/random_? $W/alone_?
