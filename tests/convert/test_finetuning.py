"""Pretrained models are imported, fine-tuned as a whole and by factors, translate, and are given back."""

import dataclasses
import json
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_experiment import text_data

from benchmarks.originals.tiny_hub import MAKERS
from flaxformer_mt import Config, Translator, fit
from flaxformer_mt.config import LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.huggingface.new_languages import NewVocabulary
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.errors import UserError
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.training.initial_model import start_run

LENGTHS = {"max_source_length": 40, "max_target_length": 40}
WORDS = {"der": "the", "Hund": "dog", "Katze": "cat", "schläft": "sleeps", "heute": "today", "und": "and"}


def write_text(folder: Path) -> None:
    """Pairs to train on; none to validate, since translations are not the subject."""
    draw = random.Random(0)
    folder.mkdir()
    lines = [draw.choices(list(WORDS), k=draw.randint(1, 4)) for _ in range(64)]
    (folder / "train.de").write_text("".join(f"{' '.join(line)}\n" for line in lines))
    (folder / "train.en").write_text("".join(f"{' '.join(map(WORDS.get, line))}\n" for line in lines))


def make_config(root: Path, *, steps: int = 20, **optim) -> Config:
    return Config(
        data=text_data(root / "text", batch_tokens=1280, num_shapes=1, **LENGTHS),
        optim=OptimConfig(learning_rate=5e-3, schedule="constant", warmup_steps=1, **optim),
        parallel=ParallelConfig(data=1),
        train=TrainConfig(
            steps=steps,
            log_every=5,
            evaluate_every=steps,
            checkpoint_every=steps,
            final_checkpoint="last",
            tensorboard=False,
        ),
    )


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["split"] == "train"]


@pytest.mark.parametrize(
    ("name", "languages"), [("nllb", ["de", "en"]), pytest.param("t5", None, marks=pytest.mark.slow)]
)
def test_a_random_model_learns_and_goes_out_again(name, languages, tmp_path):
    MAKERS[name](tmp_path / "hub")
    write_text(tmp_path / "text")
    base = tmp_path / "base"
    found = import_run(tmp_path / "hub", format_name="hf", run_dir=base, languages=languages)
    assert found["largest_difference"] < 1e-4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(start_run(make_config(tmp_path), tmp_path / "tuned", str(base)), tmp_path / "tuned")
        whole = losses(tmp_path / "tuned")
        assert whole[-1] < whole[0] - 1
    (translation,) = Translator.load(tmp_path / "tuned", checkpoint="last").translate(["der Hund"])
    assert "_Latn" not in translation.text
    exported = export_run(tmp_path / "tuned", format_name="hf", output=tmp_path / "out", checkpoint="last")
    assert exported["largest_difference"] < 1e-4 and "model.safetensors" in exported["files"]
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "hub" / "config.json").read_bytes()


@pytest.mark.slow  # training/test_initial_model.py shows the same of a run of this package
def test_an_import_is_adapted_as_by_the_recipe_that_freezes_embeddings(tmp_path):
    MAKERS["nllb"](tmp_path / "hub")
    write_text(tmp_path / "text")
    base = tmp_path / "base"
    import_run(tmp_path / "hub", format_name="hf", run_dir=base, languages=["de", "en"])
    lora = LoraConfig(rank=4, targets=("*attention/query/kernel", "*feedforward/*/kernel"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapt = make_config(tmp_path, lora=lora, freeze=("*_embedding",))
        fit(start_run(adapt, tmp_path / "adapted", str(base)), tmp_path / "adapted")
    adapted = losses(tmp_path / "adapted")
    assert adapted[-1] < adapted[0] - 0.1
    before, after = (
        flatten_tree(load_trained(run, checkpoint="last").params) for run in (base, tmp_path / "adapted")
    )
    changed = {path for path in before if not np.array_equal(before[path], after[path.removeprefix("lora/")])}
    assert changed and all("query/kernel" in path or "feedforward" in path for path in changed)


def test_languages_of_an_import(tmp_path):
    MAKERS["m2m_100"](tmp_path / "hub")
    run = tmp_path / "run"
    for languages, message in [
        (["de"], "give two different ones"),
        (["de", "de"], "give two different ones"),
        (["de", "tlh"], "--languages is tlh, .* no language tag __tlh__; it has 100, such as __tl__"),
    ]:
        with pytest.raises(UserError, match=message):
            import_run(tmp_path / "hub", format_name="hf", run_dir=run, languages=languages)
        assert not run.exists()
    import_run(tmp_path / "hub", format_name="hf", run_dir=run, languages=["de", "en", "fr"])
    translator = Translator.load(run)
    with pytest.raises(UserError, match="translates to en and fr and de; give --target_language=en"):
        translator.translate(["der Hund"])
    texts = [
        translator.translate(["der Hund", ""], source_language="de", target_language=target)[0].tokens[0]
        for target in ("en", "fr", "af")
    ]
    tags = translator.vocabs.target.tags
    assert texts == [tags["__en__"], tags["__fr__"], tags["__af__"]]


def test_words_of_a_pretrained_vocabulary_are_trained_on_with_tags(tmp_path):
    from flaxformer_mt.corpus.reader import read_pairs
    from flaxformer_mt.data.token_store import TokenStore
    from flaxformer_mt.runs.load_run import read_config

    MAKERS["m2m_100"](tmp_path / "hub")
    write_text(tmp_path / "text")
    import_run(tmp_path / "hub", format_name="hf", run_dir=tmp_path / "run")
    imported = read_config(tmp_path / "run" / "config.json")
    data = dataclasses.replace(
        make_config(tmp_path).data,
        dataset="parallel_text:de-en,parallel_text:en-de",
        tag_style=imported.data.tag_style,
    )
    pairs = read_pairs(data, "train")
    vocabs = load_trained(tmp_path / "run").vocabs
    store = TokenStore.build(pairs, vocabs, tmp_path / "tokens")
    tags = vocabs.target.tags
    for number, (source, target) in ((0, ("de", "en")), (len(pairs) - 1, ("en", "de"))):
        ids = store[number]
        assert (ids[0][0], ids[1][0]) == (tags[f"__{source}__"], tags[f"__{target}__"])
        assert "__" not in pairs[number].target
        assert vocabs.target.detokenize(ids[1]) == pairs[number].target


@pytest.mark.parametrize(
    ("name", "languages"), [("nllb", ["de", "en"]), pytest.param("madlad", None, marks=pytest.mark.slow)]
)
def test_a_cut_vocabulary_leaves_the_rest_of_the_model_as_it_is(name, languages, tmp_path):
    from flaxformer_mt.convert.formats import ImportOverrides, Weights, find_format
    from flaxformer_mt.convert.parity_check import flax_outputs, make_batch

    MAKERS[name](tmp_path / "hub")
    whole = find_format("hf").read(tmp_path / "hub", ImportOverrides())
    text = ["der kleine Hund schläft", "the small dog sleeps"]
    (tmp_path / "text").write_text("\n".join(text))
    options = {"format_name": "hf", "languages": languages}
    with pytest.raises(UserError, match="nothing.txt"):
        import_run(
            tmp_path / "hub",
            run_dir=tmp_path / "run",
            new_vocabulary=NewVocabulary(["nothing.txt"]),
            **options,
        )
    request = NewVocabulary([tmp_path / "text"])
    found = import_run(tmp_path / "hub", run_dir=tmp_path / "run", new_vocabulary=request, **options)
    trained = load_trained(tmp_path / "run")
    vocab, original = trained.vocabs.target, whole.vocabs.target
    assert vocab.size == found["pieces"] < original.size * 0.8
    assert set(vocab.tags) == ({"deu_Latn", "eng_Latn"} if name == "nllb" else {"<2de>", "<2en>", "<2fr>"})
    old_ids = {piece: number for number, piece in enumerate(original.pieces(range(original.size)))}
    kept = [old_ids[piece] for piece in vocab.pieces(range(vocab.size))]
    lead = "deu_Latn " if name == "nllb" else "<2en> "
    cut_ids = vocab.tokenize(lead + text[0])
    assert [kept[one] for one in cut_ids] == original.tokenize(lead + text[0])
    assert vocab.detokenize(cut_ids).endswith(text[0])
    assert vocab.pieces(cut_ids) == original.pieces(original.tokenize(lead + text[0]))
    # Other words of the same letters are written with other pieces, and lose nothing.
    for line in ("das Hinterdorf", "the tall sleep", "sieht"):
        assert vocab.detokenize(vocab.tokenize(line)).replace(" ", "") == line.replace(" ", "")
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(trained.params).items()}
    own = Weights(trained.config, trained.vocabs, leaves)
    logits = []
    for weights in (whole, own):
        side = weights.vocabs.target
        ids = [side.tokenize(lead + line) for line in text]
        batch = make_batch(ids, ids[::-1], weights.vocabs, config=weights.config)
        logits.append(flax_outputs(weights, batch, quantity="logits")[batch.target_mask])
    np.testing.assert_allclose(logits[1], logits[0][:, kept], rtol=0, atol=1e-5 * np.abs(logits[0]).max())
    for name in ("hf", "ctranslate2"):
        exported = export_run(tmp_path / "run", format_name=name, output=tmp_path / name)
        assert exported["largest_difference"] < 1e-4
