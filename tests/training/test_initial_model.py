"""Runs that start from another run: its network, vocabulary and parameters, on other data."""

import dataclasses
import io
import shutil
from fnmatch import fnmatch
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_up_text import write_text
from tiny_experiment import change

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import LoraConfig
from flaxformer_mt.config.files import read_config
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs import load_run
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_named
from flaxformer_mt.training.initial_model import adopt_network, map_pieces, move_pieces, start_run
from flaxformer_mt.training.loop import fit


def tables(run, *names):
    return [flatten_tree(jax.device_get(load_named(f"{run}@{name}").params)) for name in names]


@pytest.mark.slow  # the next test goes on from another run, and test_frozen.py freezes parts
def test_a_run_goes_on_from_another_one_with_frozen_parts(tiny_run, tiny_config, tmp_path, capsys):
    """Checkpoint 0 is the other model; frozen parameters stay, the others change; it resumes as any run.

    It has another rate of dropout than the other model.
    """
    run = tmp_path / "fine"
    flags = ["train", f"--run={run}", f"--init={tiny_run}@last", "--config.train.steps=8"]
    flags += ["--config.optim.freeze=encoder,*embedding", "--config.optim.warmup_steps=2"]
    flags += ["--config.train.evaluate_every=8", "--config.model.dropout_rate=0.2"]
    assert main(flags) == 0
    err = capsys.readouterr().err
    assert f"starting from the imported model (run, {tiny_run}@last)" in err
    assert "are trained; the others are frozen" in err
    config = read_config(run / "config.json")
    assert config.train.steps == 8 and config.data == tiny_config.data  # without --config: those of the run
    assert config.model == dataclasses.replace(tiny_config.model, dropout_rate=0.2)
    (base,) = tables(tiny_run, "last")
    start, end = tables(run, "0", "8")
    for path, leaf in base.items():
        np.testing.assert_array_equal(start[path], leaf)
        frozen = path.startswith("encoder/") or path.endswith("_embedding/embedding")
        assert np.array_equal(end[path], leaf) == frozen, path
    assert (run / "vocab" / "joint.model").read_bytes() == (tiny_run / "vocab" / "joint.model").read_bytes()
    assert main(["train", f"--run={run}"]) == 0 and main(flags) == 0
    assert "is finished, at step 8 of 8" in capsys.readouterr().err
    assert main([flag.replace("@last", "@32") for flag in flags]) == 2
    assert f"started from {tiny_run}@last, not from {tiny_run}@32" in capsys.readouterr().err


def test_low_rank_changes_of_another_run_are_trained(tiny_run, tmp_path, capsys):
    """The run has the base model's parameters, as they were, and factors; all commands use them merged."""
    run = tmp_path / "adapted"
    flags = [f"--init={tiny_run}@last", "--config.optim.lora.rank=2", "--config.optim.lora.targets=decoder"]
    flags += ["--config.optim.lora.also_train=encoder/*norm", "--config.optim.warmup_steps=2"]
    flags += ["--config.train.evaluate_every=8", "--config.train.checkpoint_every=4"]
    flags += ["--config.data.test_split=none"]
    assert main(["train", f"--run={run}", *flags, "--config.train.steps=8"]) == 0
    err = capsys.readouterr().err
    assert "; changes of matrices: 10 of rank 2" in err
    stored = read_arrays(run, 8)
    shutil.rmtree(run / "checkpoints" / "8")
    (run / "report.json").unlink()
    assert main(["train", f"--run={run}"]) == 0
    for path, leaf in read_arrays(run, 8).items():  # resumed: the same bits, in the optimizer's state too
        np.testing.assert_array_equal(leaf, stored[path], err_msg=path)
    moments = {path.split("/mu/")[1] for path in stored if "/mu/" in path}
    assert len(moments) == 2 * 10 + 2 * 3 and all(
        path.startswith(("lora/decoder/", "encoder/")) for path in moments
    )
    (base,) = tables(tiny_run, "last")
    start, end = tables(run, "0", "8")
    for path, leaf in base.items():
        np.testing.assert_array_equal(start[path], leaf)
        trained = fnmatch(path, "decoder/*/kernel") or fnmatch(path, "encoder/*norm/*")
        assert np.array_equal(end[path], leaf) != trained, path
        if not path.startswith("encoder/"):
            np.testing.assert_array_equal(stored[f"ema_params/{path}"], leaf)
    assert base.keys() == end.keys()
    before = tables(run, "4")[0]
    assert main(["average", f"--run={run}", "--last=2"]) == 0
    for path, leaf in tables(run, "average")[0].items():  # the mean of products, not the product of means
        np.testing.assert_allclose(leaf, (before[path] + end[path]) / 2, rtol=1e-5, atol=1e-7)
    assert main(["train", f"--run={run}", "--config.train.steps=8", "--config.optim.lora.alpha=3"]) == 2
    assert "optim.lora.alpha: 16.0 -> 3.0" in capsys.readouterr().err


def read_arrays(run, step):
    from flaxformer_mt import atomic_folder
    from flaxformer_mt.runs import array_files

    folder = Checkpoints(run).resolve(step)
    metadata = atomic_folder.read_metadata(folder)["trees"]
    return {
        f"{name}/{path}": leaf
        for name, specs in metadata.items()
        for path, leaf in array_files.read_item(folder / name, specs).items()
    }


def test_the_network_is_that_of_the_other_run(tiny_run, tiny_config, tmp_path):
    """Other sizes in the config are replaced and named; dropout and the way it is run are not."""
    model, vocab = {"num_heads": 4, "dropout_rate": 0.3}, {"size": 50, "sampling": 0.1}
    config = change(tiny_config, model=model, vocab=vocab)
    with pytest.warns(FlaxformerWarning, match=r"replaced: vocab.size: 50 -> 40, model.num_heads: 4 -> 2"):
        adopted = start_run(config, tmp_path / "run", str(tiny_run))
    assert adopted.model == dataclasses.replace(tiny_config.model, dropout_rate=0.3)
    assert adopted.vocab == dataclasses.replace(tiny_config.vocab, sampling=0.1)
    assert read_config(tmp_path / "run" / "config.json") == adopted
    assert not list(tmp_path.glob(".*.new"))
    assert adopt_network(config, tiny_config, new_vocab=True).vocab == config.vocab


def test_a_killed_start_leaves_no_run(tiny_run, tiny_config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as context:
        context.setattr(
            load_run, "write_checkpoint", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            start_run(tiny_config, run, str(tiny_run))
    assert not run.exists()
    start_run(tiny_config, run, str(tiny_run))
    assert Checkpoints(run).steps() == [0]


def test_a_new_vocabulary_keeps_the_parameters_of_pieces_of_both(tiny_run, tiny_config, tmp_path):
    """Two letters more in the new text: they are new pieces; each row of the others is that of the old id."""
    text = tmp_path / "text"
    text.mkdir()
    for seed, split in enumerate(("train", "valid", "test"), start=7):
        write_text(text, split, 48 if split == "train" else 6, seed=seed)
    for side in ("xx", "yy"):
        path = text / f"train.{side}"
        path.write_text(path.read_text().replace("a", "q"))
    train = {"steps": 2, "evaluate_every": 2, "patience": 0}
    config = change(tiny_config, data={"text_dir": str(text)}, train=train)
    said = io.StringIO()
    started = start_run(config, tmp_path / "run", str(tiny_run), new_vocab=True, progress=said)
    assert start_run(config, tmp_path / "run", str(tiny_run), new_vocab=True) == started
    assert fit(started, tmp_path / "run")["step"] == 2
    old, new = load_named(str(tiny_run)), load_named(f"{tmp_path / 'run'}@0")
    found = map_pieces(old.vocabs.source, new.vocabs.source)
    assert 4 < (found >= 0).sum() < new.vocabs.source.size
    (line,) = said.getvalue().splitlines()
    assert line.startswith(f"{(found >= 0).sum()} of {new.vocabs.source.size} subwords start with the param")
    pieces = new.vocabs.source.pieces(range(new.vocabs.source.size))
    before, after = (flatten_tree(jax.device_get(one.params)) for one in (old, new))
    path = "shared_embedding/embedding"
    for number, origin in enumerate(found):
        same = np.array_equal(after[path][number], before[path][origin])
        assert same == (origin >= 0), pieces[number]
    assert all(np.array_equal(after[name], before[name]) for name in before if name != path)


def test_untied_matrices_move_by_side():
    """Columns of the output matrix and its bias follow the target vocabulary."""

    class Pieces:
        unk_id, bos_id, eos_id, pad_id = 0, 1, 2, 3

        def __init__(self, *names):
            self.names = ["?", "<s>", "</s>", "<pad>", *names]
            self.size = len(self.names)

        def pieces(self, ids):
            return [self.names[number] for number in ids]

    class Swapped(Pieces):
        unk_id, bos_id, eos_id, pad_id = 3, 2, 1, 0

    names = {"source_embedding": (6, 2), "target_embedding": (5, 2)}
    params = {name: {"embedding": np.arange(np.prod(shape)).reshape(shape)} for name, shape in names.items()}
    params |= {"output_kernel": np.arange(10).reshape(2, 5), "output_bias": np.arange(5), "norm": np.ones(2)}
    fresh = (
        {"source_embedding": {"embedding": np.full((5, 2), -1)}}
        | {"target_embedding": {"embedding": np.full((6, 2), -1)}}
        | {"output_kernel": np.full((2, 6), -1), "output_bias": np.full(6, -1), "norm": np.zeros(2)}
    )
    old = SimpleNamespace(source=Pieces("a", "b"), target=Pieces("c"))
    new = SimpleNamespace(source=Swapped("b"), target=Pieces("d", "c"))
    moved = move_pieces(params, fresh, old, new)
    assert moved["source_embedding"]["embedding"][:, 0].tolist() == [6, 4, 2, 0, 10]
    assert moved["target_embedding"]["embedding"][:, 0].tolist() == [0, 2, 4, 6, -1, 8]
    assert moved["output_kernel"].tolist() == [[0, 1, 2, 3, -1, 4], [5, 6, 7, 8, -1, 9]]
    assert moved["output_bias"].tolist() == [0, 1, 2, 3, -1, 4] and moved["norm"].tolist() == [1, 1]


def test_wrong_starts_end_with_one_line(tiny_run, tiny_config, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("")
    for flags, message in (
        ([f"--run={tmp_path / 'new'}", "--init=/nowhere"], "/nowhere is not a run directory"),
        ([f"--run={tmp_path / 'new'}", f"--init={tiny_run}@7"], "7"),
        ([f"--run={run}", f"--init={tiny_run}"], "is not an empty folder"),
        ([f"--run={tiny_run}", f"--init={tiny_run}"], "started from random parameters, not from"),
        ([f"--init={tiny_run}"], "give its directory as --run=DIR"),
        ([f"--run={tmp_path / 'new'}", "--new_vocab"], "--new_vocab needs the run"),
        (
            [f"--run={tmp_path / 'new'}", f"--init={tiny_run}", "--config.optim.lora.alpha=8"],
            "lora.rank is 0",
        ),
        (
            [f"--run={tmp_path / 'two'}", f"--init={tiny_run}", "--config.optim.lora.rank=17"],
            "optim.lora.rank is 17, but",
        ),
    ):
        assert main(["train", *flags]) == 2
        (line,) = capsys.readouterr().err.strip().split("\n")
        assert line.startswith("error: ") and message in line, line
    assert not (tmp_path / "new").exists()
    config = change(tiny_config, optim={"lora": LoraConfig(rank=2)})
    with pytest.raises(UserError, match="random parameters, which are not worth freezing"):
        fit(config, tmp_path / "new")
    config = change(tiny_config, data={"max_source_length": 6000})
    with pytest.raises(UserError, match="max_positions"):
        start_run(config, tmp_path / "new", str(tiny_run))
