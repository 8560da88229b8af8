"""Runs as scorers: brute force in the direction that the languages say, wherever scorers go."""

import math
import re
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_experiment import change, write_untrained_run

from flaxformer_mt import EvaluationOptions, FlaxformerWarning, UserError, define_scorer, evaluate_run
from flaxformer_mt.commands.main import main
from flaxformer_mt.config.directions import Direction
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.scoring import metrics
from flaxformer_mt.scoring.metrics import add_scorer, find_metric, score_sentences
from flaxformer_mt.scoring.outside_scorers import OutsideScorer
from flaxformer_mt.shapes import Batch
from flaxformer_mt.translation.define_scorer import define_scorers
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.scorer import Scorer
from flaxformer_mt.translation.translator import Translator

SOURCES, TARGETS = ["aa ba", "bbb ab a", "ab"], ["ab ba", "", "b a ab aa"]
TASK = Direction("xx", "yy")


@pytest.fixture(autouse=True)
def own_scorers(monkeypatch):
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))


@pytest.fixture(scope="module")
def runs(tiny_config, tmp_path_factory):
    """The folder of untrained runs: there, back, and a language model of each language."""
    folder, pairs = tmp_path_factory.mktemp("runs"), read_pairs(tiny_config.data, "train")
    text = {"architecture": "decoder_only", "num_encoder_layers": 0}
    for name, source, target in (
        ("there", "xx", "yy"),
        ("back", "yy", "xx"),
        ("text_yy", "", "yy"),
        ("text_xx", "", "xx"),
    ):
        data = {"source_language": source, "target_language": target}
        config = change(tiny_config, data=data, model={} if source else text)
        write_untrained_run(folder / name, config, pairs)
    return folder


def score_by_hand(run: Path, sources, targets) -> list[float]:
    """The mean log-probability of the tokens of each target, by the network over one pair at a time."""
    trained = load_trained(run)
    model, means = trained.make_model(), []
    for source, target in zip(sources, targets, strict=True):
        ids = np.array([trained.vocabs.target.tokenize(target)])
        read = np.array([[] if source is None else trained.vocabs.source.tokenize(source)], np.int32)
        target_in = np.concatenate([[[trained.vocabs.target.bos_id]], ids[:, :-1]], axis=1)
        batch = Batch(read, target_in, ids, np.ones(read.shape, bool), np.ones(ids.shape, bool))
        log_probs = jax.nn.log_softmax(model.apply({"params": trained.params}, batch, deterministic=True))
        means.append(float(np.take_along_axis(np.asarray(log_probs), ids[..., None], axis=-1).mean()))
    return means


def test_the_languages_say_which_text_is_scored(runs, two_way_run):
    nothing = [None] * len(SOURCES)
    there = score_by_hand(runs / "there", SOURCES, TARGETS)
    back = score_by_hand(runs / "back", TARGETS, SOURCES)
    for run, expected in (
        ("there", there),
        ("back", back),
        ("text_yy", score_by_hand(runs / "text_yy", nothing, TARGETS)),
        ("text_xx", score_by_hand(runs / "text_xx", nothing, SOURCES)),
    ):
        name = define_scorer(f"run:{runs / run}")
        assert name == run and find_metric(name, "").scorer.definition == f"run:{runs / run}@7"
        found = score_sentences(name, SOURCES, TARGETS, None, direction=TASK)
        np.testing.assert_allclose(found, expected, atol=1e-4)
    # Of both directions, the reverse one, with the tag of its language.
    name = define_scorer(f"both_ways=run:{two_way_run}")
    languages = {"source_language": "yy", "target_language": "xx"}
    pairs = Scorer.load(two_way_run).score(TARGETS, SOURCES, **languages)
    found = score_sentences(name, SOURCES, TARGETS, None, direction=TASK)
    np.testing.assert_allclose(found, [one.log_prob / len(one.tokens) for one in pairs], atol=1e-4)
    # The equation of dual conditional cross-entropy filtering, whichever run is named first.
    expected = [math.exp(-(abs(a - b) + 0.5 * (-a - b))) for a, b in zip(there, back, strict=True)]
    for first, second in (("there", "back"), ("back", "there")):
        name = define_scorer(f"both=run:{runs / first},run:{runs / second}")
        found = score_sentences(name, SOURCES, TARGETS, None, direction=TASK)
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_model_is_loaded_once_and_cut_texts_are_said_once(runs, monkeypatch):
    from flaxformer_mt.translation import run_scorers

    run_scorers._load.cache_clear()
    loaded, load = [], run_scorers.load_trained
    monkeypatch.setattr(run_scorers, "load_trained", lambda *a, **o: loaded.append(a) or load(*a, **o))
    names = [define_scorer(f"a=run:{runs / 'there'}"), define_scorer(f"b=run:{runs / 'there'}@best")]
    assert not loaded
    with pytest.warns(FlaxformerWarning, match="there scores: longer than 16 tokens; only the beg") as told:
        for name in names * 2:
            score_sentences(name, ["a " * 40], ["b"], None, direction=TASK)
    assert len(loaded) == len(told) == 1


def test_wrong_runs_are_one_line(runs, two_way_run, tmp_path):
    shutil.copytree(runs / "there", tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints"))
    there, back = f"run:{runs / 'there'}", f"run:{runs / 'back'}"
    for definition, message in (
        ("run:", "--scorer=run:: it names no run; give run:RUN"),
        (f"back=run:{tmp_path}/no", "--scorer=back=run:.*/no is not a run directory"),
        (f"run:{tmp_path}/empty", "has no checkpoints; train first"),
        (f"{there}@9", "there is no checkpoint 9; the nearest is 7"),
        (f"both={there},{there}", "the runs are of xx-yy, xx-yy; dual cross-entropy needs two runs whose"),
        (f"both={there},run:{runs / 'text_xx'}", "the runs are of xx-yy, xx; dual cross-entropy needs"),
        (f"three={there},{back},{there}", "the runs are of xx-yy, yy-xx, xx-yy; dual"),
        (f"bleu={there}", "a scorer cannot be called bleu"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            define_scorer(definition)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="--scorer defines there twice"):
        define_scorers([there, f"{there}@7"], timeout=1)
    for name, task in ((define_scorer(f"a={there}"), "zz yy"), (define_scorer(f"b={there},{back}"), " yy")):
        known = re.sub("^ ", "unknown ", task).replace(" ", " and ")
        with pytest.raises(
            UserError, match=f"scorer {name} .* cannot score texts whose languages are {known}"
        ):
            score_sentences(name, ["a"], ["b"], None, direction=Direction(*task.split(" ")))
    with pytest.raises(
        UserError, match=r"search.mbr is a \(run:.*\), but a run compares a translation with no"
    ):
        Translator.load(
            runs / "there", search=change(read_config(runs / "there/config.json"), search={"mbr": "a"}).search
        )


def test_each_command_says_the_languages_of_its_texts(tiny_run, tiny_config, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    seen = []

    def note(sources, hypotheses, direction):
        seen.append(direction.name)
        return [len(one) for one in hypotheses]

    add_scorer(OutsideScorer("way", "", note, by_direction=True))

    def last(*command: str) -> list[str]:
        seen.clear()
        assert main(list(command)) == 0, capfd.readouterr().err
        return list(dict.fromkeys(seen))

    shutil.copytree(tiny_run, "run")
    Path("in").write_text("aa ba\nab\n")
    rerank = ["--run=run", "--rerank=way"]
    assert last("translate", *rerank, "--input=in", "--output=out") == ["xx-yy"]
    assert last("evaluate", *rerank, "--tune_rerank=chrf", "--split=valid") == ["xx-yy"]
    scores = ["--run=run", "--input=in", "--clean_scores=way>=0", "--overwrite"]
    assert last("backtranslate", *scores, "--output=b") == ["yy-xx"]
    assert last("distil", *scores, "--output=d") == ["xx-yy"]
    assert last("distil", *scores[:2], "--output=e", "--targets=nbest", "--reference=in", "--metric=way") == [
        "xx-yy"
    ]
    seen.clear()
    evaluate_run("run", options=EvaluationOptions(scorers=["way"]))
    read_pairs(
        change(
            tiny_config, data={"clean": change(tiny_config.data, clean={"scores": ("way>=0",)}).clean}
        ).data,
        "train",
    )
    assert set(seen) == {"xx-yy"} and len(seen) > 2


def test_a_server_answers_after_a_scorer_has_failed(tiny_run, tmp_path, capfd):
    shutil.copytree(tiny_run, tmp_path / "run")
    config = change(read_config(tiny_run / "config.json"), search={"rerank": "moody"})
    save_config(config, tmp_path / "run/config.json")
    assert main(["serve", f"--run={tmp_path / 'run'}", "--port=0"]) == 2
    assert "search.rerank names the score 'moody', which is not defined" in capfd.readouterr().err
    assert main(["serve", f"--run={tmp_path / 'run'}", "--port=0", "--scorer=moody=false"]) == 2
    assert "scorer moody (false) ended with status 1 after 0 of 1 scores" in capfd.readouterr().err
    moods = iter([1.0, math.nan, 1.0])
    define_scorer(lambda sources, hypotheses, references: [next(moods)] * len(hypotheses), name="moody")
    engine = Translator.load(tmp_path / "run", use_all_devices=False).engine(arriving=True)
    answers = []
    for number in range(3):
        engine.submit(Request("aa ba", id=number))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while len(engine):
                answers += [answer for _, answer in engine.step()]
        assert ["nan; return a finite" in str(one.message) for one in told] == [True] * (number == 1)
    assert [isinstance(one, UserError) for one in answers] == [False, True, False]
    assert "moody" not in str(answers[1])
