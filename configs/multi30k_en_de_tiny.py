"""Multi30k English-German, lower-cased and tokenized: the published tiny setting (Wu et al., ACL 2021).

    python train.py --config=configs/multi30k_en_de_tiny.py --config.data.text_dir=DIR

DIR contains train, valid and test, each as .en and .de, lower-cased and split into Moses tokens (test is
test_2016_flickr). BLEU counts these tokens as they are.

Measured on two cores of an AMD EPYC: 117 minutes under load, 41.5 BLEU (docs/results.md).
"""

import dataclasses
from pathlib import Path

from flaxformer_mt.config import Config
from flaxformer_mt.config.files import load_config


def get_config() -> Config:
    """4+4 layers of width 128, FFN 256, 4 heads, pre-norm, dropout 0.3, 10,000 joint pieces, all tied.

    Derived from multi30k_de_en.py in the same folder.
    """
    base = load_config(Path(__file__).with_name("multi30k_de_en.py"))
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, source_language="en", target_language="de", batch_tokens=4096),
        vocab=dataclasses.replace(base.vocab, size=10000),
        model=dataclasses.replace(
            base.model,
            num_encoder_layers=4,
            num_decoder_layers=4,
            model_dim=128,
            ffn_dim=256,
            attention_dropout_rate=0.0,
        ),
        optim=dataclasses.replace(base.optim, learning_rate=5e-3, warmup_steps=1500),
        train=dataclasses.replace(
            base.train,
            steps=10000,
            evaluate_every=1000,
            checkpoint_every=500,
            final_checkpoint="last",  # the learning rate has fallen to zero there
            bleu_tokenize="none",
        ),
    )
