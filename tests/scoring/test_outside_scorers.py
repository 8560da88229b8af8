"""Scorers from outside: programs that answer, and those that do not; a mistake is one line with a reason."""

import json
import sys

import numpy as np
import pytest

from flaxformer_mt import define_scorer
from flaxformer_mt.errors import UserError
from flaxformer_mt.scoring import metrics, outside_scorers
from flaxformer_mt.scoring.metrics import find_metric, score_sentences, score_translations
from flaxformer_mt.scoring.outside_scorers import UNKNOWN
from flaxformer_mt.scoring.score_filters import read_filters
from flaxformer_mt.scoring.significance import ResamplingOptions, resample_scores
from flaxformer_mt.translation.define_scorer import define_scorers

# The score is the length of the translation, 100 more with a reference; argv says how it fails.
PROGRAM = """
import json, os, signal, sys, time
how = sys.argv[1] if sys.argv[1:] else ""
if how == "silent": time.sleep(60)
if how == "dies": raise ValueError("no such\\nlayer")
rows = []
for number, line in enumerate(sys.stdin):
    row = json.loads(line)
    if how == "late" and number == 2: print("thinking", file=sys.stderr, flush=True); time.sleep(60)
    if how == "short" and number == 2: print("bye", file=sys.stderr); sys.exit(0)
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "killed_35": os.kill(os.getpid(), 35)
    if how == "closes": os.close(1); time.sleep(60)
    score = len(row["hypothesis"]) + 100 * ("reference" in row)
    rows.append({"nan": "nan", "words": "good", "two": f"{score} {score}"}.get(how, score))
    if how == "twice": rows.append(score)
    if how != "batches" or row["left"] == 0:
        print(*rows, sep="\\n", flush=True)
        rows = []
"""


@pytest.fixture(autouse=True)
def own_scorers(monkeypatch):
    monkeypatch.setattr(metrics, "_OTHERS", dict(metrics._OTHERS))


@pytest.fixture
def command(tmp_path):
    (tmp_path / "length.py").write_text(PROGRAM)
    return f"{sys.executable} {tmp_path}/length.py"


def close(name):
    find_metric(name, "test").scorer.function.close()


def test_a_program_is_kept_running_and_asked_in_parts(command, monkeypatch):
    monkeypatch.setattr(outside_scorers, "_AT_ONCE", 3)
    for name, more in (("length", ""), ("batches", " batches")):
        assert define_scorer(f"batches={command}{more}" if more else command) == name
        program = find_metric(name, "test").scorer.function
        texts = ["x" * size for size in range(8)]
        assert score_sentences(name, texts, texts, None) == [float(size) for size in range(8)]
        process = program._process
        assert score_sentences(name, ["a"], ["ü\n\ud800"], ["c"]) == [103.0] and program._process is process
        assert score_sentences(name, [], [], None) == []
        program.close()
        assert process.poll() is not None
        assert score_sentences(name, ["a"], ["bc"], None) == [2.0]  # it starts again
        program.close()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dies", "ended with status 1 after 0 of 3 scores, saying 'layer'"),
        (
            "silent",
            "is silent for 0.5 seconds after 0 of 3 scores, without a word; .* raise --scorer_timeout",
        ),
        ("late", "is silent for 1 seconds after 1 of 3 scores, saying 'thinking'"),
        ("short", "ended with status 0 after 2 of 3 scores, saying 'bye'"),
        ("killed", "was ended by SIGKILL after 0 of 3 scores, without a word"),
        ("killed_35", "was ended by signal 35 after 0 of 3 scores, without a word"),
        ("closes", "closed its output after 0 of 3 scores"),
        ("nan", "scored 'a' as nan; return a finite number"),
        ("words", "answered 'good'; it must write one number per line"),
        ("two", "answered '1 1'; it must write one number per line"),
        ("twice", "answered '3' without being asked|answered '.' without being asked"),
    ],
)
def test_a_program_that_fails_is_one_line_with_its_last_words(command, how, message, monkeypatch):
    monkeypatch.setattr(outside_scorers, "_ENDING", 0.5)
    # Starting Python may take longer than the limit of a test of silence.
    limit = 0.5 if how == "silent" else 20.0
    name = define_scorer(f"mine={command} {how}", timeout=limit)
    program = find_metric(name, "test").scorer.function
    if how == "late":  # it has started, and answers the second text at once
        score_sentences(name, ["s"], ["a"], None)
        program._limit = 1.0
    with pytest.raises(UserError, match=message) as caught:
        score_sentences(name, ["s"] * 3, ["a", "bb", "ccc"], None)
    assert str(caught.value).startswith(f"scorer mine ({command} {how}) ")
    assert "\n" not in str(caught.value)
    assert how == "nan" or program._process is None
    program.close()


def test_a_program_that_reads_nothing_does_not_block(command):
    name = define_scorer(f"mine={command} silent", timeout=0.5)
    texts = ["x" * 1000] * 256  # more than a pipe holds
    with pytest.raises(UserError, match="is silent for 0.5 seconds"):
        score_sentences(name, texts, texts, None)


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("", "there is no program ''; give .NAME=.COMMAND, MODULE:FUNCTION, run:RUN, spbleu:FILE"),
        ("chrff", "there is no program 'chrff'; did you mean chrf"),
        ("no_such_program --fast", "there is no program 'no_such_program'"),
        ("python 'kiwi.py", "No closing quotation; correct its quotes"),
        ("no_such_module:score", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:score", "cannot be imported: AttributeError"),
        ("json:decoder", "json:decoder is no function; name one of sources, hypotheses, references"),
        (
            "bleu=true",
            "a scorer cannot be called bleu, which has another meaning; give it as --scorer=NAME=true",
        ),
        ("chrf++=true", "cannot be called chrf"),
        ("loss=json:dumps", "cannot be called loss"),
        ("x=ter", "--scorer=x=ter: ter keeps its name; leave out x="),
        ("spbleu", "--scorer=spbleu: names no SentencePiece model .*; give that of FLORES-200"),
        ("spbleu:no_file", "--scorer=spbleu:no_file names no SentencePiece model .*No such file"),
    ],
)
def test_a_wrong_definition_is_refused(definition, message):
    with pytest.raises(UserError, match=message) as caught:
        define_scorer(definition)
    assert "\n" not in str(caught.value)


def test_names(tmp_path):
    with pytest.raises(UserError, match="--scorer defines true twice; give one of them as NAME=COMMAND"):
        define_scorers(["true", "true 1"], timeout=1)
    assert define_scorers(["ter", "chrf++", "my-score=true", f"{sys.executable} x/k.i.py"], timeout=1) == [
        *("ter", "chrf++", "my-score", "k_i"),
    ]
    assert define_scorer(len, name="size") == "size"
    with pytest.raises(
        UserError, match=r"--rerank names the score 'kiwi', which is not defined; built in: bleu"
    ):
        find_metric("kiwi", "--rerank")
    with pytest.raises(UserError, match="did you mean chrf.*; define it with --scorer=chfr=COMMAND"):
        find_metric("chfr", "train.best_metric")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, h, r: 1 / 0, "fails: ZeroDivisionError: division by zero"),
        (lambda s, h, r: [1.0], "returned 1 scores for 2 texts; return one each"),
        (lambda s, h, r: [1.0, float("inf")], "scored 'b' as inf"),
        (lambda s, h, r: ["x", "y"], "fails: ValueError: could not convert"),
        (lambda s: [1, 2], "fails: TypeError"),
    ],
)
def test_a_function_that_fails_is_one_line(function, message):
    name = define_scorer(function, name="mine")
    with pytest.raises(UserError, match=rf"^scorer mine \(.*\) {message}"):
        score_sentences(name, ["a", "b"], ["a", "b"], None)


def test_the_corpus_has_the_mean_with_intervals_and_tests(tmp_path):
    """As sacreBLEU's own metrics, here of the overlap with the source."""
    name = define_scorer(
        lambda sources, hypotheses, references: [len(one) for one in hypotheses], name="size"
    )
    sources, hypotheses = [f"s{n}" for n in range(40)], ["x" * (n % 7) for n in range(40)]
    scores = score_translations(hypotheses, sources, sources=sources, only=["bleu", name])
    sizes = [len(one) for one in hypotheses]
    assert scores["size"] == pytest.approx(np.mean(sizes)) and scores.bleu_detail.startswith("BLEU")
    assert "|scorer:" in scores.signatures["size"]
    systems = {"": hypotheses, "longer": [one + "yy" for one in hypotheses], "same": hypotheses}
    for paired in ("bootstrap", "approximate"):
        options = ResamplingOptions(50, paired, 50)
        found = resample_scores(systems, None, options, sources=sources, only=[name])
        first, longer, same = (row["size"] for row in found.systems)
        assert first.score == pytest.approx(np.mean(sizes)) and 0 < first.ci < 1
        assert longer.p_value < 0.05 and same.p_value == 1
        assert "nrefs:0|" in found.signatures["size"]
    with pytest.raises(UserError, match="the evaluation has no references, with which chrf compares"):
        resample_scores(systems, None, ResamplingOptions(0, "approximate", 5), only=["chrf"])


def test_built_in_metrics_are_sacrebleus(tmp_path):
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    hypotheses, references = ["the cat sat on a mat", "dogs"], ["the cat sat on the mat", "a dog"]
    (tmp_path / "text").write_text("the cat sat on the mat\na dog\n" * 9)
    SentencePieceTrainer.train(
        input=f"{tmp_path}/text", model_prefix=f"{tmp_path}/flores", vocab_size=17, minloglevel=2
    )
    assert define_scorer(f"spbleu:{tmp_path}/flores.model") == "spbleu"
    found = score_translations(hypotheses, references, only=["chrf++", "ter", "spbleu", "bleu"])
    processor = SentencePieceProcessor(model_file=f"{tmp_path}/flores.model")
    pieces = [
        [" ".join(processor.encode_as_pieces(one)) for one in side] for side in (hypotheses, references)
    ]
    assert found["chrf++"] == CHRF(word_order=2).corpus_score(hypotheses, [references]).score
    assert found["ter"] == TER().corpus_score(hypotheses, [references]).score
    assert found["spbleu"] == pytest.approx(BLEU(tokenize="none").corpus_score(pieces[0], [pieces[1]]).score)
    assert "|tok:spm." in found.signatures["spbleu"] and "|nw:2|" in found.signatures["chrf++"]
    ter = score_sentences("ter", (), hypotheses, references)
    assert ter == [
        -TER().sentence_score(*pair).score for pair in zip(hypotheses, zip(references), strict=True)
    ]
    both = resample_scores({"": hypotheses}, references, ResamplingOptions(), only=["bleu", "spbleu"])
    assert {name: one.score for name, one in both.systems[0].items()} == pytest.approx(
        {name: found[name] for name in ("bleu", "spbleu")}
    )


def test_filters_keep_a_threshold_or_a_share():
    define_scorer(lambda sources, targets, references: [len(one) for one in targets], name="size")
    least, best, tiny = read_filters(["size>=3", "size best 50%", "size >= -2.5e-05"], "--clean_scores")
    assert tiny.least == -2.5e-05
    pairs = [("a", one) for one in ("xx", "xxx", "x", "xxx", "xxxx")]
    assert least.keep(pairs, UNKNOWN) == [False, True, False, True, True]
    assert best.keep(pairs, UNKNOWN) == [False, True, False, False, True]  # of equal ones the first
    for text, message in (
        ("size>3", r"data.clean.scores has 'size>3'; give NAME>=SCORE, or 'NAME best 80%'"),
        ("size>=x", "give NAME>=SCORE"),
        ("size>=1.2.3", "give NAME>=SCORE"),
        ("size best 0%", "or 'NAME best 80%', above 0 to 100%"),
        ("size best 101%", "or 'NAME best 80%', above 0 to 100%"),
        ("sice>=3", "data.clean.scores names the score 'sice', which is not defined; did you mean size"),
        ("chrf>=3", "data.clean.scores has no references, with which chrf compares"),
    ):
        with pytest.raises(UserError, match=message):
            read_filters([text], "data.clean.scores")


def test_what_a_program_reads(tmp_path):
    """One JSON object per line, in ASCII, with what it has."""
    (tmp_path / "echo.py").write_text(
        "import sys\nfor line in sys.stdin:\n"
        f"    open({str(tmp_path / 'lines')!r}, 'a').write(line)\n    print(1, flush=True)\n"
    )
    name = define_scorer(f"{sys.executable} {tmp_path}/echo.py")
    score_sentences(name, ["ä", "b"], ["c", "d"], ["e", "f"])
    score_sentences(name, ["ä"], ["c"], None)
    close(name)
    lines = (tmp_path / "lines").read_text(encoding="ascii").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"source": "ä", "hypothesis": "c", "reference": "e", "left": 1},
        {"source": "b", "hypothesis": "d", "reference": "f", "left": 0},
        {"source": "ä", "hypothesis": "c", "left": 0},
    ]
