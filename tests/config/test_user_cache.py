"""The cache folder of users with a home folder, and of those without."""

import os
import pwd

import pytest

from flaxformer_mt.config import DataConfig, files
from flaxformer_mt.config.files import user_cache_dir
from flaxformer_mt.corpus.tfds_cache import cache_dir, tfds_dir
from flaxformer_mt.errors import FlaxformerWarning, UserError, local_path


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
    assert tfds_dir(DataConfig()) == folder / "tensorflow_datasets"
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
    assert user_cache_dir() == tmp_path / "home" / ".cache" / "flaxformer_mt"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "home")
    with pytest.warns(FlaxformerWarning, match="has no home folder"):
        assert user_cache_dir() == tmp_path / f"flaxformer_mt-{os.getuid()}"
    (tmp_path / "home" / ".cache" / "flaxformer_mt").mkdir(parents=True)
    assert user_cache_dir() == tmp_path / "home" / ".cache" / "flaxformer_mt", "a cache that is there is read"


def test_a_file_is_no_cache_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UserError, match=f"^data.cache_dir {file} is a file; set it to a folder$"):
        cache_dir(DataConfig(cache_dir=str(file)))
