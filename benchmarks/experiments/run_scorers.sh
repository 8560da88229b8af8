#!/usr/bin/env bash
# Runs as scorers: filters of a noisy corpus, and the choice among candidates of a noisy teacher ("Runs as scorers" in
# benchmarks/ablations.md). Needs data/tatoeba_deu_eng.
set -euo pipefail
PYTHON=${PYTHON:-python}
SMALL="--config=multi30k_de_en --config.model.dtype=bfloat16 --config.model.model_dim=128 --config.model.ffn_dim=512
    --config.model.num_encoder_layers=2 --config.model.num_decoder_layers=2 --config.model.dropout_rate=0.1 --config.vocab.size=6000
    --config.optim.learning_rate=4e-3 --config.optim.warmup_steps=150 --config.optim.ema_decay=0.99 --config.train.steps=400
    --config.train.evaluate_every=400 --config.train.checkpoint_every=400 --config.train.final_checkpoint=last
    --config.search.method=greedy --config.data.num_shapes=2 --config.data.max_source_length=60 --config.data.max_target_length=60"
LONGER="--config.train.steps=700 --config.train.evaluate_every=700 --config.train.checkpoint_every=700"
REVERSE="--config.data.source_language=en --config.data.target_language=de"
step() { PYTHONPATH=. $PYTHON benchmarks/experiments/run_scorers.py "$@"; }
small() { [ -e "runs/$1/report.json" ] || $PYTHON train.py $SMALL "--run=runs/$1" "${@:2}"; }
distil() { [ -e "data/$1/report.json" ] || $PYTHON -m flaxformer_mt distil --candidates=data/candidates.jsonl "--output=data/$@"; }

# Models of both directions, on 50,000 pairs that are not in the noisy corpus.
[ -e data/noisy/kinds ] || step corpus data/tatoeba_deu_eng
small others $LONGER --config.data.text_dir=data/others
small others_reverse $LONGER $REVERSE --config.data.text_dir=data/others

# Filters: the best threshold by these models, and models of all pairs, of the good ones, and of those that the filter keeps.
step thresholds runs/others runs/others_reverse | tee thresholds.txt
BEST=$(sed -n 's/^both>=\([0-9.e-]*\):.*/\1/p' thresholds.txt)
small all --config.train.steps=1000 --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000 --config.data.text_dir=data/noisy
small clean --config.train.steps=1000 --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000 --config.data.text_dir=data/clean
small filtered --config.train.steps=1000 --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000 --config.data.text_dir=data/noisy --scorer=both=run:runs/others,run:runs/others_reverse --config.data.clean.scores="both>=$BEST"

# Candidates: 8 samples of each of 6,000 sources, a tenth of them planted answers; students of different choices.
head -n 3000 data/clean/train.de > data/samples.de
head -n 3000 data/clean/train.en > data/samples.en
[ -e data/samples ] || $PYTHON -m flaxformer_mt translate --run=runs/others --input=data/samples.de --output=data/samples --method=sample \
    --temperature=1.5 --top_k=10 --n_best=8
[ -e data/candidates.jsonl ] || step candidates data/samples
distil first
step problems
distil scorer --targets=scorer --scorer=back=run:runs/others_reverse --metric=back --source_language=de --target_language=en
distil oracle --targets=nbest --metric=chrf --reference=data/samples.en
step quality data/samples.en
for choice in first scorer oracle; do
    cp data/clean/valid.* data/clean/test.* "data/$choice"
    small "student_$choice" "--config.data.text_dir=data/$choice"
done
