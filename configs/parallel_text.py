"""Your own sentence pairs: a template to copy and adapt.

    python train.py --config=parallel_text --config.data.text_dir=my_data --run=runs/mine

`my_data` contains train.de and train.en, valid.de and valid.en, test.de and test.en; line n of one file is
the translation of line n of the other. Files may be gzipped (.gz), and train.tsv with two columns can
replace train.de and train.en. The languages are the file extensions: --config.data.source_language=cs reads
train.cs. `python -m flaxformer_mt prepare` with the same flags reads, cleans and counts the data without
training.

For text with typing errors and capitals: --config.data.noise.typos=0.1 --config.data.noise.upper_case=0.05
--config.data.noise.title_case=0.05 (docs/curriculum.md, which also describes stages of different mixtures).

The model is for 20,000 to 500,000 pairs: six million parameters without the embeddings, dropout 0.3. For
millions of pairs start from wmt14_en_de_base.py instead.
"""

from flaxformer_mt.config import (
    CleanConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)


def get_config() -> Config:
    """Return a small pre-norm Transformer over a joint vocabulary of 8,000 pieces."""
    return Config(
        data=DataConfig(
            dataset="parallel_text",
            text_dir="my_data",
            source_language="de",
            target_language="en",
            clean=CleanConfig(duplicates="drop"),
            batch_tokens=4096,
        ),
        vocab=VocabConfig(kind="bpe", size=8000, joint=True),
        model=ModelConfig(
            num_encoder_layers=3,
            num_decoder_layers=3,
            model_dim=256,
            num_heads=4,
            ffn_dim=1024,
            dropout_rate=0.3,
        ),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=1000, ema_decay=0.999),
        train=TrainConfig(steps=20_000, evaluate_every=500, checkpoint_every=500, patience=10),
        search=SearchConfig(beam_size=5),
    )
