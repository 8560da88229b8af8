#!/usr/bin/env bash
# Reranking by a run of the reverse direction, three seeds ("Runs as scorers" in benchmarks/ablations.md). Needs data/multi30k.
set -euo pipefail
PYTHON=${PYTHON:-python}
run() {
    [ -e "$3/report.json" ] || $PYTHON train.py --config=multi30k_de_en --config.data.text_dir=data/multi30k --config.model.dtype=bfloat16 \
        --config.data.source_language="$1" --config.data.target_language="$2" --run="$3" --config.seed="$seed" --config.train.steps=2200 \
        --config.optim.warmup_steps=500 --config.train.evaluate_every=1100 --config.train.checkpoint_every=1100
}
for seed in 1 2 3; do
    forward=runs/de_en_$seed reverse=runs/en_de_$seed
    run de en "$forward"
    run en de "$reverse"
    evaluate=("$PYTHON" -m flaxformer_mt evaluate "$forward" --beam_size=8)
    reranking=(--rerank=back --scorer=back=run:"$reverse")
    "${evaluate[@]}" "${reranking[@]}" --split=valid --tune_rerank=bleu >"$forward/weight.json"
    "${evaluate[@]}" >"$forward/beam.json"
    weight=$($PYTHON -c 'import json, sys; print(json.load(sys.stdin)["rerank_weight"])' <"$forward/weight.json")
    "${evaluate[@]}" "${reranking[@]}" --rerank_weight="$weight" >"$forward/reranked.json"
done
