"""One model of several languages: German and French to English, and English to both, on Tatoeba's sentences.

    python train.py --config=tatoeba_many --run=runs/tatoeba_many

`data/tatoeba_deu_eng` contains train.de, train.en, valid.de and valid.en, and `data/tatoeba_fra_eng` the same
for French. Sources begin with >>de<<, >>en<< or >>fr<<, and the mean BLEU of the four directions chooses the
best checkpoint. Only into English, which needs no tags:

    --config.data.dataset=parallel_text@data/tatoeba_deu_eng:de-en,parallel_text@data/tatoeba_fra_eng:fr-en
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

_GERMAN, _FRENCH = "parallel_text@data/tatoeba_deu_eng", "parallel_text@data/tatoeba_fra_eng"


def get_config() -> Config:
    """Return a small pre-norm Transformer over a joint vocabulary of 12,000 pieces for the three
    languages.
    """
    return Config(
        data=DataConfig(
            dataset=f"{_GERMAN}:de-en,{_FRENCH}:fr-en,{_GERMAN}:en-de,{_FRENCH}:en-fr",
            temperature=5.0,
            clean=CleanConfig(duplicates="drop"),
            max_source_length=64,
            max_target_length=64,
            batch_tokens=4096,
        ),
        vocab=VocabConfig(kind="bpe", size=12_000, joint=True),
        model=ModelConfig(
            num_encoder_layers=3,
            num_decoder_layers=3,
            model_dim=256,
            num_heads=4,
            ffn_dim=1024,
            dropout_rate=0.2,
        ),
        optim=OptimConfig(learning_rate=2e-3, warmup_steps=1000, ema_decay=0.999),
        train=TrainConfig(steps=20_000, evaluate_every=1000, checkpoint_every=1000, patience=10),
        search=SearchConfig(beam_size=5),
    )
