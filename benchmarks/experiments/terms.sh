#!/usr/bin/env bash
# Training with terms ("Terms" in benchmarks/ablations.md). Needs the extra terms.
set -euo pipefail
PYTHONPATH=. python benchmarks/toy_terms.py --output=data/toy_terms
TOY="--config=toy_de_en --config.data.dataset=parallel_text --config.data.text_dir=data/toy_terms --config.data.num_shapes=3
    --config.train.steps=600 --config.train.evaluate_every=600 --config.train.checkpoint_every=100"
TERMS="--source=data/toy_terms/terms.de --reference=data/toy_terms/terms.en --glossary=data/toy_terms/terms.tsv"
python -m flaxformer_mt align $TOY --output=data/toy_terms/train.align
python train.py $TOY --run=runs/without_terms
python -m flaxformer_mt evaluate runs/without_terms ${TERMS% --glossary*}
python - <<'END'  # terms that are right by chance
import json
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.evaluation.evaluation_set import load_translations
from flaxformer_mt.evaluation.score_breakdowns import score_terms
from flaxformer_mt.translation.glossary import Glossary
from pathlib import Path

translations = load_translations(Path("runs/without_terms"), "terms.de")
print(json.dumps(score_terms(translations, Glossary.load("data/toy_terms/terms.tsv"), Direction("de", "en"))))
END
python -m flaxformer_mt evaluate runs/without_terms $TERMS
python train.py $TOY --config.data.alignments=train.align --config.data.terms=0.3 --run=runs/terms
python -m flaxformer_mt evaluate runs/terms $TERMS

# Rare nouns.
PYTHONPATH=. python benchmarks/toy_terms.py --output=data/rare_terms --nouns=12000 --longest=16 --rare
RARE="${TOY//toy_terms/rare_terms} --config.model.dtype=bfloat16 --config.train.steps=800 --config.train.evaluate_every=800"
python -m flaxformer_mt align $RARE --output=data/rare_terms/train.align
python train.py $RARE --config.data.alignments=train.align --config.data.terms=0.3 --run=runs/rare_terms
python -m flaxformer_mt evaluate runs/rare_terms ${TERMS//toy_terms/rare_terms}
