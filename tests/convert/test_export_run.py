"""Export and import as commands: what is written, what is checked, and that failures leave nothing behind."""

import copy
import dataclasses
import io
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from test_document_formats import SHALLOW, TINY
from tiny_experiment import text_data, write_untrained_run

from flaxformer_mt.commands.main import main
from flaxformer_mt.config import (
    Config,
    OptimConfig,
    ParallelConfig,
    SearchConfig,
    TrainConfig,
    VocabConfig,
)
from flaxformer_mt.config.files import read_config, save_config
from flaxformer_mt.convert import export_run as exporting
from flaxformer_mt.convert import import_run as importing
from flaxformer_mt.convert.export_run import export_run
from flaxformer_mt.convert.formats import NAMES
from flaxformer_mt.convert.import_run import import_run
from flaxformer_mt.convert.papers import handbuilt as handbuilt
from flaxformer_mt.corpus.pairs import Pair
from flaxformer_mt.errors import FlaxformerWarning, UserError
from flaxformer_mt.parameter_trees import flatten_tree
from flaxformer_mt.runs.checkpoints import Checkpoints
from flaxformer_mt.runs.load_run import load_trained
from flaxformer_mt.runs.run_directory import check_run
from flaxformer_mt.tracking import read_metrics
from flaxformer_mt.training.loop import fit
from flaxformer_mt.translation.translator import Translator

LENGTHS = {"max_source_length": 12, "max_target_length": 12}
WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "acht": "eight"}


def sentences():
    names = list(WORDS)
    return [Pair(f"{a} {b}", f"{WORDS[a]} {WORDS[b]}") for a in names for b in names]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory of an untrained hand-built model, with text of its own."""
    root = tmp_path_factory.mktemp("runs")
    text = root / "text"
    text.mkdir()
    pairs = sentences()
    for split, chosen in {"train": pairs, "valid": pairs[:9]}.items():
        for side, language in [("source", "de"), ("target", "en")]:
            lines = "".join(f"{getattr(pair, side)}\n" for pair in chosen)
            (text / f"{split}.{language}").write_text(lines, encoding="utf-8")
    config = Config(
        data=text_data(text, cache_dir=str(root / "cache"), batch_tokens=96, num_shapes=1, **LENGTHS),
        vocab=VocabConfig(kind="char", size=22, joint=True, byte_fallback=False),
        model=dataclasses.replace(TINY, **SHALLOW, first_position=1, dropout_rate=0.0),
        optim=OptimConfig(schedule="constant", warmup_steps=0),
        train=TrainConfig(steps=3, evaluate_every=9, checkpoint_every=2, tensorboard=False),
        parallel=ParallelConfig(data=1),
        search=SearchConfig(method="greedy", beam_size=1, max_length_ratio=1.0, max_length_offset=4),
    )
    return write_untrained_run(root / "run", config, pairs)


def params_of(folder):
    trained = load_trained(folder, warn=lambda message: None)
    return {path: np.asarray(leaf) for path, leaf in flatten_tree(trained.params).items()}


def arrays_of(checkpoint):
    folder = checkpoint / "params"
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("exported") / "handbuilt"
    result = export_run(run, format_name="handbuilt", output=output)
    return output, result


def test_an_export_is_checked_on_the_runs_own_data(exported):
    output, result = exported
    assert result["largest_difference"] < 1e-5
    assert (result["format"], result["checkpoint"], result["step"]) == ("handbuilt", "best", 7)
    assert result["checked_on"] == "9 pairs of the valid set"
    assert result["target_tokens"] > 9
    files = ["README.md", "config.json", "state_dict.pt", "vocab/source.model", "vocab/target.model"]
    assert result["files"] == files
    assert json.loads((output / "config.json").read_text())["flaxformer_mt"]["step"] == 7
    assert not list(output.parent.glob(".*")), "nothing is left beside the export"


def test_an_export_replaces_nothing_but_its_own_folder(run, tmp_path):
    kept = [tmp_path / "mine.partial", tmp_path / ".new.importing"]
    for folder in kept:
        folder.mkdir()
        (folder / "precious.txt").write_text("data")
    export_run(run, format_name="handbuilt", output=tmp_path / "mine")
    import_run(tmp_path / "mine", format_name="handbuilt", run_dir=tmp_path / "new")
    assert {*tmp_path.iterdir()} == {*kept, tmp_path / "mine", tmp_path / "new"}
    assert [(folder / "precious.txt").read_text() for folder in kept] == ["data", "data"]


def test_of_two_exports_to_one_folder_the_first_to_end_stays_whole(run, tmp_path, monkeypatch):
    output, write = tmp_path / "out", exporting.write_checked

    def write_after_another(*arguments):
        monkeypatch.setattr(exporting, "write_checked", write)
        export_run(run, format_name="handbuilt", output=output)
        return write(*arguments)

    monkeypatch.setattr(exporting, "write_checked", write_after_another)
    with pytest.raises(UserError, match=r"out cannot be written: Directory not empty; give another"):
        export_run(run, format_name="handbuilt", output=output)
    assert (output / "README.md").is_file() and list(tmp_path.iterdir()) == [output]


def test_search_options_that_the_files_do_not_carry_are_said(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    config = read_config(folder / "config.json")
    search = dataclasses.replace(config.search, no_repeat_ngram=3, suppress=("d",))
    save_config(dataclasses.replace(config, search=search), folder / "config.json")
    message = "the files of format handbuilt do not carry search.suppress=d and search.no_repeat_ngram=3; "
    with pytest.warns(FlaxformerWarning, match=f"^{message}"):
        export_run(folder, format_name="handbuilt", output=tmp_path / "out")


def test_an_import_is_the_same_run(run, exported, tmp_path):
    result = import_run(exported[0], format_name="handbuilt", run_dir=tmp_path / "again")
    assert result["largest_difference"] < 1e-5
    assert read_config(tmp_path / "again" / "config.json") == read_config(run / "config.json")
    ours, theirs = params_of(run), params_of(tmp_path / "again")
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=path)
    lines = ["eins drei", "acht vier"]
    first, second = (
        Translator.load(folder, use_all_devices=False, warn=print) for folder in (run, tmp_path / "again")
    )
    expected = [t.text for t in first.translate(lines)]
    second.search.programs = first.search.programs  # of one config: compiled once
    assert [t.text for t in second.translate(lines)] == expected


def test_an_import_opens_no_data_set(exported, tmp_path):
    """A foreign config must not choose which files are read, written or downloaded."""
    folder = shutil.copytree(exported[0], tmp_path / "foreign")
    facts = json.loads((folder / "config.json").read_text())
    data = {"cache_dir": str(tmp_path / "cache"), "dataset": "toy_de_en"}
    facts["flaxformer_mt"]["config"]["data"] |= data
    (folder / "config.json").write_text(json.dumps(facts))
    result = import_run(folder, format_name="handbuilt", run_dir=tmp_path / "run")
    assert result["checked_on"].startswith("random tokens") and result["largest_difference"] < 1e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foreign", "run"]


def test_an_imported_run_trains_further_under_another_recipe(exported, tmp_path):
    run_dir = tmp_path / "tuned"
    import_run(exported[0], format_name="handbuilt", run_dir=run_dir)
    config = read_config(run_dir / "config.json")
    before = params_of(run_dir)
    tuned = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, learning_rate=1e-5, ema_decay=0.9),
        train=dataclasses.replace(
            config.train,
            final_checkpoint="last",
            average_last=1,
            keep_checkpoints=1,
            checkpoint_every=1,
            best_metric="loss",
        ),
    )
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, ffn_dim=16))
    with pytest.raises(UserError, match="model.ffn_dim: 12 -> 16"):
        check_run(run_dir, wider)
    base, shown = arrays_of(run_dir / "checkpoints" / "0"), io.StringIO()
    report = fit(tuned, run_dir, progress=shown)
    assert f"starting from the imported model (handbuilt, {exported[0]})" in shown.getvalue()
    assert report["step"] == 3
    # the imported model is scored before the first update, can be the best, and is kept
    scored = [record for record in read_metrics(run_dir) if record["split"] == "valid"]
    assert [record["step"] for record in scored] == [0, 3]
    best = min(scored, key=lambda record: (record["loss"], record["step"]))
    assert report["best"] == {"step": best["step"], "loss": best["loss"]}
    checkpoints = Checkpoints(run_dir, best_metric="loss")
    assert checkpoints.steps() == [0, 3] and checkpoints.best() == best["step"]
    progress = checkpoints.restore(0, {})[1]
    assert progress["metrics"]["loss"] == scored[0]["loss"] and progress["imported_from"]
    assert arrays_of(run_dir / "checkpoints" / "0") == base
    after = params_of(run_dir)
    moved = {path: np.abs(after[path] - before[path]).max() for path in before}
    assert max(moved.values()) > 0
    assert max(moved.values()) < 1e-3, "training began from other parameters"
    with pytest.raises(UserError, match="optim.learning_rate"):
        check_run(run_dir, config)  # from its first own checkpoint on, it is a run like any other


def test_data_that_cannot_be_read_is_said(run, tmp_path):
    copy = tmp_path / "moved"
    shutil.copytree(run, copy)
    config = read_config(copy / "config.json")
    data = dataclasses.replace(config.data, text_dir=str(tmp_path / "gone"), cache_dir=str(tmp_path / "c"))
    save_config(dataclasses.replace(config, data=data), copy / "config.json")
    result = export_run(copy, format_name="handbuilt", output=tmp_path / "out")
    assert result["checked_on"].startswith("random tokens instead of data: ")
    assert result["largest_difference"] < 1e-5


def test_a_difference_leaves_nothing_behind(run, tmp_path, monkeypatch):
    for error, shown in ((np.nan, "inf"), (0.01, r"0\.01\d*")):
        wrong = dataclasses.replace(
            handbuilt.FORMAT,
            open=lambda *path, e=error: lambda batch: handbuilt.FORMAT.open(*path)(batch) + e,
        )
        monkeypatch.setattr(exporting, "find_format", lambda *names, wrong=wrong: wrong)
        with pytest.raises(UserError, match=f"differs from the Flax model by {shown} in logits, more than"):
            export_run(run, format_name="handbuilt", output=tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    result = export_run(run, format_name="handbuilt", output=tmp_path / "out", tolerance=0.1)
    assert 0.009 < result["largest_difference"] < 0.011


def test_what_a_format_cannot_express_is_named(run, tmp_path, capsys):
    assert main(["export", f"--run={run}", "--format=kokoyi", f"--output={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "kokoyi cannot express this model: model.attention_bias is True; supported: False" in message
    assert "model.first_position is 1; supported: 0" in message
    assert not (tmp_path / "out").exists()


def test_mistakes_cost_one_message(run, exported, tmp_path, capsys):
    model = exported[0]
    for line, expected in (
        (f"export --run={run} --format=handbuild --output={tmp_path}/o", "did you mean handbuilt?"),
        (
            f"export --run={run} --format=handbuilt --output={tmp_path}/o --quantization=int8",
            "handbuilt has no --quantization=int8; it has: none",
        ),
        (
            f"export --run={run} --format=handbuilt --output={tmp_path}/o --shortlist=s",
            "handbuilt has no file for --shortlist=s; leave",
        ),
        (f"export --run={run} --format=handbuilt --output={model}", "exists and is not an empty folder"),
        (f"import --format=handbuilt --input={tmp_path}/no --run={tmp_path}/new", "does not exist"),
        (f"import --format=handbuilt --input={model} --run={run}", "exists and is not an empty folder"),
        (f"import --format=handbuilt --input={tmp_path} --run={tmp_path}/new", "give --config=FILE"),
    ):
        assert main(line.split()) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and expected in message and "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_a_given_config_is_checked_as_any_other(run, exported, tmp_path, monkeypatch):
    state = exported[0] / "state_dict.pt"
    given = {"config": read_config(run / "config.json"), "vocab": run / "vocab"}
    wrong = dataclasses.replace(
        handbuilt.FORMAT, open=lambda *path: lambda batch: handbuilt.FORMAT.open(*path)(batch) + 0.01
    )
    monkeypatch.setattr(importing, "find_format", lambda *names: wrong)
    for vocab in (given, {"vocab": run / "vocab"}):
        with pytest.raises(UserError, match=r"differs from .*state_dict.pt by 0\.01\d* in logits, more than"):
            import_run(state, format_name="handbuilt", run_dir=tmp_path / "new", **vocab)
    assert not (tmp_path / "new").exists()
    result = import_run(state, format_name="handbuilt", run_dir=tmp_path / "new", **given, tolerance=0.1)
    assert 0.009 < result["largest_difference"] < 0.011 and result["tokens"] > 9
    expected = params_of(run)
    assert result["parameters"] == sum(leaf.size for leaf in expected.values())
    for path, leaf in params_of(tmp_path / "new").items():
        np.testing.assert_array_equal(leaf, expected[path])


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch: sparse, nested and quantized tensors are prototypes
def test_tensors_that_are_no_plain_arrays_are_refused_by_name(exported, tmp_path):
    """Each claims something that the file does not hold, or a conversion that would change its values."""
    name = "encoder.layers.0.enc_self_attn.W_Q.bias"
    folder = shutil.copytree(exported[0], tmp_path / "foreign")
    state = torch.load(folder / "state_dict.pt", weights_only=True)
    plain = state[name]

    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    for tensor, words in [
        (plain.to_sparse(), "has the layout torch.sparse_coo"),
        (torch.nested.nested_tensor([plain, plain]), "has the layout nested"),
        (plain.to(torch.complex64), "has the type torch.complex64"),
        (plain.to(torch.int32), "has the type torch.int32"),
        (torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), "has the type torch.qint8"),
        (plain.to("meta"), "has no data"),
        (torch.zeros(1, dtype=torch.float16).expand(10**12), "has 2000000000000 bytes, but the file has"),
        ("text", "it must contain named tensors"),
        (Harm(), "it must contain named tensors"),
    ]:
        torch.save(state | {name: tensor}, folder / "state_dict.pt")
        with pytest.raises(UserError, match=re.escape(words)):
            import_run(folder, format_name="handbuilt", run_dir=tmp_path / "run")
    with zipfile.ZipFile(folder / "state_dict.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("archive/data/0", bytes(1 << 24))
    with pytest.raises(UserError, match="claims to unpack to 16777216"):
        import_run(folder, format_name="handbuilt", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "harm").exists()


def test_networks_that_the_files_cannot_hold_are_refused_at_once(exported, tmp_path):
    folder = shutil.copytree(exported[0], tmp_path / "foreign")
    stored = json.loads((folder / "config.json").read_text())
    for changes, words in [
        ({"num_decoder_layers": 900}, "model.num_decoder_layers 900"),
        ({"model_dim": 10**12}, "model.model_dim is 1000000000000; it must be from 1 to 65536"),
        ({"ffn_dim": 10**6}, "model.ffn_dim 1000000 make more than 16000000 parameters, but the files"),
    ]:
        facts = copy.deepcopy(stored)
        facts["flaxformer_mt"]["config"]["model"] |= changes
        (folder / "config.json").write_text(json.dumps(facts))
        with pytest.raises(UserError, match=re.escape(words)):
            import_run(folder, format_name="handbuilt", run_dir=tmp_path / "run")
    for change, words in [
        (
            {"arguments": stored["arguments"] | {"d_ff": 10**12}},
            "d_ff is 1000000000000, but the config implies",
        ),
        ({"arguments": None}, "does not describe the arguments of the foreign model"),
        ({"flaxformer_mt": []}, "its entry flaxformer_mt has no config"),
        ({"flaxformer_mt": {"config": 3}}, "its entry flaxformer_mt has no config"),
    ]:
        (folder / "config.json").write_text(json.dumps(stored | change))
        with pytest.raises(UserError, match=re.escape(words)):
            import_run(folder, format_name="handbuilt", run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_that_is_missing_is_asked_for(run, exported, tmp_path):
    with pytest.raises(UserError, match="give --vocab=DIR"):
        folder = tmp_path / "bare"
        folder.mkdir()
        (folder / "state_dict.pt").write_bytes((exported[0] / "state_dict.pt").read_bytes())
        import_run(
            folder, format_name="handbuilt", run_dir=tmp_path / "new", config=read_config(run / "config.json")
        )


def test_every_format_has_its_row_in_the_page():
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page[: page.index("\n\nInstall ")], re.M)
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(NAMES)
