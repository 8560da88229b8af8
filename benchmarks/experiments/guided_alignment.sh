#!/usr/bin/env bash
# Multi30k German-English with guided alignment ("Guided alignment" in benchmarks/ablations.md). Needs data/multi30k.
set -euo pipefail
python -m flaxformer_mt align --config=multi30k_de_en --config.data.text_dir=data/multi30k --output=multi30k.align
python train.py --config=multi30k_de_en --config.data.text_dir=data/multi30k --config.model.dtype=bfloat16 \
    --config.data.alignments=multi30k.align --config.model.alignment.weight=0.1 --run=runs/multi30k_guided
PYTHONPATH=. python benchmarks/word_links.py --run=runs/multi30k_guided
