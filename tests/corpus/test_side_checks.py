"""Sides that are swapped, shifted or in another language are found where they begin; parallel text is not."""

import random

import numpy as np
import pytest

from flaxformer_mt.commands.main import main
from flaxformer_mt.corpus.pairs import Pair, Part
from flaxformer_mt.corpus.side_checks import (
    compare_sequences,
    count_sequences,
    describe_side_problems,
    find_shift,
    find_side_problems,
)

ENGLISH = "the house dog sees a man who walks with her to market and then reads this letter".split()
GERMAN = "das haus hund sieht ein mann der geht mit ihr zu markt und dann liest diesen brief wieder".split()
GREEK = "το σπίτι σκύλος βλέπει ένας άντρας που πηγαίνει με αυτή στην αγορά και μετά διαβάζει γράμμα".split()


def make_pairs(number, words=(GERMAN, ENGLISH), seed=1):
    """Pairs of the same numbers of words, more or less."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(number):
        length = rng.randint(1, 20)
        sides = [" ".join(rng.choices(own, k=max(1, length + rng.randint(-1, 1)))) for own in words]
        pairs.append(Pair(*sides))
    return pairs


class Split:
    """Data sets one after the other, as `Pairs` has them."""

    def __init__(self, *sets, languages=("de", "en")):
        self.sets, self.languages = sets, (languages,) * len(sets)
        self.parts = tuple(Part(f"set{number}", len(pairs), 1.0) for number, pairs in enumerate(sets))

    def read_range(self, part, positions):
        return [self.sets[part][position] for position in positions]


TRAIN = make_pairs(4000)
VALID = make_pairs(300, seed=2)


def swap(pairs):
    return [Pair(target, source) for source, target in pairs]


def shift(pairs, lines):
    """Gives each source the target that is some lines later; those without one are left out."""
    sources, targets = zip(*pairs, strict=True)
    if lines < 0:
        return list(map(Pair, sources[-lines:], targets))
    return list(map(Pair, sources, targets[lines:]))


def test_parallel_text_has_no_findings():
    splits = {"train": Split(TRAIN, VALID), "valid": Split(VALID), "test": Split(make_pairs(50, seed=3))}
    assert find_side_problems(splits) == []
    assert find_side_problems({"train": Split(make_pairs(20))}) == []
    same = [Pair("ein haus", "a house")] * 500
    assert find_side_problems({"train": Split(same), "valid": Split(same)}) == []
    by_length = sorted(TRAIN, key=lambda pair: len(pair.source))
    assert find_side_problems({"train": Split(by_length)}) == []


def test_a_swapped_set_is_found():
    (finding,) = find_side_problems(
        {"train": Split(TRAIN), "valid": Split(VALID), "test": Split(swap(VALID))}
    )
    assert (finding.split, finding.problem, finding.blocks, finding.of) == ("test", "swapped", 2, 2)
    (warning,) = describe_side_problems([finding])
    assert "source and target of the test set set0 look swapped, compared with the training set" in warning
    assert repr(VALID[0].target[:50]) in warning


def test_a_swapped_part_of_the_training_set_is_found():
    mixed = TRAIN[:3000] + swap(TRAIN[3000:])
    (finding,) = find_side_problems({"train": Split(mixed), "valid": Split(VALID)})
    assert (finding.problem, finding.blocks, finding.of) == ("swapped", 5, 20)
    assert finding.first == 3001
    assert "look swapped in 5 of 20 places" in describe_side_problems([finding])[0]


@pytest.mark.parametrize("lines", [-3, -1, 1, 2, 3])
def test_a_shift_is_found_with_its_direction(lines):
    assert find_shift(shift(VALID, lines)) == -lines
    # One line is lost in the middle of a file: everything after it is shifted.
    late = TRAIN[:2000] + shift(TRAIN[2000:], lines)
    (finding,) = find_side_problems({"train": Split(late), "valid": Split(VALID)})
    assert (finding.problem, finding.shift, finding.split) == ("shifted", -lines, "train")
    assert 1990 < finding.first <= 2300 and 9 <= finding.blocks <= 11
    (warning,) = describe_side_problems([finding])
    order = "before" if lines > 0 else "after"
    assert f"{abs(lines)} line{'s' * (abs(lines) > 1)} {order} them" in warning


def test_shifts_are_those_of_the_largest_correlation():
    """Against numpy's correlation of each shift, one by one."""
    pairs = shift(VALID, 2)
    lengths = np.log1p([[len(side) for side in pair] for pair in pairs])
    found = {
        lines: np.corrcoef(lengths[3:-3, 0], np.roll(lengths[:, 1], -lines)[3:-3])[0, 1]
        for lines in range(-3, 4)
    }
    assert max(found, key=found.get) == find_shift(pairs) == -2
    assert abs(found[0]) < 0.3 < 0.8 < found[-2]


@pytest.mark.parametrize(("side", "name"), [(0, "sources"), (1, "targets")])
def test_another_language_is_found(side, name):
    words = [GERMAN, ENGLISH]
    words[side] = GREEK
    wrong = make_pairs(300, words, seed=4)
    (finding,) = find_side_problems({"train": Split(TRAIN), "valid": Split(wrong)})
    assert finding.problem == name[:-1]
    (warning,) = describe_side_problems([finding])
    assert f"the {name} of the valid set set0 look like another language" in warning
    assert repr(wrong[0][0][:50]) in warning
    # The same language on both sides.
    copied = [Pair(pair.target, pair.target) for pair in VALID]
    (finding,) = find_side_problems({"train": Split(TRAIN), "valid": Split(copied)})
    assert finding.problem == "source"


def test_directions_are_compared_by_language():
    """In a model of several directions the sides of one are those of the other, exchanged."""
    both = Split(TRAIN, swap(TRAIN))
    both.languages = (("de", "en"), ("en", "de"))
    valid = Split(VALID, swap(VALID))
    valid.languages = both.languages
    assert find_side_problems({"train": both, "valid": valid}) == []
    wrong = Split(VALID, VALID)
    wrong.languages = both.languages
    (finding,) = find_side_problems({"train": both, "valid": wrong})
    assert (finding.name, finding.problem) == ("set1", "swapped")


def test_a_language_model_has_targets_alone():
    texts = [Pair("", pair.target) for pair in TRAIN]
    split = Split(texts, languages=("", "en"))
    assert find_side_problems({"train": split, "valid": split}) == []
    german = Split([Pair("", pair.source) for pair in VALID], languages=("", "en"))
    (finding,) = find_side_problems({"train": split, "valid": german})
    assert finding.problem == "target"


def test_sequences_by_hand():
    assert count_sequences(["Ab, c"]) == {" ab": 1, "ab ": 1, "b c": 1, " c ": 1}
    assert count_sequences(["我是我。"]) == {"我": 2, "是": 1}
    one, other = count_sequences(["我是"]), count_sequences(["我我我是是是是"])
    assert compare_sequences(one, other) == pytest.approx(7 / (2**0.5 * 5))
    assert compare_sequences(one, count_sequences([])) == 0


def test_prepare_warns_with_an_example(tmp_path, capfd):
    for split, pairs in (("train", TRAIN), ("valid", swap(VALID))):
        for side, language in enumerate(("de", "en")):
            text = "".join(f"{pair[side]}\n" for pair in pairs)
            (tmp_path / f"{split}.{language}").write_text(text)
    data = {"text_dir": tmp_path, "cache_dir": tmp_path / "cache", "dataset": "parallel_text"}
    flags = [f"--config.data.{name}={value}" for name, value in data.items()]
    flags += ["--config.vocab.size=300", f"--run={tmp_path / 'run'}", "--json"]
    assert main(["prepare", "--config=toy_de_en", *flags]) == 0
    found = capfd.readouterr()
    assert "warning: source and target of the valid set parallel_text look swapped" in found.err
    assert '"problem": "swapped"' in found.out
