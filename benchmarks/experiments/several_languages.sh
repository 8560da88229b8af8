#!/usr/bin/env bash
# German and French to English, English to both ("Multilingual models" in benchmarks/ablations.md). Needs data/tatoeba_deu_eng and
# data/tatoeba_fra_eng, whose test.* are links to valid.*, and pip install lingua-language-detector.
set -euo pipefail
SMALL="--config=tatoeba_many --config.model.dtype=bfloat16 --config.model.model_dim=128 --config.model.ffn_dim=512
    --config.model.dropout_rate=0.0 --config.vocab.size=6000 --config.data.batch_tokens=2048 --config.optim.learning_rate=3e-3
    --config.optim.warmup_steps=500 --config.optim.ema_decay=0.998 --config.train.checkpoint_every=1000"
DE=parallel_text@data/tatoeba_deu_eng FR=parallel_text@data/tatoeba_fra_eng
for dropout in 0.0 0.1; do
    for seed in 1 2; do
        RATES="--config.model.dropout_rate=$dropout --config.seed=$seed"
        ONE="--config.train.steps=3000 --config.train.evaluate_every=3000"
        BOTH="--config.train.steps=6000 --config.train.evaluate_every=6000"
        python train.py $SMALL $RATES $ONE --config.data.dataset=$DE:de-en --run=runs/german_${dropout}_$seed
        python train.py $SMALL $RATES $ONE --config.data.dataset=$FR:fr-en --run=runs/french_${dropout}_$seed
        python train.py $SMALL $RATES $BOTH --config.data.dataset=$DE:de-en,$FR:fr-en --run=runs/both_${dropout}_$seed
        [ $dropout = 0.0 ] || break
    done
done
python train.py $SMALL --config.model.dropout_rate=0.1 $BOTH --config.data.weights=3,2 --config.data.dataset=$DE:de-en,$FR:fr-en \
    --run=runs/both_weighted

python train.py $SMALL --config.model.dropout_rate=0.1 --config.data.dataset=$DE:en-de,$FR:en-fr $ONE --run=runs/from_english
python -m flaxformer_mt translate --run=runs/from_english --input=data/tatoeba_deu_eng/valid.en --target_language=de --output=out.de
python -m flaxformer_mt translate --run=runs/from_english --input=data/tatoeba_fra_eng/valid.en --target_language=fr --output=out.fr
python benchmarks/languages.py --others=en de=out.de fr=out.fr de=data/tatoeba_deu_eng/valid.de fr=data/tatoeba_fra_eng/valid.fr
