"""A language model from end to end: it trains on targets alone, and says how probable it finds text."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_experiment import small_model, text_data

from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.show import show
from flaxformer_mt.config import Config, OptimConfig, ParallelConfig, TrainConfig, VocabConfig
from flaxformer_mt.errors import UserError
from flaxformer_mt.evaluation.evaluate import evaluate_run
from flaxformer_mt.model import make_model
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.shapes import Batch
from flaxformer_mt.text_io import throughput
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training.final_report import describe_report
from flaxformer_mt.training.loop import fit
from flaxformer_mt.translation.scorer import generate_text
from flaxformer_mt.vocab import load_vocabs

WORDS = ["ba", "do", "fi", "gu", "ka", "lo", "mi"]


def make_lines(number: int, first: int = 0) -> list[str]:
    """The words in their order, from any on: what comes next is certain, but for the end."""
    return [" ".join((2 * WORDS)[i % 7 : i % 7 + 1 + i % 6]) for i in range(first, first + number)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, Config, dict[str, Any]]:
    """A run, its config and its report."""
    folder = tmp_path_factory.mktemp("text")
    for split, lines in (("train", make_lines(63)), ("valid", make_lines(9, 3)), ("test", make_lines(9, 5))):
        (folder / f"{split}.xx").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    sizes = {"max_source_length": 16, "max_target_length": 16, "batch_tokens": 128, "num_shapes": 1}
    config = Config(
        data=text_data(folder, "-xx", cache_dir=str(tmp_path_factory.mktemp("cache")), **sizes),
        vocab=VocabConfig(kind="word", size=11, byte_fallback=False, normalization="identity"),
        model=small_model(1, 8, 2, 8, architecture="decoder_only"),
        optim=OptimConfig(learning_rate=0.1, warmup_steps=2),
        train=TrainConfig(
            steps=16,
            log_every=8,
            evaluate_every=8,
            checkpoint_every=8,
            best_metric="loss",
            tensorboard=False,
            loss_chunk_tokens=16,
            log_accuracy=True,
        ),
        parallel=ParallelConfig(data=1),
    )
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    return run_dir, config, fit(config, run_dir)


def score_by_definition(run_dir: Path, config: Config, lines: list[str], step: int) -> tuple[float, int]:
    """The mean of -log p(token | those before it) over all tokens and ends, and how many they are."""
    vocab = load_vocabs(run_dir / "vocab").target
    ids = [vocab.tokenize(line) for line in lines]
    tokens = np.full((len(ids), max(map(len, ids))), vocab.pad_id, np.int32)
    for row, sentence in enumerate(ids):
        tokens[row, : len(sentence)] = [vocab.bos_id, *sentence[:-1]]
    log_probabilities = compute_log_probabilities(run_dir, config, tokens, step)
    total, count = 0.0, 0
    for row, sentence in enumerate(ids):
        for place, token in enumerate(sentence):
            total -= log_probabilities[row, place, token]
            count += 1
    return total / count, count


def compute_log_probabilities(run_dir: Path, config: Config, inputs: np.ndarray, step: int) -> np.ndarray:
    """Of each token after those of the rows of `inputs` up to it."""
    none = np.zeros((len(inputs), 0), np.int32)
    batch = Batch(none, inputs, inputs, none.astype(bool), np.ones(inputs.shape, bool))
    size = load_vocabs(run_dir / "vocab").target.size
    model = make_model(config.model, source_size=0, target_size=size)
    params, _ = Checkpoints(run_dir).restore_params(step)
    logits = jax.jit(lambda p, b: model.apply({"params": p}, b, deterministic=True))(params, batch)
    return np.asarray(jax.nn.log_softmax(logits), np.float64)


def test_it_learns_and_logs_perplexity_instead_of_translations(run):
    run_dir, _, report = run
    records = read_metrics(run_dir)
    valid = [record for record in records if record["split"] == "valid"]
    assert [record["step"] for record in valid] == [8, 16]
    for record in valid:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert not {"bleu", "chrf"} & set(record)
    assert valid[-1]["loss"] < 0.95 * valid[0]["loss"] < math.log(11)
    assert valid[-1]["accuracy"] > 0.2
    assert {"train", "epoch"} <= {record["split"] for record in records}
    assert report["best"] == {"step": 16, "loss": valid[-1]["loss"]}
    assert set(report["test"]) == {"name", "checkpoint", "step", "sentences", "tokens", "loss", "perplexity"}
    assert not (run_dir / "translations").exists()
    told = describe_report(report, run_dir)
    assert f"test perplexity {report['test']['perplexity']:.2f}, {report['test']['loss']:.4f} nats" in told
    assert f"evaluate {run_dir} --reference=FILE" in told
    assert "translate" not in told and "BLEU" not in told


def test_the_loss_is_that_of_the_definition(run):
    run_dir, config, report = run
    loss, tokens = score_by_definition(run_dir, config, make_lines(9, 5), 16)
    assert report["test"]["tokens"] == tokens
    assert (report["test"]["name"], report["test"]["sentences"]) == ("test", 9)
    assert report["test"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert report["test"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_a_file_is_scored_as_it_stands(run, tmp_path):
    """Another checkpoint, a line longer than data.max_target_length, and an empty one, which is its end."""
    run_dir, config, _ = run
    lines = [*make_lines(3), "", " ".join(3 * WORDS)]
    file = tmp_path / "text"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = evaluate_run(run_dir, reference=str(file), checkpoint="8")
    loss, tokens = score_by_definition(run_dir, config, lines, 8)
    sure = {"name": "text", "checkpoint": "8", "step": 8, "sentences": 5, "tokens": tokens}
    measured = {"loss": loss, "perplexity": math.exp(loss)}
    assert found == sure | {name: pytest.approx(value, rel=1e-5) for name, value in measured.items()}
    assert json.loads(json.dumps(found)) == found


def test_its_evaluation_shows_progress(run, monkeypatch):
    """At once what it does, then lines and tokens; nothing if it is not asked for."""
    run_dir, _, report = run
    monkeypatch.setattr(throughput, "_SILENT_SECONDS", 0.0)
    said = io.StringIO()
    found = evaluate_run(run_dir, progress=said)
    first, *_, last = said.getvalue().splitlines()
    assert first == f"scoring 9 sentences with checkpoint {found['checkpoint']} (step {found['step']})"
    assert re.match(r"9/9 lines \| [\d.,]+ lines/s \| [\d.,]+ target tokens/s", last)
    assert found == report["test"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("evaluate --source=a", "a language model of xx .* takes no source a, .*--reference=FILE alone"),
        ("evaluate --reference=b --beam_size=2 --lowercase", "leave out --beam_size and --lowercase"),
        ("evaluate --reference=b --split=test", "--split=test and --reference=b exclude each other"),
        (f"translate --input={__file__}", "is a language model"),
        ("generate --prompt=ba_do_fi --length=3", "the prompt has 3 tokens and the text at"),
        ("generate --length=9999", "--length is 9999, but the model has positions for 5000"),
        ("generate --n_best=0", "--n_best is 0"),
        ("generate --beam_size=3", "--beam_size=3 has no effect on sample search"),
    ],
)
def test_what_a_language_model_cannot_do_is_refused(run, capsys, flags, message):
    run_dir, _, _ = run
    command, *flags = (word.replace("ba_do_fi", "ba do fi") for word in flags.split())
    assert main([command, f"--run={run_dir}", *flags]) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(rf"error: .*{message}.*\n", told)


def test_a_translation_model_writes_no_texts(tiny_run, capsys):
    assert main(["generate", f"--run={tiny_run}"]) == 2
    told = capsys.readouterr().err
    assert "is a translation model (data.source_language is xx), not a language model" in told


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_show_traces_a_step_without_sources(run, batching):
    _, config, _ = run
    shown = show(dataclasses.replace(config, data=dataclasses.replace(config.data, batching=batching)))
    assert shown["longest_batch"] == {"rows": 8, "source_length": 0, "target_length": 16}
    assert shown["vocabulary"] == {"source_size": 0, "target_size": 11}
    assert shown["step"]["target_tokens"] == 128 and shown["step"]["teraflops"] >= 0
    assert list(shown["parameters"]["modules"])[0].startswith("decoder/")


def test_splits_and_texts_that_are_not_there_are_told_of(run, tmp_path):
    run_dir, config, _ = run
    (tmp_path / "nothing").write_text("")
    with pytest.raises(UserError, match=r"no text to score \(0 lines\)"):
        evaluate_run(run_dir, reference=str(tmp_path / "nothing"))
    other = tmp_path / "run"
    other.mkdir()
    without = dataclasses.replace(config, data=dataclasses.replace(config.data, test_split="unseen"))
    (other / "config.json").write_text(json.dumps(dataclasses.asdict(without)))
    with pytest.raises(UserError, match=r"has no test split; score files with --reference=FILE$"):
        evaluate_run(other)


def test_it_writes_texts(run, capfdbinary):
    """What comes next is certain but for the end, so the most probable words are those of the language."""
    run_dir, config, _ = run
    assert main(["generate", f"--run={run_dir}", "--method=greedy", "--prompt=gu ka", "--length=6"]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert re.fullmatch("gu ka( [a-z]{2}){0,4}\n", text)
    (greedy,) = generate_text(
        run_dir, prompt="gu ka", length=6, search=dataclasses.replace(config.search, method="greedy")
    )
    assert f"{greedy.text}\n" == text
    # Each of its tokens is the most probable after those before it, as the whole text says at once.
    vocab = load_vocabs(run_dir / "vocab").target
    tokens = [vocab.bos_id, *vocab.tokenize(greedy.text)]
    tokens = tokens if greedy.is_finished else tokens[:-1]
    (log_probs,) = compute_log_probabilities(run_dir, config, np.array([tokens[:-1]], np.int32), 16)
    chosen = log_probs[np.arange(len(tokens) - 1), tokens[1:]]
    assert greedy.log_prob == pytest.approx(chosen.sum(), abs=1e-4)
    banned = np.isin(np.arange(vocab.size), [vocab.pad_id, vocab.bos_id])
    best = np.where(banned, -np.inf, log_probs).argmax(axis=-1)
    assert best[2:].tolist() == tokens[3:]  # after the prompt


def test_its_samples_are_a_function_of_the_seed(run, capfdbinary):
    run_dir, _, _ = run
    flags = ["generate", f"--run={run_dir}", "--n_best=3", "--temperature=1.5"]

    def sample(*more: str) -> list[str]:
        assert main([*flags, *more]) == 0
        return capfdbinary.readouterr().out.decode().splitlines()

    texts = sample()
    assert len(texts) == 3 and len(set(texts)) > 1
    assert set(" ".join(texts).split()) <= {*WORDS, "\u2047"}
    assert sample() == texts
    assert sample("--seed=2") != texts
