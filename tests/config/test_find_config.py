"""Every file of configs/ loads, is valid, survives JSON, says how to run it, and its model can be traced."""

import dataclasses
import json
import os
import pwd
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import flaxformer_mt
from flaxformer_mt.commands.show import longest_batch
from flaxformer_mt.config import DataConfig, files
from flaxformer_mt.config import files as recipes
from flaxformer_mt.config.checks import validate
from flaxformer_mt.config.files import from_dict, load_config, read_config, to_dict, user_cache_dir
from flaxformer_mt.corpus.tfds_cache import cache_dir, tfds_dir
from flaxformer_mt.errors import FlaxformerWarning, UserError, local_path
from flaxformer_mt.model import make_model

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("[!_]*.py"))


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def path(request):
    return request.param


def test_loads_validates_and_survives_json(path):
    config = load_config(path)
    validate(config)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    # A trial of a few updates, whatever warm-up the recipe has.
    validate(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=20)))


def test_says_how_to_run_it_and_is_found_by_name_from_anywhere(path, tmp_path, monkeypatch):
    documentation = path.read_text(encoding="utf-8").split('"""')[1]
    named = re.search(rf"--config=(configs/)?{path.stem}\b", documentation)
    assert (named or path.stem == recipes.DEFAULT_CONFIG) and "train.py" in documentation
    monkeypatch.chdir(tmp_path)
    assert recipes.find_config(path.stem).samefile(path) and recipes.find_config(path.name).samefile(path)


def test_model_can_be_traced(path):
    """With one layer, to which all others are equal."""
    config = load_config(path)
    size, own = config.vocab.size or 97, config.model
    layers = {"num_encoder_layers": min(1, own.num_encoder_layers), "num_decoder_layers": 1}
    model = make_model(dataclasses.replace(own, **layers), source_size=size, target_size=size)
    batch = longest_batch(config).to_batch(np)

    def run(key, batch):
        return model.init_with_output(key, batch, deterministic=True)

    logits, variables = jax.eval_shape(run, jax.random.key(0), batch)
    assert logits.shape == (*batch.target_in.shape, size)
    assert logits.dtype == "float32"
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(variables))


def test_wmt_recipes_are_the_papers():
    base, big = (load_config(CONFIGS[0].with_name(f"wmt14_en_de_{size}.py")) for size in ("base", "big"))
    for config in (base, big):
        assert (config.optim.b1, config.optim.b2, config.optim.epsilon) == (0.9, 0.98, 1e-9)
        assert (config.optim.schedule, config.optim.warmup_steps) == ("noam", 4000)
        assert (config.search.beam_size, config.search.length_penalty) == (4, 0.6)
        assert config.train.label_smoothing == 0.1
    sizes = ("model_dim", "ffn_dim", "num_heads", "dropout_rate")
    assert [getattr(base.model, name) for name in sizes] == [512, 2048, 8, 0.1]
    assert [getattr(big.model, name) for name in sizes] == [1024, 4096, 16, 0.3]
    assert (base.train.steps, base.train.average_last) == (100_000, 5)
    assert (big.train.steps, big.train.average_last) == (300_000, 20)


def test_a_folder_brings_no_code_unless_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs"
    folder.mkdir()
    for name in ("ted_pt_en", recipes.DEFAULT_CONFIG, "mine"):
        (folder / f"{name}.py").write_text("raise SystemExit('it is run')")
    for name in ("ted_pt_en", "ted_pt_en.py"):
        with pytest.warns(FlaxformerWarning, match=r"for the file of this folder give --config=configs/ted"):
            assert recipes.find_config(name).parent == CONFIGS[0].parent
    with pytest.warns(FlaxformerWarning, match=r"for the file of this folder"):
        assert recipes.choose_config(None, None)[0] == load_config(CONFIGS[0].with_name("toy_de_en.py"))
    assert recipes.find_config("configs/ted_pt_en.py").samefile(folder / "ted_pt_en.py")
    assert recipes.find_config("mine").samefile(folder / "mine.py")
    file = tmp_path / "ted_pt_en"
    file.write_text("")
    assert recipes.find_config("ted_pt_en").samefile(file)


def test_a_run_directory_gives_its_own_config(tmp_path):
    from flaxformer_mt.config.files import save_config

    config = load_config(CONFIGS[0])
    assert recipes.choose_config(CONFIGS[0].stem, None) == (config, Path("runs") / CONFIGS[0].stem)
    run = tmp_path / "run"
    assert recipes.choose_config(CONFIGS[0].stem, str(run)) == (config, run)
    run.mkdir()
    changed = from_dict(to_dict(config) | {"seed": 77})
    save_config(changed, run / "config.json")
    assert recipes.choose_config(None, str(run)) == (changed, run)
    assert recipes.choose_config(CONFIGS[0].stem, str(run)) == (config, run)
    new = tmp_path / "new"
    assert recipes.choose_config(None, str(new), base=run) == (changed, new)
    assert recipes.choose_config(None, str(run), base=new) == (changed, run)
    assert recipes.choose_config(None, str(new), base=new)[0] == load_config(recipes.find_config("toy_de_en"))
    with pytest.warns(FlaxformerWarning, match=r"rum does not exist: .* toy_de_en; did you mean .*run\?"):
        recipes.choose_config(None, str(tmp_path / "rum"))
    new.with_suffix(".py").write_text("")
    with pytest.raises(UserError, match=r"has not been started; give its config: --config=.*new\.py"):
        recipes.choose_config(None, str(new))


def test_the_name_of_a_run_may_have_a_checkpoint_and_the_name_of_a_folder_an_at(tmp_path):
    folder = tmp_path / "me@home"
    assert recipes.split_checkpoint(str(folder)) == (str(tmp_path / "me"), "home")
    folder.mkdir()
    assert recipes.split_checkpoint(str(folder)) == (str(folder), None)
    assert recipes.split_checkpoint(f"{folder}@best") == (str(folder), "best")
    for name, found in (
        ("runs/a", ("runs/a", None)),
        ("runs/a@1500", ("runs/a", "1500")),
        ("gs://bucket/a@last", ("gs://bucket/a", "last")),
        ("s3://me@host/runs/a", ("s3://me@host/runs/a", None)),
        ("@best", ("@best", None)),
    ):
        assert recipes.split_checkpoint(name) == found


def test_a_config_file_may_change_a_recipe(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import dataclasses\n"
        "from flaxformer_mt.config import Config\n"
        "from flaxformer_mt.config.files import load_config\n"
        "def get_config() -> Config:\n"
        f"    return dataclasses.replace(load_config({str(CONFIGS[0])!r}), seed=77)\n",
        encoding="utf-8",
    )
    config = flaxformer_mt.load_config(file)
    assert config == dataclasses.replace(flaxformer_mt.load_config(CONFIGS[0].stem), seed=77)


def test_a_folder_is_no_config_and_a_file_no_run(tmp_path, monkeypatch):
    folder, file = tmp_path / "mine.py", tmp_path / "file"
    folder.mkdir()
    file.write_text("text")
    with pytest.raises(UserError, match=f"^config {folder} is a folder, not a config file; give the path"):
        recipes.load_config(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^config mine\.py is a folder, not a config file; .*`new` writes"):
        recipes.load_config("mine.py")
    with pytest.raises(UserError, match=f"^{file} is a file, not a directory; give another --run=DIR$"):
        recipes.choose_config(None, str(file))
    with pytest.raises(UserError, match=f"^{file} is no folder, so no run directory; give another"):
        read_config(file / "config.json")


def test_the_config_of_something_else_is_named(tmp_path):
    """A folder of `export` has a config.json too, and so have many other programs."""
    path = tmp_path / "config.json"
    path.write_text('{"flaxformer_mt": {"format": "ctranslate2"}, "unk_token": "<unk>"}')
    with pytest.raises(UserError, match=f"^{tmp_path} is an exported model, not a run directory; give"):
        read_config(path)
    path.write_text('{"unk_token": "<unk>"}')
    with pytest.raises(UserError, match=f"^{path}: unknown config field config.unk_token"):
        read_config(path)


# ---- user cache ----
@pytest.fixture(autouse=True)
def no_variables(monkeypatch, tmp_path):
    for name in ("FLAXFORMER_MT_CACHE", "TFDS_DATA_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    files._temporary_cache.cache_clear()
    yield
    files._temporary_cache.cache_clear()


def test_a_user_without_home_and_entry_has_a_temporary_folder(monkeypatch, tmp_path):
    def no_entry(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.warns(FlaxformerWarning, match="has no home folder to write to: .* set another cache"):
        folder = user_cache_dir()
    assert folder == tmp_path / f"flaxformer_mt-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    assert user_cache_dir() == folder, "without a second warning, which would be an error"
    assert tfds_dir() == folder / "tensorflow_datasets"
    with pytest.raises(UserError, match="^~/run: Could not determine home directory. Give the path without"):
        local_path("~/run")
    # Compiled programs are executed: a folder that others may write to is refused.
    folder.chmod(0o777)
    files._temporary_cache.cache_clear()
    with pytest.raises(UserError, match=f"{folder} is not a folder of this user alone; .*FLAXFORMER_MT"):
        user_cache_dir()


def test_a_home_in_which_nothing_can_be_made_counts_as_none(monkeypatch, tmp_path):
    """Docker sets HOME=/ for a user that has no entry."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "home")
    with pytest.warns(FlaxformerWarning, match="has no home folder"):
        assert user_cache_dir() == tmp_path / f"flaxformer_mt-{os.getuid()}"
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    folder = user_cache_dir()
    assert folder == tmp_path / "home" / ".cache" / "flaxformer_mt" and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "home")
    assert user_cache_dir() == folder, "a cache that is there is read"


def test_a_file_is_no_cache_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UserError, match=f"^data.cache_dir {file} is a file; set it to a folder$"):
        cache_dir(DataConfig(cache_dir=str(file)))
