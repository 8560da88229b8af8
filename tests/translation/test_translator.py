"""Lines in, lines out, with a tiny random network and a real vocabulary (see conftest.py)."""

import collections
import dataclasses
import itertools
import math
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from fake_engine import fake_engine
from make_translator import make_translator
from tiny_experiment import change

from flaxformer_mt import processor
from flaxformer_mt.config import ModelConfig, SearchConfig
from flaxformer_mt.config.files import save_config
from flaxformer_mt.decoding.forced_decoding import Pair
from flaxformer_mt.errors import UserError
from flaxformer_mt.parallel import SplitParameters
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import TrainedModel, load_trained
from flaxformer_mt.text_io.resumable_output import ResumableOutput
from flaxformer_mt.translation.requests import Request
from flaxformer_mt.translation.result import Annotations
from flaxformer_mt.translation.translator import Translation, Translator, place_models

SENTENCES = ["der Hund", "die Katze .", "ein Buch", "Milch", "im Garten"]


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def translator(shared_translator, warnings, monkeypatch):
    """One translator for all tests, so that each size is compiled once; it warns into a fresh list."""
    monkeypatch.setattr(shared_translator, "warn", warnings.append)
    return shared_translator


# ---- the network and the search together ----


def test_a_line_does_not_depend_on_its_batch(translator):
    lines = [*SENTENCES, "", "Katze", "ein Hund ."]
    together = translator.translate(lines)
    assert len({t.text for t in together}) > 3  # different sources, different translations
    backwards = translator.translate(lines[::-1])[::-1]
    for one, two in zip(together, backwards, strict=True):
        assert (one.text, one.tokens) == (two.text, two.tokens)
        np.testing.assert_allclose(two.score, one.score, rtol=1e-4)
    for number in (0, 4):
        assert translator.translate([lines[number]])[0].tokens == together[number].tokens


def no_search(translator, monkeypatch):
    """Answers lines with themselves."""
    engine = fake_engine(lambda request: Translation(request.text, 0.0, 0.0, ()))
    monkeypatch.setattr(translator, "engine", lambda **options: engine)


def test_learned_positions_bound_the_length(config, vocabs, monkeypatch):
    """Of the search, and of the batches in which found translations are read again."""
    model = dataclasses.replace(config.model, positions="learned", max_positions=20)
    long = dataclasses.replace(config.search, max_length_offset=100)
    translator = make_translator(dataclasses.replace(config, model=model, search=long), {}, vocabs)
    assert translator.search.lengths.limit(12) == translator.search.lengths.longest_target == 20
    shapes = []

    def run(params, batch, *, watched):
        shapes.append(batch.shape)
        return np.zeros((batch.shape.rows, batch.shape.target)), []

    monkeypatch.setattr(translator.scorer, "run", run)
    translator.scorer.read_all([Pair([5], [5])], params=())
    assert [shape.target for shape in shapes] == [20]


# ---- one line for each line ----


ODD_LINES = [
    "",
    "   \t ",
    "\x85",
    "Hund \x85 Katze",
    "a\u2028b\u2029c",
    "\x00\x01\x07 Hund \x1b[31m",
    "🐕‍🦺 🎉🎉🎉",
    "Собака спит .",
    "كلب ينام",
    "犬は庭で寝ている。",
    "\u200b\ufeff",
    "Hund\tKatze\rMilch\nBuch",
    "Hund " * 500,
    "x" * 60,
    "犬は庭で寝ている" * 3,
    "\U0010ffff\ue000",
    "der Hund",
]


def test_odd_lines_give_one_line_each(translator, warnings, params):
    # More parts than the rows of a search state: later parts take the rows of earlier ones.
    assert len(parts_of(translator, ODD_LINES)) > 2 * 14
    bias = np.zeros_like(params["output_bias"])  # the bytes of the vocabulary, of which texts may be invalid
    bias[translator.vocabs.target.eos_id] = 4.0
    with_bytes = jax.device_put({**params, "output_bias": bias})
    translations = translator.translate(ODD_LINES, params=with_bytes)
    assert len(translations) == len(ODD_LINES)
    for line, translation in zip(ODD_LINES, translations, strict=True):
        assert len(f"{translation.text}|".splitlines()) == 1, repr(line)
        assert translation.text == translation.text.encode().decode()
    for blank in translations[:3]:  # NaN is equal to nothing
        assert math.isnan(blank.score)
        assert dataclasses.replace(blank, score=0.0) == Translation("", 0.0, 0.0, ())
    assert translations[-1].parts == 1 and translations[-1].tokens
    assert not any(t.truncated for t in translations)
    several = [number for number, t in enumerate(translations, start=1) if t.parts > 1]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"lines {', '.join(map(str, several))}: longer than data.max_source_length")


def test_characters_that_nobody_sees_change_nothing_but_the_count_of_words(translator):
    plain = ["der kleine Hund", "die Katze .", "ein Buch", "Milch", "im Garten"]
    marked = ["\ufeffder kl\u00adeine \u2060Hund", "die\u200e \u200b Katze\u202c .", *plain[2:]]
    asked = Annotations(alignments="words", token_log_probs=True)
    expected, found = (translator.translate(lines, n_best=2, annotations=asked) for lines in (plain, marked))
    assert found[0] == expected[0]
    # The zero-width space between spaces is a word of the line, which nothing is aligned with.
    moved = tuple((i + (i > 0), j) for i, j in expected[1].alignment)
    assert found[1].alignment == moved and any(i > 1 for i, _ in moved)
    assert found[1].n_best[1].score == expected[1].n_best[1].score


def test_long_lines_are_cut_and_named(warnings, config, params, vocabs):
    cutting = make_translator(config, params, vocabs, long_lines="cut", warn=warnings.append)
    long = "Hund schläft " * 9
    found = cutting.translate(["Milch", long, "", long, "Hund", "Buch"])
    assert [t.truncated for t in found] == [False, True, False, True, False, False]
    assert warnings == [
        "lines 2, 4: longer than data.max_source_length 12 tokens, so only the beginning was translated; "
        "split long lines into sentences"
    ]
    warnings.clear()
    cutting.translate([long] * 13)
    assert warnings[0].startswith("lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more: longer")


def test_scores_that_are_not_numbers_are_warned_of(translator, warnings, params):
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), params)
    found = translator.translate(["der Hund", ""], params=broken)
    assert [t.text for t in found] == ["", ""]
    assert found[0].score == -math.inf and math.isnan(found[1].score)
    assert warnings == [
        "line 1: the model's scores are not numbers (NaN), so the translation is empty; "
        "try an earlier checkpoint"
    ]


# ---- n best ----


def test_n_best_are_different_and_in_order(translator, found_by_beam):
    for translation in found_by_beam:
        assert translation.n_best[0] is translation and translation.tokens
        assert len({hypothesis.tokens for hypothesis in translation.n_best}) == 3
        ended = [h for h in translation.n_best if h.tokens[-1] == translator.vocabs.target.eos_id]
        scores = [hypothesis.score for hypothesis in ended]
        assert scores == sorted(scores, reverse=True)
    best = [t.tokens for t in translator.translate(SENTENCES)]
    assert best == [t.tokens for t in found_by_beam]
    unique = translator.translate(SENTENCES, n_best=3, unique=True)
    for one, every in zip(unique, found_by_beam, strict=True):
        assert [h.text for h in one.n_best] == [*dict.fromkeys(h.text for h in every.n_best)]
    again = translator.translate(SENTENCES, n_best=3)
    assert [t.tokens for t in again] == best and translator(SENTENCES, n_best=3) == again


def test_greedy_is_beam_one_and_suppressed_pieces_do_not_occur(
    translator_with, greedy_translator, translator, suppressed, vocabs
):
    free = {token for t in translator.translate(SENTENCES) for token in t.tokens}
    assert set(suppressed) <= free
    suppress = greedy_translator.config.search.suppress
    beam = translator_with("beam", beam_size=1, suppress=suppress)
    found = {"greedy": greedy_translator.translate(SENTENCES), "beam": beam.translate(SENTENCES)}
    assert [t.tokens for t in found["greedy"]] == [t.tokens for t in found["beam"]]
    for method, one in (("greedy", greedy_translator), ("beam", beam)):
        tokens = {token for t in found[method] for token in t.tokens}
        assert not tokens & {*suppressed, vocabs.target.unk_id}, method
        with pytest.raises(UserError, match=f"n_best is 2, but {method} search with beam_size 1 keeps 1"):
            one.translate(SENTENCES, n_best=2)
    with pytest.raises(UserError, match="the suppressed token"):
        beam.translate(["Hund"], required=[[vocabs.target.detokenize([suppressed[0]])]])


# ---- streams ----


def test_a_stream_keeps_order_and_reads_no_more_than_a_window_ahead(translator, warnings):
    lines = [*SENTENCES[:4], "", "Milch", "Hund " * 5]
    expected = [t.text for t in translator.translate(lines)]
    warnings.clear()
    read = []

    def source():
        for number in itertools.count():
            read.append(number)
            yield lines[number % len(lines)]

    stream = translator.translate_stream(source(), window=8)
    for number in range(24):
        assert next(stream).text == expected[number % len(lines)]
        assert len(read) <= (number // 8 + 1) * 8
    assert [warning.split(":")[0] for warning in warnings] == ["line 7", "line 14", "line 21"]


def test_memory_does_not_grow_with_the_file(translator, monkeypatch, tmp_path):
    no_search(translator, monkeypatch)

    def peak(count):
        lines = (f"der Hund {number % 7}" for number in range(count))
        tracemalloc.start()
        try:
            with ResumableOutput(str(tmp_path / "out"), origin={}, step=64, resume=False) as output:
                for translation in translator.translate_stream(output.read("input", lines), window=64):
                    output.write([translation.text])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(8 * 256)  # what is made once, also tuples that Python keeps for later ones
    short = peak(256)
    assert peak(8 * 256) < short + 100_000  # of 1,792 lines more, fewer than 60 bytes each are kept


# ---- mistakes ----


def test_a_text_has_one_translation_and_a_call_its_own_search_options(translator, config, vocabs, params):
    expected = translator.translate(SENTENCES[:1])[0]
    assert translator.translate(SENTENCES[0]) == expected
    search = dataclasses.replace(config.search, method="greedy", beam_size=1)
    greedy = make_translator(dataclasses.replace(config, search=search), params, vocabs)
    wanted = greedy.translate(SENTENCES)
    assert translator.translate(SENTENCES, method="greedy", beam_size=1) == wanted
    assert list(translator.translate_stream(iter(SENTENCES), method="greedy", beam_size=1)) == wanted
    other = translator.with_search(method="greedy", beam_size=1)
    assert other is translator.with_search(beam_size=1, method="greedy")
    for seed in range(20):
        translator.with_search(seed=seed)
    assert len(translator._with_options) == 8  # with other programs each, which take memory
    assert other.all_params is translator.all_params and translator.translate(SENTENCES[0]) == expected
    assert "greedy search, beam_size=1" in repr(other) and "beam search, beam_size=3" in repr(translator)


def test_mistakes_are_named(translator, translator_with, config, params, vocabs, make_vocabularies):
    others = TrainedModel(
        config, make_vocabularies(290, [(line, line) for line in SENTENCES]), params, "best", {}
    )
    positions = change(config, model={"positions": "learned", "max_positions": 16})
    wrong = change(config, search={"beam_size": 0})
    split = object.__new__(SplitParameters)
    stream, translate = translator.translate_stream, translator.translate
    words = Annotations(alignments="words")

    def suppress(name):
        return translator_with("beam", suppress=(name,))

    mistakes = {
        "n_best is 4, but beam search with beam_size 3 keeps 3": lambda: translate(SENTENCES, n_best=4),
        "n_best is 0": lambda: translate(SENTENCES, n_best=0),
        "got one string; call translate with it": lambda: next(stream("Hund")),
        "window is 0": lambda: next(stream(["Hund"], window=0)),
        r"config\.search\.beam_sice; did you mean config\.search\.beam_size\?": lambda: translate(
            ["Hund"], beam_sice=2
        ),
        "line 2 is bytes, not str": lambda: translate(["Hund", b"Hund"]),
        "line 3 is bytes, not str": lambda: list(stream(iter(["Hund", "Hund", b"Hund"]), window=2)),
        "search.beam_size is 0": lambda: make_translator(wrong, None, vocabs),
        "search.suppress contains 'nothing-like-it'": lambda: suppress("nothing-like-it"),
        "search.suppress contains '999'": lambda: suppress("999"),
        "contains the end symbol": lambda: suppress("</s>"),
        "alignment layer is 1, but the decoder has 1 layers; give 0 to 0": lambda: translate(
            ["Hund"], annotations=words._replace(layer=1)
        ),
        "alignment head is 2, but the decoder has 2 heads; give 0 to 1": lambda: translate(
            ["Hund"], annotations=words._replace(head=2)
        ),
        "there are 1 prefixes for 2 lines; give one for each": lambda: translate(
            SENTENCES[:2], prefixes=["a"]
        ),
        "line 1 has required phrases and .* as a whole: shorten the line": lambda: translate(
            [LONG], required=[["dog"]]
        ),
        "line 2 has .* tokens of prefix and required phrases": lambda: make_translator(
            positions, params, vocabs
        ).translate(["Hund", "Katze"], prefixes=["", "the old cat drinks milk today " * 4]),
        r"another source vocabulary \(290 subwords\) than the first \(320": lambda: make_translator(
            config, params, vocabs, ensemble=[others]
        ),
        "quantization=int8 is for models that fit on one device": lambda: place_models(
            [({}, ModelConfig())], split, "int8"
        ),
    }
    for message, call in mistakes.items():
        with pytest.raises(UserError, match=message):
            call()
    with pytest.raises(ValueError, match="params="):
        make_translator(config, None, vocabs).translate(["Hund"])
    assert list(stream([])) == []


# ---- run directories ----


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory, config, params, vocabs):
    run = tmp_path_factory.mktemp("runs") / "run"
    (run / "vocab").mkdir(parents=True)
    save_config(config, run / "config.json")
    vocabs.save(run / "vocab")
    checkpoints = Checkpoints(run)
    checkpoints.save(10, {"params": params}, {"step": 10, "metrics": {}})
    checkpoints.wait()
    return run


@pytest.fixture
def run_dir(saved_run, tmp_path):
    return shutil.copytree(saved_run, tmp_path / "run")


def test_load_translates_as_what_was_saved(run_dir, translator, warnings, config):
    loaded = Translator.load(run_dir, checkpoint="10", use_all_devices=False, warn=warnings.append)
    assert not warnings and loaded.checkpoint == "10"
    assert loaded.config == change(config, model={"scan_layers": False})  # its parameters are not stacked
    loaded.search.programs = translator.search.programs
    assert loaded.translate(["der Hund"])[0].tokens == translator.translate(["der Hund"])[0].tokens
    search = SearchConfig(method="greedy")
    assert Translator.load(run_dir, checkpoint="10", search=search).config.search == search


def assert_nearly_the_same(other, translator, found_by_beam, *, rel):
    """Most translations, with scores that are nearly those of the exact model."""
    found = other.translate(SENTENCES)
    assert sum(one.tokens == two.tokens for one, two in zip(found, found_by_beam, strict=True)) >= 3
    sources = [translator.vocabs.source.tokenize(line) for line in SENTENCES]
    pairs = [Pair(source, one.tokens) for source, one in zip(sources, found, strict=True)]
    exact = translator.scorer.score_all(pairs, params=(translator.all_params[0],))
    for one, two in zip(found, exact, strict=True):
        assert one.log_prob != two.log_prob and one.log_prob == pytest.approx(two.log_prob, rel=rel)


def test_dtype_replaces_that_of_the_training(run_dir, translator, found_by_beam, config, monkeypatch):
    """A search in bfloat16 finds nearly the same, with nearly the same scores as in float32."""
    narrow = Translator.load(run_dir, checkpoint="10", dtype="bfloat16", use_all_devices=False)
    assert narrow.config.model.dtype == "bfloat16"
    kinds = collections.Counter(leaf.dtype.name for leaf in jax.tree.leaves(narrow.all_params[0]))
    assert kinds["bfloat16"] > 10 and kinds["float32"] > 10  # matrices; biases and scales of norms
    assert_nearly_the_same(narrow, translator, found_by_beam, rel=0.02)
    # The default: the dtype of the training, but float32 on a processor that is no faster in bfloat16.
    trained = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    save_config(trained, run_dir / "config.json")
    processors = (
        ("AuthenticAMD", "avx2 avx512_bf16 fma", "bfloat16"),
        ("GenuineIntel", "avx2 avx512_bf16 fma", "float32"),
        ("GenuineIntel", "avx2 avx512_bf16 amx_bf16", "bfloat16"),
        ("AuthenticAMD", "avx2 fma", "float32"),
    )
    for vendor, flags, expected in processors:
        facts = {"vendor_id": vendor, "flags": flags}
        monkeypatch.setattr(processor, "_read_cpuinfo", lambda facts=facts: facts)
        assert load_trained(run_dir, checkpoint="10").config.model.dtype == expected
        assert load_trained(run_dir, checkpoint="10", dtype="bfloat16").config.model.dtype == "bfloat16"


def test_quantized_models_find_nearly_the_same(run_dir, translator, found_by_beam, own_programs):
    """Matrices are 8-bit integers, scores nearly those of float32, and the description is another one."""
    plain = Translator.load(run_dir, checkpoint="10", use_all_devices=False)
    plain.translate(SENTENCES[:1])  # keeps programs on disk, which are not those of 8-bit integers
    quantized = Translator.load(run_dir, checkpoint="10", quantization="int8", use_all_devices=False)
    kinds = collections.Counter(leaf.dtype.name for leaf in jax.tree.leaves(quantized.all_params[0]))
    assert kinds["int8"] > 10 and kinds["float32"] > 10
    assert quantized.describe() != plain.describe()
    assert_nearly_the_same(quantized, translator, found_by_beam, rel=0.06)


def test_loaded_models_search_on_every_core(run_dir, monkeypatch, all_devices):
    """As the command does: the cores become devices before the parameters are loaded, which starts JAX."""
    module, calls = "flaxformer_mt.translation.translator", []
    load = load_trained

    def log_load(*arguments, **options):
        calls.append("load")
        return load(*arguments, **options)

    monkeypatch.setattr(f"{module}.use_cpu_cores_as_devices", lambda: calls.append("cores"))
    monkeypatch.setattr(f"{module}.load_trained", log_load)
    assert Translator.load(run_dir, checkpoint="10").search.programs.parts == jax.local_device_count() > 1
    assert calls == ["cores", "load"]
    one = Translator.load(run_dir, checkpoint="10", use_all_devices=False)
    assert one.search.programs.parts == 1 and calls == ["cores", "load", "load"]


def test_load_takes_the_final_checkpoint_or_says_what_instead(run_dir, params, warnings, config):
    loaded = Translator.load(run_dir, warn=warnings.append)  # best is wanted, but nothing was evaluated
    assert loaded.checkpoint == "last" and len(warnings) == 1
    assert "has no best checkpoint yet; using last" in warnings[0]
    checkpoints = Checkpoints(run_dir)
    checkpoints.save(20, {"params": params}, {"step": 20, "metrics": {"bleu": 5.0}})
    checkpoints.wait()
    warnings.clear()
    assert Translator.load(run_dir, warn=warnings.append).checkpoint == "best" and not warnings
    averaged = dataclasses.replace(config.train, final_checkpoint="average", average_last=2)
    save_config(dataclasses.replace(config, train=averaged), run_dir / "config.json")
    assert Translator.load(run_dir, warn=warnings.append).checkpoint == "best"
    assert "has no average checkpoint yet; using best" in warnings[0]
    warnings.clear()
    checkpoints.average(2)
    assert Translator.load(run_dir, warn=warnings.append).checkpoint == "average" and not warnings
    with pytest.raises(UserError, match="30"):  # what was asked for by name is never replaced
        Translator.load(run_dir, checkpoint="30")


def test_load_refuses_what_does_not_fit(run_dir, config, tmp_path):
    with pytest.raises(UserError, match="config.json"):
        Translator.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="search.beam_size is 0"):
        Translator.load(run_dir, search=SearchConfig(beam_size=0))
    wider = dataclasses.replace(config.model, ffn_dim=32, output_bias=False)
    save_config(dataclasses.replace(config, model=wider), run_dir / "config.json")
    with pytest.raises(UserError) as error:
        Translator.load(run_dir, checkpoint="10")
    assert "(16, 32) by the config, (16, 16) in the checkpoint" in str(error.value)
    assert "['output_bias']: absent by the config, (320,) in the checkpoint" in str(error.value)


# ---- options and constraints of a search ----


def test_prefixes_and_phrases_are_in_the_translation(
    translator, warnings, config, params, vocabs, monkeypatch
):
    """In single lines and in lines of several parts, all at once and line by line in a stream."""
    lines = ["der Hund", "", "Milch", "die Katze .", LONG, "Milch! Anna!"]
    prefixes = ["the old", "a", "", "we ", "the old", ""]
    required = [["milk"], ["cat"], ["red apples", "dog"], [], [], ["red apples"]]
    found = translator.translate(lines, prefixes=prefixes, required=required)
    next_piece = vocabs.target.pieces(found[3].tokens)[len(vocabs.target.tokenize("we")) - 1]
    assert next_piece.startswith(("\u2581", "</s>"))  # the space after "we" was kept
    assert found[0].text.startswith("the old") and "milk" in found[0].text
    assert found[1].text == "" and not found[1].satisfied
    assert "red apples" in found[2].text and "dog" in found[2].text and found[2].satisfied
    assert found[3].text.startswith("we") and found[3].satisfied
    assert found[4].parts > 2 and found[4].text.startswith("the old") and found[4].satisfied
    assert found[5].parts == 1 and found[5].satisfied and "red apples" in found[5].text
    assert [warning.split(":")[0] for warning in warnings] == ["line 5", "line 2"]
    free = translator.translate(lines)
    assert free[0].text != found[0].text and all(translation.satisfied for translation in free)
    columns = {"prefixes": iter(prefixes), "required": iter(required)}
    stream = translator.translate_stream(iter(lines), window=3, **columns)
    assert [t.text for t in stream] == [t.text for t in found]
    # With limits of nothing, a translation has the tokens that its constraints need, and at least one.
    limits = {"max_length_ratio": 0.0, "max_length_offset": 0, "batch_tokens": 14 * (12 + 3)}
    short = dataclasses.replace(config, search=dataclasses.replace(config.search, **limits))
    shortest = make_translator(short, params, vocabs, warn=warnings.append)
    shortest.search.programs = translator.search.programs  # limits are inputs of the programs
    cut = shortest.translate(
        [*lines[:4], *SENTENCES],
        prefixes=prefixes[:4] + [""] * 5,
        required=required[:4] + [[]] * 5,
    )
    assert [len(t.tokens) for t in cut[4:]] == [1] * 5
    assert len(cut[2].tokens) == 11 and cut[2].satisfied
    no_search(translator, monkeypatch)
    for count, words in ((2, "there are 2 prefixes for 3 lines"), (4, "there are more prefixes than the 3")):
        with pytest.raises(UserError, match=words):
            list(translator.translate_stream(iter(lines[:3]), prefixes=[""] * count, window=2))
        with pytest.raises(
            UserError, match=f"there are {count} prefixes for 3 lines"
        ):  # before the first one
            next(translator.translate_stream(lines[:3], prefixes=[""] * count, window=2))


def test_samples_depend_on_the_line_and_the_seed(translator_with, vocabs):
    sampling = translator_with("sample")
    together = sampling.translate([*SENTENCES, SENTENCES[0]], n_best=3)
    elsewhere = sampling.translate(["ein Hund .", *["Katze"] * 4, SENTENCES[0]], n_best=3)[-1]
    streamed = list(sampling.translate_stream([*SENTENCES, SENTENCES[0]], window=5, n_best=3))
    tokens = [[h.tokens for h in t.n_best] for t in (elsewhere, together[-1], streamed[-1], together[0])]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[3] != tokens[1]  # equal lines have different samples
    assert len({h.tokens for t in together[:5] for h in t.n_best}) > 5
    other = translator_with("sample", seed=2)
    other.search.programs = sampling.search.programs  # the seed is an input of the programs
    found = other.translate(SENTENCES, n_best=3)
    assert [t.tokens for t in found] != [t.tokens for t in together[:5]]


def test_an_ensemble_with_itself_is_the_model(
    translator_with, translator, found_by_beam, params, other_params, run_dir, warnings
):
    mixed = translator_with("ensemble")
    found = mixed.translate(SENTENCES, n_best=3)
    assert [t.tokens for t in found] != [t.tokens for t in found_by_beam]
    expected = translator.translate(SENTENCES, n_best=3, params=other_params)
    itself = mixed.translate(SENTENCES, n_best=3, params=other_params)
    # The same with both models from a run directory, of the first parameters.
    options = {"ensemble": [f"{run_dir}@10"], "use_all_devices": False, "warn": warnings.append}
    loaded = Translator.load(run_dir, checkpoint="10", **options)
    loaded.search.programs = mixed.search.programs
    by_name = loaded.translate(SENTENCES, n_best=3)
    for one, other in ((itself, expected), (by_name, found_by_beam)):
        assert [t.tokens for t in one] == [t.tokens for t in other]
        np.testing.assert_allclose([t.score for t in one], [t.score for t in other], rtol=1e-4)
    with pytest.raises(UserError, match="30"):
        Translator.load(run_dir, checkpoint="10", ensemble=[f"{run_dir}@30"])


# ---- long lines ----


def parts_of(translator, lines):
    """The texts that lines are divided into."""
    return [part.text for line in translator.engine().read(list(map(Request, lines))) for part in line.parts]


LONG = "Der Hund schläft . Anna kauft Milch , wir lesen ein Buch und die Katze schläft ."


def test_long_lines_are_translated_in_parts(translator, warnings, vocabs):
    parts = parts_of(translator, [LONG])
    assert len(parts) > 2 and "".join(parts) == LONG
    own = translator.translate([part.strip() for part in parts])
    warnings.clear()
    other, joined, blank = translator.translate(["Milch", LONG, ""])
    assert joined.text == " ".join(t.text for t in own if t.text)
    assert joined.tokens == tuple(token for t in own for token in t.tokens)
    assert joined.parts == len(parts) and (other.parts, blank.parts) == (1, 1) and not joined.truncated
    np.testing.assert_allclose(joined.log_prob, sum(t.log_prob for t in own), rtol=1e-4)
    np.testing.assert_allclose(joined.score, sum(t.score for t in own), rtol=1e-4)
    assert warnings == [
        "line 2: longer than data.max_source_length 12 tokens, so translated in parts, which are joined again"
    ]


# ---- annotations ----


def test_notes_are_those_of_the_translations(translator):
    lines, both = [*SENTENCES, "", LONG], Annotations(token_log_probs=True, alignments="words")
    plain = translator.translate(lines, n_best=3)
    noted = translator.translate(lines, n_best=3, annotations=both)
    pieces = translator.translate(lines, n_best=3, annotations=Annotations(alignments="pieces"))
    assert all(t.token_log_probs is None and t.alignment is None for t in plain)
    for line, one, two, three in zip(lines, plain, noted, pieces, strict=True):
        for bare, with_notes, by_pieces in zip(one.n_best, two.n_best, three.n_best, strict=True):
            assert (bare.text, bare.tokens) == (with_notes.text, with_notes.tokens)
            assert len(with_notes.token_log_probs) == len(bare.tokens)
            np.testing.assert_allclose(sum(with_notes.token_log_probs), bare.log_prob, rtol=1e-4, atol=1e-4)
            words = bare.text.split()
            assert len({j for _, j in with_notes.alignment}) == len(with_notes.alignment) <= len(words)
            assert all(0 <= i < len(line.split()) and 0 <= j < len(words) for i, j in with_notes.alignment)
            eos = translator.vocabs.target.eos_id
            written = [token for token in bare.tokens if token != eos]
            assert [j for _, j in by_pieces.alignment] == list(range(len(written)))
    assert noted[-2].token_log_probs == () and noted[-2].alignment == ()


def test_a_description_tells_models_apart(config, params, other_params, vocabs, translator):
    again = make_translator(config, params, vocabs).describe()
    assert again == translator.describe()
    other = make_translator(config, other_params, vocabs).describe()
    assert {name for name in other if other[name] != again[name]} == {"parameters"}
