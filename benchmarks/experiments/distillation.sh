#!/usr/bin/env bash
# Students of Multi30k German-English ("Knowledge distillation" in benchmarks/ablations.md). Needs data/multi30k and runs/multi30k, the
# recipe in bfloat16 (runs/multi30k_2: with --config.seed=2). Folders of distilled data get valid and test as they are.
set -euo pipefail
STUDENT="--config=multi30k_de_en --config.model.dtype=bfloat16 --config.model.num_encoder_layers=6 --config.model.num_decoder_layers=1
    --config.model.model_dim=128 --config.model.ffn_dim=512 --config.model.dropout_rate=0.1
    --config.vocab.source_model=runs/multi30k/vocab/source.model --config.vocab.target_model=runs/multi30k/vocab/target.model
    --config.train.steps=10000 --config.train.evaluate_every=2000 --config.train.checkpoint_every=2000"
distil() { python -m flaxformer_mt distil "$@"; }
copy_held_out() { mkdir -p "$1" && cp data/multi30k/valid.* data/multi30k/test.* "$1"; }

# Students of 10,000 and 15,000 updates, of width 128 and 96.
distil --run=runs/multi30k --input=data/multi30k/train.de --output=data/distilled --targets=nbest --reference=data/multi30k/train.en
copy_held_out data/distilled
LONGER="--config.train.steps=15000 --config.train.evaluate_every=3000 --config.train.checkpoint_every=3000"
SMALLER="--config.model.model_dim=96 --config.model.ffn_dim=384"
for seed in 1 2; do
    for set in multi30k distilled; do
        python train.py $STUDENT --config.seed=$seed --config.data.text_dir=data/$set --run=runs/student_${set}_$seed
        python train.py $STUDENT $LONGER --config.seed=$seed --config.data.text_dir=data/$set --run=runs/longer_${set}_$seed
        python train.py $STUDENT $SMALLER --config.seed=$seed --config.data.text_dir=data/$set --run=runs/smaller_${set}_$seed
    done
done

# 5,000 updates.
FEWER="--config.train.steps=5000"
python train.py $STUDENT $FEWER --config.data.text_dir=data/multi30k --run=runs/fewer_multi30k
python train.py $STUDENT $FEWER --config.data.text_dir=data/distilled --run=runs/fewer_distilled

# Two translations of each line.
distil --run=runs/multi30k --input=data/multi30k/train.de --output=data/best --targets=best
mkdir -p data/twice && cat data/distilled/train.tsv data/best/train.tsv > data/twice/train.tsv && copy_held_out data/twice
for seed in 1 2; do
    python train.py $STUDENT --config.seed=$seed --config.data.text_dir=data/twice --run=runs/twice_$seed
done

# Rates in CTranslate2.
for run in multi30k student_multi30k_1 student_distilled_1 smaller_multi30k_1 smaller_distilled_1; do
    python -m flaxformer_mt export --run=runs/$run --format=ctranslate2 --quantization=int8 --output=exported/$run
done
for run in student_distilled_1 smaller_distilled_1; do
    python -m flaxformer_mt prepare --run=runs/$run --shortlist=$run.shortlist
    python -m flaxformer_mt export --run=runs/$run --format=ctranslate2 --quantization=int8 --shortlist=$run.shortlist \
        --output=exported/${run}_shortlist
done
PYTHONPATH=. python benchmarks/exports.py --source=data/multi30k/test.de --target=data/multi30k/test.en exported/*

# More sources: 86,831 pairs, by back-translation and two teachers.
python train.py $STUDENT --config.train.steps=5000 --config.train.evaluate_every=2500 --config.train.checkpoint_every=2500 --config.seed=3 \
    --config.data.source_language=en --config.data.target_language=de --config.data.text_dir=data/multi30k --run=runs/reverse
python -m flaxformer_mt backtranslate --run=runs/reverse --input=data/multi30k/train.en --output=data/beam --tag=
python -m flaxformer_mt backtranslate --run=runs/reverse --input=data/multi30k/train.en --output=data/sampled --tag= \
    --method=sample --top_k=10 --seed=1
TEACHERS="--run=runs/multi30k --ensemble=runs/multi30k_2 --length_penalty=1.5 --targets=nbest --reference=data/multi30k/train.en"
distil $TEACHERS --input=data/multi30k/train.de --output=data/more_original
distil $TEACHERS --input=data/beam/translations.txt --output=data/more_beam
distil $TEACHERS --input=data/sampled/translations.txt --output=data/more_sampled
mkdir -p data/more && cat data/more_{original,beam,sampled}/train.tsv > data/more/train.tsv && copy_held_out data/more
for seed in 1 2; do
    python train.py $STUDENT $LONGER --config.seed=$seed --config.data.text_dir=data/more --run=runs/more_$seed
done
