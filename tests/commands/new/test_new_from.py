"""`new --from`: a recipe that fine-tunes a model, with old directions in the mixture, trains as it is."""

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.originals.tiny_hub import MAKERS
from flaxformer_mt.commands.main import main
from flaxformer_mt.commands.new_finetuning import Parent, adapt, choose_sets, choose_weights
from flaxformer_mt.commands.new_sizing import Choice, Machine
from flaxformer_mt.config import Config, DataConfig, OptimConfig
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.config.files import load_config, read_config
from flaxformer_mt.convert.huggingface.new_languages import NewVocabulary
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.data.prepare import prepare
from flaxformer_mt.evaluation.score_breakdowns import describe_directions
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.training.trained_parameters import check_patterns, is_trained
from flaxformer_mt.vocab import load_vocabs

WORDS = "der die das ein Hund Katze Milch Buch Garten the a dog cat milk book garden".split()
NEW = "qaa_Latn"
CPU = Machine("a CPU", "cpu", 1, None, False)


def write_pairs(folder, stem, languages, count, seed):
    rng = random.Random(seed)
    folder.mkdir(exist_ok=True)
    for language in languages:
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, 5))) for _ in range(count)]
        (folder / f"{stem}.{language}").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The run `base` of a tiny NLLB with a new language, 600 pairs of it, and 200 old ones of de and en."""
    folder = tmp_path_factory.mktemp("work")
    write_pairs(folder, "corpus", ("de", NEW), 600, seed=1)
    write_pairs(folder / "old", "train", ("de", "en"), 200, seed=2)
    MAKERS["nllb"](folder / "hub")
    added = NewVocabulary([folder / f"corpus.{NEW}"], [f"{NEW}:deu_Latn"], pieces=5)
    languages = ["de", "en", NEW]
    import_run(folder / "hub", run_dir=folder / "base", languages=languages, new_vocabulary=added)
    return folder


@pytest.fixture(autouse=True)
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    monkeypatch.setenv("FLAXFORMER_MT_CACHE", str(work / "cache"))


def test_the_recipe_trains_as_it_is_and_scores_old_and_new_directions(capfd):
    command = [
        "new",
        "corpus.de",
        f"corpus.{NEW}",
        "--from=base",
        "--replay=parallel_text@old:de-en",
        "--run=a",
    ]
    assert main(command) == 0
    train, evaluate = json.loads(capfd.readouterr().out)["commands"]
    config, base = load_config("a.py"), read_config(Path("base/config.json"))
    directions = [f"de-{NEW}", f"{NEW}-de", "de-en", "en-de"]
    assert [name.split(":")[1] for name in config.data.dataset.split(",")] == directions
    assert config.vocab == base.vocab and config.search == base.search
    assert dataclasses.replace(config.model, dtype="float32") == base.model
    mixture = prepare(config, vocabs=load_vocabs("base/vocab")).report["mixture"]
    assert sum(part["share"] for part in mixture[2:]) == pytest.approx(0.5, abs=0.02)
    few = ["--config.train.steps=2", "--config.train.evaluate_every=2", "--config.data.num_shapes=1"]
    few += ["--config.parallel.data=1", "--config.search.max_length_ratio=1"]
    assert main([*train.split("flaxformer_mt ")[1].split(), *few]) == 0
    assert "are replaced" not in capfd.readouterr().err, (
        "the recipe has the network and vocabulary of the run"
    )
    assert main([*evaluate.split("flaxformer_mt ")[1].split(), "--checkpoint=last"]) == 0
    shown = capfd.readouterr().err
    rows = re.findall(r"^(\S+) +(?:\d+)? +([\d.]+) .* ([\d.]+)$", shown[shown.index("direction ") :], re.M)
    assert [name for name, *_ in rows] == [*directions, "mean"] and "BLEU of a@0" in shown


def test_a_run_in_a_store_is_named_by_its_url(work, capfd):
    url = (work / "base").as_uri()
    assert main(["new", "corpus.de", f"corpus.{NEW}", f"--from={url}", "--run=stored"]) == 0
    assert json.loads(capfd.readouterr().out)["commands"][0].endswith(f"--init={url}")


def test_a_name_that_is_not_train_is_linked_with_the_sets_beside_it(work):
    write_pairs(work / "beside", "mine", ("de", "fr"), 600, seed=3)
    write_pairs(work / "beside", "valid", ("de", "fr"), 20, seed=4)
    write_pairs(work / "with_valid", "train", ("de", "en"), 200, seed=5)
    write_pairs(work / "with_valid", "valid", ("de", "en"), 20, seed=6)
    flags = ["--from=base", "--replay=parallel_text@with_valid:de-en", "--run=b"]
    assert main(["new", "beside/mine.de", "beside/mine.fr", *flags]) == 0
    assert load_config("b.py").data.valid_pairs == 0 < load_config("b.py").data.test_pairs
    assert {path.name for path in Path("b_text").iterdir()} == {
        f"{s}.{x}" for s in ("train", "valid") for x in ("de", "fr")
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replay=parallel_text@old:de-en"], "--replay=.* has no effect without --from=RUN"),
        (["--from=base", "--for=cpu"], "--from=base and --for=cpu exclude each other"),
        (["--from=hub"], "--from=hub is no run; make one with: import hub --run=DIR"),
        (["--from=base", "--replay=parallel_text@old"], "parallel_text@old without a direction; write it as"),
        (["--from=base", "--replay=parallel_text@none:de-en"], "none"),
        (
            ["--from=base", "--replay=parallel_text@both:de-en"],
            "only parallel_text@both:.* has valid files",
        ),
        (["--from=base", "--target_language=qab_Latn"], "no language tag qab_Latn; .* add one with `import"),
    ],
)
def test_mistakes_are_one_line(flags, message, work, capfd):
    for split in ("train", "valid"):
        write_pairs(work / "both", split, ("de", "en"), 50, seed=7)
    assert main(["new", "corpus.de", f"corpus.{NEW}", "--run=c", *flags]) == 2
    error = capfd.readouterr().err
    assert re.search(message, error) and len(error.strip().split("\n")) == 1, error


def make_parent(parameters=1000, **data):
    return Parent("base", Config(data=DataConfig(**data)), None, parameters)


def test_old_sets_share_a_half_by_temperature():
    parent, sizes = make_parent(tag_style="nllb"), [900, 900, 10**6, 10**6, 2000, 2000]
    weights = choose_weights(parent, sizes).value
    seen = [size * weight for size, weight in zip(sizes, weights, strict=True)]
    assert weights[:2] == (1, 1) and sum(seen[2:]) / sum(seen) == pytest.approx(0.5, rel=0.01)
    assert seen[2] / seen[4] == pytest.approx((10**6 / 2000) ** (1 / 5), rel=0.01)


def test_without_language_tags_a_set_has_one_direction():
    names = choose_sets(make_parent(), Direction("de", "fr"), "a:de-en,hf:b/c:it-en")[0].value
    assert names == "parallel_text:de-fr,a:de-en,hf:b/c:it-en"
    names = choose_sets(make_parent(tag_style="madlad"), Direction("de", "fr"), "a:de-fr,a:fr-de")[0].value
    assert names == "parallel_text:de-fr,parallel_text:fr-de,a:de-fr,a:fr-de"


def test_a_model_that_fills_the_memory_gets_factors_of_low_rank():
    sized = [Choice("optim.learning_rate", 2e-3, ""), Choice("model.dtype", "bfloat16", "")]
    parent, small = (
        make_parent(parameters=600_000_000),
        CPU._replace(memory=16 << 30),
    )
    for memory, is_lora in ((None, False), (80 << 30, False), (16 << 30, True)):
        values = {one.name: one.value for one in adapt(parent, CPU._replace(memory=memory), sized)}
        assert ("optim.lora" in values, "optim.freeze" in values) == (is_lora, not is_lora)
        assert values["optim.learning_rate"] == pytest.approx((3 if is_lora else 1) * 0.1 / 512, rel=0.01)
        assert values["model.dtype"] == "bfloat16"
    params, config = load_trained("base", checkpoint="last").params, read_config(Path("base/config.json"))
    (lora,) = (one.value for one in adapt(parent._replace(config=config), small, sized) if "lora" in one.name)
    check_patterns(params, OptimConfig(lora=lora))
    assert is_trained("shared_embedding/embedding", OptimConfig(lora=lora))


def test_directions_are_shown_beside_compared_systems():
    def report(bleu, before):
        against = [{"name": "a@0", "bleu": {"score": before}}]
        return {"bleu": bleu, "chrf": 50.0, "sentences": 3, "against": against}

    directions = {"de-fr": report(20.0, 1.0), "de-en": report(30.0, 31.5)}
    table = describe_directions({"bleu": 25.0, "chrf": 50.0, "directions": directions})
    assert table.heading == ["direction", "sentences", "BLEU", "chrF", "BLEU of a@0"]
    assert [row[-1] for row in table.rows] == ["1.00", "31.50", "16.25"]
