#!/usr/bin/env bash
# Runs as scorers: filters of a noisy corpus, and the choice among candidates of a noisy teacher ("Runs as scorers" in
# benchmarks/ablations.md). Needs data/tatoeba_deu_eng and data/multi30k.
set -euo pipefail
step() { PYTHONPATH=. python benchmarks/experiments/run_scorers.py "$@"; }
RECIPE="--config=multi30k_de_en --config.data.text_dir=data/multi30k --config.model.dtype=bfloat16 --config.train.steps=2200
    --config.optim.warmup_steps=500 --config.train.evaluate_every=1100 --config.train.checkpoint_every=1100"
REVERSE="--config.data.source_language=en --config.data.target_language=de"
python train.py $RECIPE --run=runs/de_en
python train.py $RECIPE $REVERSE --run=runs/en_de

# Filters: what the best thresholds find.
step corpus data/tatoeba_deu_eng
step thresholds runs/de_en runs/en_de

# Candidates: 8 samples of each source, a tenth of them replaced by planted answers.
head -n 400 data/multi30k/test.de > data/samples.de
head -n 400 data/multi30k/test.en > data/samples.en
python -m flaxformer_mt translate --run=runs/de_en --input=data/samples.de --output=data/samples --method=sample --temperature=1.5 \
    --top_k=10 --n_best=8
step candidates data/samples
distil() { python -m flaxformer_mt distil --candidates=data/candidates.jsonl "--output=data/$1" "${@:2}"; }
distil first
distil mbr --targets=mbr
distil scorer --targets=scorer --scorer=back=run:runs/en_de --metric=back --source_language=de --target_language=en
distil oracle --targets=nbest --metric=chrf --reference=data/samples.en
step problems
step quality data/samples.en
