"""Stages of training: their file, what an epoch of each draws, and that any position can be resumed."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from tiny_experiment import text_data

from flaxformer_mt.config import (
    Config,
    NoiseConfig,
    OptimConfig,
    StageConfig,
    TrainConfig,
    VocabConfig,
)
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.config.stage_mixes import read_stages
from flaxformer_mt.corpus import read_pairs
from flaxformer_mt.corpus.opustrainer_file import read_curriculum
from flaxformer_mt.corpus.pairs import Part
from flaxformer_mt.data import text_noise
from flaxformer_mt.data.curriculum import (
    BEGINNING,
    Curriculum,
    Position,
    format_stages,
    make_curriculum,
    plan_stages,
)
from flaxformer_mt.data.epoch_stores import EpochStores
from flaxformer_mt.data.loader import train_batches
from flaxformer_mt.data.text_noise import TextNoise
from flaxformer_mt.data.tokenization import Drawing
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.vocab import make_vocabs
from flaxformer_mt.vocab.model_file import SPACE

STAGES = (
    StageConfig("start", mix=("small 0.8", "large 0.2"), until="small 2"),
    StageConfig("middle", mix=("large 3", "small 1"), until="steps 3", noise=NoiseConfig(upper_case=0.5)),
    StageConfig("end", mix=("large 1",), until="large 1"),
)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("text")
    for name, size, word in (("small", 20, "aa"), ("large", 30, "bb")):
        (folder / name).mkdir()
        for language in ("xx", "yy"):
            lines = [f"{word} {'cd' * (n % 4)} {n}\n" for n in range(size)]
            (folder / name / f"train.{language}").write_text("".join(lines), encoding="utf-8")
    sets = ",".join(f"parallel_text@{folder / name}" for name in ("small", "large"))
    sizes = {"max_source_length": 30, "max_target_length": 30, "batch_tokens": 240, "num_shapes": 2}
    data = text_data(folder, "xx-yy", dataset=sets, stages=STAGES, **sizes)
    return Config(seed=3, data=data, optim=OptimConfig(accumulation=2), train=TrainConfig(steps=1000))


@pytest.fixture(scope="module")
def pairs(config):
    return read_pairs(config.data, "train")


@pytest.fixture(scope="module")
def stores(config, pairs, tmp_path_factory) -> EpochStores:
    folder = tmp_path_factory.mktemp("stores")
    vocabs = make_vocabs(VocabConfig(size=290), pairs, folder)
    return EpochStores(pairs, vocabs, folder, Drawing(0.0, 3), varies=True)


def take(stores, config, start=BEGINNING, number=None):
    batches = train_batches(
        stores, config.data, seed=3, pad_id=0, bos_id=1, start=start, accumulation=config.optim.accumulation
    )
    try:
        return [(position, batch.to_batch(np)) for position, batch in itertools.islice(batches, number)]
    finally:
        batches.close()


def make_curriculum_of(*shares: float, sizes=(10, 7), epochs=None) -> Curriculum:
    stage = read_stages(
        dataclasses.replace(
            Config().data,
            dataset="a,b",
            stages=(StageConfig("s", tuple(f"{name} {x}" for name, x in zip("ab", shares, strict=True))),),
        )
    )[0]
    parts = [Part(name, size, 1.0) for name, size in zip("ab", sizes, strict=True)]
    return Curriculum([stage._replace(epochs=epochs)], parts, seed=-1)


def test_sets_go_on_where_they_stopped_until_each_pair_has_been_seen():
    """Of 10 pairs all in each epoch; of 7, in the ratio 3 to 1, three or four, and all 7 in two to three."""
    curriculum = make_curriculum_of(0.75, 0.25)
    epochs = [curriculum.draw(Position(n, 0, 0, n)) for n in range(21)]
    assert all(sorted(epoch[epoch < 10]) == [*range(10)] for epoch in epochs)
    assert len({tuple(epoch[epoch < 10]) for epoch in epochs}) == 21
    others = np.concatenate([epoch[epoch >= 10] for epoch in epochs])
    assert len(others) == 70  # 21 * 10 / 3
    for turn in range(10):
        assert sorted(others[7 * turn : 7 * turn + 7]) == [*range(10, 17)]
    again = make_curriculum_of(0.75, 0.25)
    assert np.array_equal(again.draw(Position(9, 0, 0, 9)), epochs[9])


def test_training_goes_through_the_stages_and_ends_with_the_last(stores, config):
    whole = take(stores, config)
    positions = [position for position, _ in whole]
    assert positions[-1].stage == 3 and positions[-1].index == 0
    of_stage = [BEGINNING.stage, *(position.stage for position in positions[:-1])]
    assert of_stage == sorted(of_stage)
    assert of_stage.count(1) == 3 * config.optim.accumulation
    rows = [0, 0, 0]
    for stage, (_, batch) in zip(of_stage, whole, strict=True):
        rows[stage] += int(batch.source_mask[:, 0].sum())
    assert rows[0] == 2 * 20 + 10 and rows[2] == 30
    assert len({(*batch.source.shape, batch.target_in.shape[1]) for _, batch in whole}) <= 2


def test_every_position_can_be_resumed(stores, config):
    whole = take(stores, config)
    for done, (position, _) in enumerate(whole, start=1):
        rest = take(stores, config, position)
        assert [place for place, _ in rest] == [place for place, _ in whole[done:]]
        for (_, one), (_, other) in zip(rest, whole[done:], strict=True):
            assert np.array_equal(one.source, other.source) and np.array_equal(one.target_in, other.target_in)


def test_a_stage_with_noise_has_the_drawn_pairs_with_noise(stores, config, pairs):
    drawn = np.array([49, 3, 3, 20])
    store, where = stores.draw(7, drawn, NoiseConfig(upper_case=1.0))
    vocab = stores._vocabs.source
    texts = [vocab.detokenize(store[index][0]) for index in where]
    assert texts == [" ".join(pairs[index].source.upper().split()) for index in (3, 3, 20, 49)]
    again, _ = stores.draw(7, drawn, NoiseConfig(upper_case=1.0))
    assert again is store
    clean, same = stores.draw(8, drawn, NoiseConfig())
    assert clean is stores.base and same is drawn


def test_the_report_says_what_each_stage_has(stores, config):
    report = plan_stages(config, stores)
    start, middle, end = report
    assert (start["from_update"], start["epochs"], middle["updates"], end["epochs"]) == (1, 2, 3, 1)
    assert middle["from_update"] == 1 + start["updates"]
    # Two batches an update.
    assert start["updates"] == -(-start["batches"]["batches"] * 2 // 2)
    assert [one["share"] for one in middle["mix"]] == [0.25, 0.75]
    lines = format_stages(report)
    assert lines[0].startswith("stage 1 of 3, start: 80.0% parallel_text@")
    assert lines[0].endswith(f", from about step 1 for {start['updates']} steps")
    assert lines[1].endswith(" for 3 steps; noise: upper_case 0.5")
    short = dataclasses.replace(config, train=TrainConfig(steps=1))
    assert "not reached within train.steps" in format_stages(plan_stages(short, stores))[2]


def test_the_report_is_the_same_for_all_seeds(stores, config):
    """So that batches without padding have the same sizes, and a sweep over seeds compiles once."""
    others = [dataclasses.replace(config, seed=seed) for seed in range(5)]

    def draw(other):
        curriculum = make_curriculum(other.data, stores.base.parts, seed=other.seed, accumulation=2)
        return tuple(sorted(curriculum.draw(BEGINNING)))

    assert len(set(map(draw, others))) > 1  # training draws other pairs
    report = plan_stages(config, stores)
    assert all(plan_stages(other, stores) == report for other in others)


def test_a_stage_without_a_pair_that_fits_is_refused(stores, config):
    stage = config.replace({"data.stages": (StageConfig("s", ("large 1",)),)})
    lengths = stores.base.source_lengths
    before = lengths[20:].copy()
    lengths[20:] = 31
    try:
        with pytest.raises(UserError, match="epoch 1 of stage s has 30 pairs, none of which"):
            take(stores, stage, number=1)
    finally:
        lengths[20:] = before


# ---- opustrainer file ----
CURRICULUM = """
datasets:
  clean: corpora/clean.gz     # by its name
  medium: corpora/m/train.tsv.gz
stages: [start, end]
start:
- clean 0.8
- medium 0.2
- until clean 2
end:
- medium 1
- until medium inf
modifiers:
- UpperCase: 0.05
- TitleCase: 0.04
- RemoveEndPunct: 0.2
- Typos: 0.3
num_fields: 2
"""


def write(folder, text: str) -> str:
    path = folder / "curriculum.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_curriculum_becomes_the_stages_of_a_config(tmp_path):
    stages = read_curriculum(write(tmp_path, CURRICULUM))
    noise = NoiseConfig(upper_case=0.05, title_case=0.04, end_punctuation=0.2, typos=0.3)
    assert stages == (
        StageConfig("start", ("clean 0.8", "parallel_text@corpora/m 0.2"), "clean 2", noise),
        StageConfig("end", ("parallel_text@corpora/m 1",), "parallel_text@corpora/m inf", noise),
    )
    sets = "parallel_text@data/clean,parallel_text@corpora/m:de-en"
    config = Config().replace({"data.dataset": sets, "data.stages": stages})
    validate(config)
    read = read_stages(config.data)
    assert [(one.shares, one.counted, one.epochs, one.steps) for one in read] == [
        ((0.8, 0.2), 0, 2, None),
        ((0, 1), 1, None, None),
    ]
    save_config(config, tmp_path / "config.json")  # a run is repeated without the file
    assert read_config(tmp_path / "config.json") == config


def test_without_modifiers_the_noise_is_that_of_the_config(tmp_path):
    text = "datasets: {a: a, b: b}\nstages: [s]\ns: [a 1, until a 1]\nseed: 1111\n"
    with pytest.warns(FlaxformerWarning, match="no effect here: seed"):
        assert read_curriculum(write(tmp_path, text)) == (StageConfig("s", ("a 1",), "a 1"),)
        for none in ("False", "{common: []}", "{common: }"):
            (stage,) = read_curriculum(write(tmp_path, f"{text}modifiers: {none}\n"))
            assert stage.noise == NoiseConfig()
    for nothing in ("0", "''", "[{}]"):
        with pytest.raises(UserError, match="without a probability"):
            read_curriculum(write(tmp_path, f"{text}modifiers: {nothing}\n"))


WRONG = {
    "stages: [start, end]": ("", "no list of stages"),
    "num_fields: 2": ("num_fields: 4", "num_fields 4"),
    "start:\n": ("begin:\n", "has begin, which is neither a stage"),
    "end:\n": ("end: 5\nother:\n", "other"),
    "- UpperCase: 0.05": (
        "- Retokenize: 0.05",
        "the modifier Retokenize; supported are UpperCase, TitleCase",
    ),
    "- TitleCase: 0.04": ("- TitleCase: 1.5", "TitleCase: 1.5; it must be a probability from 0 to 1"),
    "- Typos: 0.3": ("- Typos: yes", "Typos: True"),
    "Typos: 0.3": ("Typos: 0.3\n  char_swap: 0.5", "char_swap: 0.5 in Typos; it has no options here"),
    "- RemoveEndPunct: 0.2": ("- UpperCase: 0.2", "the modifier UpperCase twice"),
    "RemoveEndPunct: 0.2": ("Merge: 0.2", "the modifier Merge; supported are UpperCase, TitleCase"),
    "- medium 0.2": ("- medum 0.2", "medum in stage start, which is not a data set (clean, medium)"),
    "- clean 0.8": ("- clean", "'clean' in stage start; write NAME SHARE"),
    "- medium 0.2\n": ("- until medium 1\n", "'until medium 1' in stage start"),
    "- until clean 2": ("- until clean", "'clean' in stage start"),
    "- medium 1\n- until medium inf\n": ("", "no mix in stage end"),
    "  clean: corpora/clean.gz": ("  clean: 3", "the data set clean: 3"),
    "datasets:\n": ("datasets: [\n", "is not YAML"),
}


@pytest.mark.parametrize("part", WRONG)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, part):
    assert part in CURRICULUM
    wrong, message = WRONG[part]
    with pytest.raises(UserError) as error:
        read_curriculum(write(tmp_path, CURRICULUM.replace(part, wrong, 1)))
    assert message in str(error.value) and "curriculum.yaml" in str(error.value)
    assert "\n" not in str(error.value)


ALIGNED = "0-0 1-1 2-2 3-3"
# As those of Firefox's pipeline, whose paths and seeds its scripts write: a teacher and a student.
TEACHER = """
datasets:
  original: {dataset0}
  backtranslated: {dataset1}
curriculum:
  one-stage:
    stages: [train]
    train: [original 0.7, backtranslated 0.3, until original inf]
  two-stage:
    stages: [pretrain, finetune]
    pretrain: [original 0.6, backtranslated 0.4, until backtranslated 2]
    finetune: [original 1.0, until original inf]
modifiers:
  common:
    - RemoveEndPunct: 0.2
    - Noise: 0.0005
      min_word_length: 2
      max_word_length: 5
      max_words: 6
    - Tags: 0.005
      custom_detok_src: "icu:{src}"
      custom_detok_trg: "icu:{trg}"
      spm_vocab_src: {vocab_src}
      augment: 1
      tag: 0
  bicameral_src:
    - UpperCase: 0.07
    - TitleCase: 0.05
  phonemic_src:
    - Typos: 0.05
seed: {seed}
num_fields: 3
"""


def test_firefox_curricula_run_as_they_are(tmp_path):
    path = write(tmp_path, TEACHER)
    with pytest.warns(FlaxformerWarning) as warned:
        first, last = read_curriculum(f"{path}#two-stage")
    texts = [str(one.message) for one in warned]
    assert any("no effect here: seed" in text for text in texts)
    assert any("no effect here: custom_detok_src, custom_detok_trg, spm_vocab_src" in text for text in texts)
    assert any(
        "modifiers of bicameral_src and phonemic_src are used for any script" in text for text in texts
    )
    assert first.mix == ("original 0.6", "backtranslated 0.4") and last.until == "original inf"
    assert first.noise == last.noise == FIREFOX_NOISE
    for wrong, message in (
        (path, "the curricula one-stage, two-stage; choose one as FILE#NAME"),
        (f"{path}#x", "one-stage"),
    ):
        with pytest.raises(UserError, match=message):
            read_curriculum(wrong)
    for part, other, message in (
        ("max_words: 6", "max_words: 4", "has max_words: 4 in Noise; supported are min_word_length: 2, max_"),
        ("augment: 1", "augment: 0.5", "has augment: 0.5 in Tags; supported are augment: 1, tag: 0"),
        ("augment: 1", "", "has augment: 0 in Tags"),
        ("augment: 1", "template: x", "has augment: 0 in Tags"),
        ("tag: 0", "template: x", "has template: 'x' in Tags"),
    ):
        with pytest.raises(UserError, match=message), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read_curriculum(write(tmp_path, TEACHER.replace(part, other)) + "#one-stage")


FIREFOX_NOISE = NoiseConfig(
    end_punctuation=0.2, random_text=0.0005, inline=0.005, upper_case=0.07, title_case=0.05, typos=0.05
)


def test_a_store_has_added_words_and_their_links(tmp_path, monkeypatch):
    """The whole way: a file of alignments, words in the text, links between pieces, which are words here."""
    monkeypatch.setattr(text_noise, "make_words", lambda chance: ["wort1", "wort2"])
    for name, line in (
        ("train.de", "das ist wort{} ."),
        ("train.en", "this is wort{} ."),
        ("train.align", ALIGNED),
    ):
        (tmp_path / name).write_text("".join(f"{line.format(n)}\n" for n in range(3)), encoding="utf-8")
    noise = NoiseConfig(inline=1.0)
    pairs = read_pairs(text_data(tmp_path, alignments=("train.align",), noise=noise), "train")
    vocabs = make_vocabs(VocabConfig(kind="word", size=0), pairs, tmp_path / "vocabs")
    store = EpochStores(pairs, vocabs, tmp_path / "stores", Drawing(0.0, 3, TextNoise(noise))).store(1)
    source, target = (
        vocab.pieces(ids[:-1].tolist())
        for vocab, ids in zip((vocabs.source, vocabs.target), store[0], strict=True)
    )
    added = ["wort1", "wort2"]
    sources = ["das", *added, "ist", *added, "wort0", "."]
    targets = ["this", *added, "is", *added, "wort0", "."]
    assert source == [f"{SPACE}{word}" for word in sources]
    assert target == [f"{SPACE}{word}" for word in targets]
    links, _ = store.columns["alignment"]._links.take(np.array([0]))
    linked = [(sources[link >> 16], targets[link & 0xFFFF]) for link in links.tolist()]
    assert linked == list(zip(sources, targets, strict=True))


def test_a_file_that_is_none_is_refused(tmp_path):
    for text, message in (("", "is no curriculum"), ("- a", "is no curriculum"), ("a: !x 1", "not YAML")):
        with pytest.raises(UserError, match=message):
            read_curriculum(write(tmp_path, text))
    for path in (tmp_path, tmp_path / "absent.yaml"):
        with pytest.raises(UserError, match=r"data\.stages: .* cannot be read"):
            read_curriculum(path)
