"""A document's config, made small, learns and translates by the same commands as any other."""

from pathlib import Path

import pytest
from tiny_experiment import change

from flaxformer_mt.config.files import load_config
from flaxformer_mt.training.loop import fit
from flaxformer_mt.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[1]

FIVE = [
    ("der Hund schläft heute", "the dog sleeps today"),
    ("die Katze trinkt", "the cat drinks"),
    ("wir lesen ein Buch", "we read a book"),
    ("Anna kauft Äpfel", "Anna buys apples"),
    ("kommt ihr morgen", "will you come tomorrow"),
]


def test_handbuilt_learns_five_pairs_by_heart(tmp_path):
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in FIVE)
            (tmp_path / f"{split}.{language}").write_text(text, encoding="utf-8")
    assert len({word for pair in FIVE for side in pair for word in side.split()}) == 33
    config = change(
        load_config(ROOT / "configs" / "handbuilt.py"),
        data={"dataset": "parallel_text", "text_dir": str(tmp_path), "cache_dir": str(tmp_path / "cache")}
        | {"source_language": "de", "target_language": "en", "num_shapes": 1, "batch_pairs": 32}
        | {"max_source_length": 12, "max_target_length": 12, "batch_tokens": 12 * 32},
        vocab={"kind": "word", "size": 33 + 4, "joint": True, "byte_fallback": False},
        model={"num_encoder_layers": 1, "num_decoder_layers": 1, "model_dim": 32, "num_heads": 2}
        | {"key_dim": 12, "value_dim": 20, "ffn_dim": 48, "max_positions": 12},
        optim={"learning_rate": 3e-3, "warmup_steps": 5},
        train={"tensorboard": False, "steps": 60, "evaluate_every": 60, "checkpoint_every": 60}
        | {"final_checkpoint": "last"},
        parallel={"data": 1},
    )
    report = fit(config, tmp_path / "run")
    assert report["test"]["bleu"] == pytest.approx(100)
    translator = Translator.load(tmp_path / "run", use_all_devices=False)
    assert translator.config.search.method == "greedy"
    translations = translator.translate([*(source for source, _ in FIVE), ""])
    assert [t.text for t in translations] == [*(target for _, target in FIVE), ""]
