"""`distil --teacher_scores` and training on its scores: probabilities, interruptions, batches, refusals."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_experiment import change

from flaxformer_mt.commands import score_targets
from flaxformer_mt.commands.main import main
from flaxformer_mt.config.checks import validate
from flaxformer_mt.corpus.reader import read_pairs
from flaxformer_mt.corpus.score_files import open_score_file
from flaxformer_mt.data.batch_array import make_batch
from flaxformer_mt.data.batching import plan_epoch
from flaxformer_mt.data.token_store import TokenStore
from flaxformer_mt.errors import UserError
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.shapes import Batch
from flaxformer_mt.vocab import load_vocabs

K = 4


def command(run: Path, text: Path, output: Path, *flags: str) -> list[str]:
    given = [f"--run={run}", f"--input={text / 'train.xx'}", f"--output={output}", f"--teacher_scores={K}"]
    return ["distil", *given, "--copies", "--max_repetitions=9", "--method=greedy", *flags]


@pytest.fixture(scope="module")
def made(tiny_run, tiny_text, tmp_path_factory):
    """A folder of pairs with scores of `tiny_run`, in chunks of 25 pairs."""
    folder = tmp_path_factory.mktemp("scores") / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_targets, "_CHUNK", 25)
        assert main(command(tiny_run, tiny_text, folder)) == 0
    return folder


def rows_of(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "train.tsv").read_text().split("\n")[:-1]]


def test_scores_are_the_probabilities_of_the_model(made, tiny_run):
    """Of the k most probable tokens at each position of a target, by the whole forward pass."""
    file, trained = open_score_file(made / "train.scores"), load_trained(tiny_run)
    assert len(file) == len(rows_of(made)) > 25 and file.top_k == K
    assert file.vocabulary == trained.vocabs.target.fingerprint
    model = trained.make_model()
    chosen = np.flatnonzero(np.diff(file.offsets))[[0, -1]].tolist()
    sides = [
        [getattr(trained.vocabs, side).tokenize(rows_of(made)[row][number]) for row in chosen]
        for number, side in enumerate(("source", "target"))
    ]
    lengths = [max(map(len, ids)) for ids in sides]
    source, target = (np.zeros((2, length), np.int32) for length in lengths)
    for row in range(2):
        source[row, : len(sides[0][row])], target[row, : len(sides[1][row])] = sides[0][row], sides[1][row]
    masks = [
        np.arange(length) < [[len(one)] for one in ids] for length, ids in zip(lengths, sides, strict=True)
    ]
    target_in = np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=trained.vocabs.target.bos_id)
    batch = Batch(source, target_in, target, *masks)
    logits = jax.jit(lambda p: model.apply({"params": p}, batch, deterministic=True))(trained.params)
    probs = np.asarray(jax.nn.softmax(logits))
    for number, row in enumerate(chosen):
        own = slice(file.offsets[row], file.offsets[row + 1])
        assert file.ids[own].shape == (len(sides[1][number]), K)
        expected = -np.sort(-probs[number], axis=1)[: own.stop - own.start, :K]
        np.testing.assert_allclose(file.probs[own].astype(float), expected, atol=1e-3)
        length = own.stop - own.start
        found = np.take_along_axis(probs[number, :length], file.ids[own].astype(int), axis=1)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    report = json.loads((made / "report.json").read_text())["teacher_scores"]
    assert report["tokens"] == len(file.ids) and 0.3 < report["covered"] < 1


def test_a_killed_command_goes_on_with_the_same_bytes(
    made, tiny_run, tiny_text, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(score_targets, "_CHUNK", 25)
    write, written = score_targets.write_part, []

    def die_at_the_second(path, *arguments, **options):
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, *arguments, **options)

    monkeypatch.setattr(score_targets, "write_part", die_at_the_second)
    again = command(tiny_run, tiny_text, tmp_path / "out", "--resume")
    assert main(again) == 130
    assert not (tmp_path / "out" / "report.json").exists()  # the sign that all is done
    monkeypatch.setattr(
        score_targets, "write_part", lambda path, *a, **o: written.append(path.name) or write(path, *a, **o)
    )
    assert main(again) == 0
    assert written == ["000000.npz", "000001.npz", "000002.npz"][: len(written)] and len(written) > 1
    for name in ("train.scores", "train.tsv", "report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (made / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in made.iterdir()
    )
    capfd.readouterr()
    assert main([*again, "--teacher_scores=3"]) == 2
    error = capfd.readouterr().err
    assert (
        "train.scores was made with other teacher_scores; give --overwrite" in error
        and error.count("\n") == 1
    )


def student_config(config, made: Path, run: Path, **sections):
    data = {"text_dir": str(made), "teacher_scores": ("train.scores",), **sections.pop("data", {})}
    changed = change(
        config, data=data, train={"teacher_weight": 0.5, **sections.pop("train", {})}, **sections
    )
    model = str(run / "vocab" / "joint.model")
    return dataclasses.replace(changed, vocab=dataclasses.replace(changed.vocab, source_model=model))


@pytest.mark.parametrize("batching", ["bucket", "pack"])
def test_each_token_of_a_batch_has_its_own_scores(batching, made, tiny_run, tiny_config):
    config = student_config(tiny_config, made, tiny_run, data={"batching": batching})
    vocabs, file = load_vocabs(tiny_run / "vocab"), open_score_file(made / "train.scores")
    pairs = read_pairs(config.data, "train")
    store = TokenStore.build(pairs, vocabs, made.parent / "stores")
    lengths = store.source_lengths, store.target_lengths
    plan = plan_epoch(*lengths, config=config.data, seed=1, epoch=0)
    array = make_batch(store, plan[0], pad_id=vocabs.target.pad_id, bos_id=vocabs.target.bos_id)
    batch = array.to_batch(np)
    assert batch.teacher is not None
    assert batch.teacher.ids.shape == (*batch.target_out.shape, K)
    assert not batch.teacher.probs[~batch.target_mask].any()
    position = (
        batch.target_positions
        if batching == "pack"
        else np.broadcast_to(np.arange(batch.target_out.shape[1]), batch.target_out.shape)
    )
    texts: dict[tuple[int, ...], list[int]] = {}
    for row, pair in zip(pairs.locate(np.arange(len(pairs)))[1], pairs, strict=True):
        texts.setdefault(tuple(vocabs.target.tokenize(pair.target)), []).append(row)
    scored = 0
    for row, column in np.argwhere(batch.target_mask & (position == 0)):
        length = 1 + int(np.argmax(batch.target_out[row, column:] == vocabs.target.eos_id))
        own = (row, slice(column, column + length))
        expected = [
            (file.ids[start:end], file.probs[start:end])
            for start, end in (file.offsets[n : n + 2] for n in texts[tuple(batch.target_out[own].tolist())])
        ]
        found = batch.teacher.ids[own], batch.teacher.probs[own]
        if found[1].any():
            assert any(all(map(np.array_equal, found, one)) for one in expected)
            scored += 1
        else:
            assert any(not len(ids) for ids, _ in expected)
    assert scored > 1


def test_scores_of_other_vocabularies_and_texts_are_refused(made, tiny_run, tiny_config, tmp_path):
    vocabs = load_vocabs(tiny_run / "vocab")
    config = student_config(tiny_config, made, tiny_run)
    pairs = read_pairs(config.data, "train")
    scores = pairs.columns["teacher"]
    (scored,) = scores.sets

    def refuse(**changes):
        scores.sets = (dataclasses.replace(scored, **changes),)
        with pytest.raises(UserError) as error:
            TokenStore.build(pairs, vocabs, tmp_path / "stores")
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "has scores of the target vocabulary abc, but this training has" in refuse(vocabulary="abc")
    assert "has scores of other targets than the text, first in row 1;" in refuse(checks=scored.checks + 1)
    lengths = np.diff(scored.offsets)
    lengths[[2, 3]] += (1, -1)
    moved = np.concatenate([[0], np.cumsum(lengths)])
    assert "first in row 3;" in refuse(offsets=moved)
    # A row without scores may have any text.
    first = int(scored.offsets[1])
    parts = {name: getattr(scored, name)[first:] for name in ("ids", "probs")}
    offsets = np.maximum(scored.offsets - first, 0)
    checks = scored.checks + (np.arange(len(scored.checks)) == 0).astype(scored.checks.dtype)
    scores.sets = (dataclasses.replace(scored, offsets=offsets, checks=checks, **parts),)
    assert len(TokenStore.build(pairs, vocabs, tmp_path / "others")) == len(pairs)


def test_files_that_are_no_scores_are_refused_in_one_line(made, tmp_path, tiny_run, tiny_config):
    whole = (made / "train.scores").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    damaged = {
        "empty": b"",
        "text": b"0.5 0.25\n" * 100,
        "cut": whole[:-3],
        "header": whole[: length // 2],
        "format": whole.replace(b"teacher scores 1", b"teacher scores 9"),
        "offsets": whole[:length] + bytes(8) + (10**9).to_bytes(8, "little") + whole[length + 16 :],
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            UserError, match=f"{name} is no file of teacher scores: .*; make it again"
        ) as error:
            open_score_file(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"there are no teacher scores .*absent \(data.teacher_scores\)"):
        open_score_file(tmp_path / "absent")
    shutil.copytree(made, tmp_path / "more")
    with (tmp_path / "more" / "train.tsv").open("a") as file:
        file.write("a\tb\n")
    config = student_config(tiny_config, tmp_path / "more", tiny_run)
    with pytest.raises(UserError, match="has scores of .* rows, but .* training pairs; make them again"):
        read_pairs(config.data, "train")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"teacher_scores": ()}},
            "train.teacher_weight is 0.5, but data.teacher_scores names no file",
        ),
        ({"train": {"teacher_weight": 0.0}}, "data.teacher_scores is a, but train.teacher_weight is 0"),
        ({"train": {"teacher_weight": 1.5}}, "train.teacher_weight is 1.5; it must be from 0.* to 1"),
        ({"vocab": {"sampling": 0.1}}, "vocab.sampling is 0.1, which gives targets other tokens"),
        ({"data": {"teacher_scores": ("a", "b")}}, "data.teacher_scores has 2 names for 1 data sets"),
        ({"data": {"teacher_scores": ("gs://b/a",)}}, "data.teacher_scores: "),
    ],
)
def test_settings_that_cannot_be_are_named(sections, message, tiny_config):
    valid = change(tiny_config, data={"teacher_scores": ("a",)}, train={"teacher_weight": 0.5})
    validate(valid)
    with pytest.raises(UserError, match=message) as error:
        validate(change(valid, **sections))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scores", ["0", "-1", "1000"])
def test_numbers_of_tokens_that_cannot_be_are_refused(scores, tiny_run, tiny_text, tmp_path, capfd):
    assert main([*command(tiny_run, tiny_text, tmp_path / "out"), f"--teacher_scores={scores}"]) == 2
    error = capfd.readouterr().err
    assert f"--teacher_scores is {scores}; it must be from 1 to " in error and error.count("\n") == 1


def test_a_teacher_that_is_not_there_is_named(tiny_text, tmp_path, capfd):
    assert main(command(tmp_path / "nowhere", tiny_text, tmp_path / "out")) == 2
    error = capfd.readouterr().err
    assert f"{tmp_path / 'nowhere'} is not a run directory" in error and error.count("\n") == 1
