"""The documents' configs, made small: each trains, lowers its loss, and is evaluated by the same commands.

Validation, test set and translations have equally many lines, so that they share their compiled programs.
"""

import dataclasses
import math
from pathlib import Path

import pytest

from flaxformer_mt.config import Config, ParallelConfig
from flaxformer_mt.config.files import load_config
from flaxformer_mt.evaluation.evaluate import evaluate_run
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training.loop import fit
from flaxformer_mt.translation.translator import Translator

ROOT = Path(__file__).resolve().parents[1]

NUMBERS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "acht": "eight"}
PAIRS = [(f"{a} und {b}", f"{NUMBERS[b]} and {NUMBERS[a]}") for a in NUMBERS for b in NUMBERS]
FIVE = [
    ("der Hund schläft heute", "the dog sleeps today"),
    ("die Katze trinkt", "the cat drinks"),
    ("wir lesen ein Buch", "we read a book"),
    ("Anna kauft Äpfel", "Anna buys apples"),
    ("kommt ihr morgen", "will you come tomorrow"),
]


@pytest.fixture
def loaded(monkeypatch) -> list[Translator]:
    """The translators that a test has loaded from run directories."""
    translators, load = [], Translator.load

    def load_and_keep(*arguments, **options):
        translators.append(load(*arguments, **options))
        return translators[-1]

    monkeypatch.setattr(Translator, "load", load_and_keep)
    return translators


def write_text(folder: Path, pairs: list[tuple[str, str]]) -> None:
    for split in ("train", "valid", "test"):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def shrink(config: Config, folder: Path, *, pieces: int, steps: int, model: dict, optim: dict) -> Config:
    """The same recipe with a tiny network on a few lines of text."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(
            config.data,
            dataset="parallel_text",
            text_dir=str(folder),
            cache_dir=str(folder / "cache"),
            max_source_length=12,
            max_target_length=12,
            batch_tokens=12 * 32,
            batch_pairs=min(config.data.batch_pairs, 32),
            num_shapes=1,
        ),
        vocab=dataclasses.replace(config.vocab, kind="word", size=pieces, joint=True, byte_fallback=False),
        model=dataclasses.replace(config.model, num_encoder_layers=1, num_decoder_layers=1, **model),
        optim=dataclasses.replace(config.optim, **optim),
        train=dataclasses.replace(
            config.train,
            tensorboard=False,
            steps=steps,
            log_every=1,
            evaluate_every=steps,
            checkpoint_every=steps,
            final_checkpoint="last",
        ),
        parallel=ParallelConfig(devices=1),
    )


def assert_loss_falls(run_dir: Path, *, steps: int) -> list[dict]:
    """Return the lines of the log."""
    lines = read_metrics(run_dir)
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert len(losses) == steps
    assert sum(losses[-4:]) / 4 < 0.85 * losses[0]
    return lines


HEADS = {"model_dim": 16, "num_heads": 2, "ffn_dim": 32}
SMALL = {
    "handbuilt": HEADS | {"key_dim": 6, "value_dim": 10, "max_positions": 12},
    "kokoyi_iwslt": {"model_dim": 16, "num_heads": 2, "key_dim": 32, "value_dim": 32, "ffn_dim": 32},
    "decoder_only": HEADS | {"key_dim": 6, "value_dim": 10, "max_positions": 24},
    "aiayn": HEADS | {"key_dim": 6, "value_dim": 10},
}


@pytest.mark.slow  # one learns by heart below; test_document_formats compares updates with the originals'
@pytest.mark.parametrize("name", [*SMALL, "language_model"])
def test_each_recipe_lowers_its_loss(name, tmp_path, loaded):
    recipe = "decoder_only" if name == "language_model" else name
    write_text(tmp_path, PAIRS)
    small = shrink(
        load_config(ROOT / "configs" / f"{recipe}.py"),
        tmp_path,
        pieces=10 if name == "language_model" else 16,
        steps=24,
        model=SMALL[recipe],
        # The recipes' rates are for thousands of updates.
        optim={"learning_rate": 5e-3, "schedule": "constant", "warmup_steps": 0, "ema_decay": 0.0},
    )
    if name == "language_model":
        small = dataclasses.replace(
            small,
            data=dataclasses.replace(small.data, source_language=""),
            train=dataclasses.replace(small.train, best_metric="loss"),
        )
    run_dir = tmp_path / "run"
    report = fit(small, run_dir)
    lines = assert_loss_falls(run_dir, steps=24)
    if name == "language_model":
        assert report["test"]["perplexity"] == pytest.approx(math.exp(report["test"]["loss"]))
        first_loss = next(line["loss"] for line in lines if line["split"] == "train")
        assert evaluate_run(run_dir, split="valid")["perplexity"] < math.exp(first_loss)
        return
    assert 0 <= report["test"]["bleu"] <= 100
    (translator,) = loaded
    translations = translator.translate([*(source for source, _ in PAIRS), ""])
    assert len(translations) == len(PAIRS) + 1 and translations[-1].text == ""
    if name == "kokoyi_iwslt":
        shares = [line["accuracy"] for line in lines if line["split"] == "train"]
        assert len(shares) == 24 and shares[-1] > shares[0]
        epochs = [line for line in lines if line["split"] == "epoch"]
        assert [line["epoch"] for line in epochs] == list(range(1, len(epochs) + 1))
        assert len(epochs) == 12  # of two batches of 16 pairs, the second with 9
        assert epochs[-1]["loss"] < epochs[0]["loss"] and 0 < epochs[-1]["accuracy"] <= 1


def test_handbuilt_learns_five_pairs_by_heart(tmp_path, loaded):
    write_text(tmp_path, FIVE)
    assert len({word for pair in FIVE for side in pair for word in side.split()}) == 33
    small = shrink(
        load_config(ROOT / "configs" / "handbuilt.py"),
        tmp_path,
        pieces=33 + 4,
        steps=60,
        model={
            "model_dim": 32,
            "num_heads": 2,
            "key_dim": 12,
            "value_dim": 20,
            "ffn_dim": 48,
            "max_positions": 12,
        },
        optim={"learning_rate": 3e-3, "warmup_steps": 5},
    )
    data = dataclasses.replace(small.data, source_language="de", target_language="en")
    run_dir = tmp_path / "run"
    report = fit(dataclasses.replace(small, data=data), run_dir)
    assert_loss_falls(run_dir, steps=60)
    assert report["test"]["bleu"] == pytest.approx(100)
    (translator,) = loaded
    assert translator.config.search.method == "greedy"
    translations = translator.translate([*(source for source, _ in FIVE), ""])
    assert [t.text for t in translations] == [*(target for _, target in FIVE), ""]
