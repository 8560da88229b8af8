#!/usr/bin/env bash
# Multi30k German-English after Tatoeba: full fine-tuning, LoRA, and guided alignment ("Transfer from a larger corpus" in benchmarks/ablations.md).
# Needs data/multi30k, data/tatoeba (German-English, its validation set as test set), and both.model, a vocabulary of
# both corpora. Run names are those of the page.
set -euo pipefail
BFLOAT16="--config=configs/multi30k_de_en.py --config.model.dtype=bfloat16"
TATOEBA="--init=runs/tatoeba --config.data.text_dir=data/multi30k"
SHORT="--config.optim.warmup_steps=300 --config.train.steps=3000 --config.train.evaluate_every=500 --config.train.checkpoint_every=500"
TARGETS="--config.optim.lora.targets=*/kernel,*/embedding"
BIASES="--config.optim.lora.also_train=*/bias,*/scale"

# Multi30k alone, whose vocabulary the runs tuned_long and tuned_guided use.
python train.py $BFLOAT16 --config.data.text_dir=data/multi30k --run=runs/multi30k

# The start: 46.33 BLEU on its own validation set.
python train.py $BFLOAT16 --config.data.text_dir=data/tatoeba --config.vocab.source_model=both.model --config.model.dropout_rate=0.2 \
    --config.train.steps=4400 --config.train.evaluate_every=1100 --config.train.checkpoint_every=1100 --run=runs/tatoeba

python train.py $BFLOAT16 $TATOEBA --config.optim.learning_rate=1e-3 $SHORT --run=runs/tuned
python train.py $BFLOAT16 $TATOEBA --config.optim.lora.rank=9 $TARGETS --config.optim.learning_rate=4e-3 --config.model.dropout_rate=0.1 \
    $SHORT --run=runs/adapted
python train.py $BFLOAT16 $TATOEBA --config.optim.lora.rank=8 $TARGETS $BIASES --config.optim.learning_rate=5e-3 \
    --config.model.dropout_rate=0.0 --config.optim.warmup_steps=200 --config.train.steps=4500 --config.train.evaluate_every=900 \
    --config.train.checkpoint_every=900 --run=runs/adapted_long

OWN="--new_vocab --config.vocab.source_model=runs/multi30k/vocab/source.model --config.vocab.target_model=runs/multi30k/vocab/target.model"
LONG="--config.optim.learning_rate=1.5e-3 --config.optim.warmup_steps=500"
python train.py $BFLOAT16 $TATOEBA $OWN $LONG --config.train.evaluate_every=1100 --config.train.checkpoint_every=1100 --run=runs/tuned_long

python -m flaxformer_mt align --config=multi30k_de_en --config.data.text_dir=data/multi30k --output=multi30k.align
python train.py $BFLOAT16 $TATOEBA $OWN $LONG --config.train.evaluate_every=1650 --config.train.checkpoint_every=1650 \
    --config.data.alignments=multi30k.align --config.model.alignment.weight=0.3 --run=runs/tuned_guided
LONGER="--init=runs/tuned_guided --config.data.text_dir=data/multi30k --config.data.alignments=multi30k.align
    --config.model.alignment.weight=1.0 --config.optim.learning_rate=5e-4 --config.optim.warmup_steps=200 --config.train.steps=1500
    --config.train.evaluate_every=500 --config.train.checkpoint_every=500"
python train.py $BFLOAT16 $LONGER --run=runs/tuned_more
for seed in 1 2; do
    python train.py $BFLOAT16 $LONGER --config.model.alignment.layer=0 --config.model.alignment.step=read \
        --config.train.final_checkpoint=last --config.seed=$seed --run=runs/tuned_read_$seed
done

# A second start (5,000 updates of Tatoeba, 46.10 BLEU), on an Intel Xeon: run names end in _again.
RARE="$SHORT --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000"
AGAIN="--init=runs/tatoeba_again --config.data.text_dir=data/multi30k"
LORA="--config.optim.lora.rank=4 $BIASES --config.optim.learning_rate=4e-3 --config.model.dropout_rate=0.1"
python train.py $BFLOAT16 --config.data.text_dir=data/tatoeba --config.vocab.source_model=both.model --config.model.dropout_rate=0.2 \
    --config.train.steps=5000 --config.train.evaluate_every=1000 --config.train.checkpoint_every=1000 --run=runs/tatoeba_again
python train.py $BFLOAT16 $AGAIN --config.optim.learning_rate=1e-3 $RARE --run=runs/tuned_again
python train.py $BFLOAT16 $AGAIN $LORA $TARGETS --config.optim.lora.embedding_rank=26 $RARE --run=runs/adapted_table_again

# A third start (4,400 updates, 45.56 BLEU).
python train.py $BFLOAT16 $TATOEBA --config.optim.learning_rate=1e-3 --config.model.dropout_rate=0.1 $SHORT --run=runs/tuned_less_dropout
