"""Text in an object store: what of it is fetched."""

import pytest
from failing_store import hurry, new_bucket
from tiny_experiment import change

from flaxformer_mt.commands.main import main
from flaxformer_mt.corpus.store_text import copy_text
from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.filesystem import ObjectStore


def test_texts_weights_and_alignments_are_fetched_and_nothing_else(
    tiny_config, tmp_path, monkeypatch, capsys
):
    hurry(monkeypatch)
    url = f"{new_bucket()}/text"
    names = ["train.xx", "train.yy.gz", "valid.tsv", "train.weights", "links", "train.zz", "notes"]
    for name in names:
        ObjectStore(url).write(name, name.encode())
    config = change(
        tiny_config,
        data={"text_dir": url, "alignments": ("links",), "cache_dir": str(tmp_path)},
        model={"alignment": {"weight": 0.1}},
    ).data
    folder = copy_text(url, config)
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert found == {"train.xx", "train.yy.gz", "valid.tsv", "train.weights", "links"}
    other = change(tiny_config, data={"source_language": "aa", "target_language": "bb"}).data
    ObjectStore(f"{url}2").write("train.weights", b"1\n")
    with pytest.raises(UserError, match=r"has no text file of the splits and languages .* train\.weights"):
        copy_text(f"{url}2", other)
    flags = [f"--config.data.text_dir={url}", "--config.data.dataset=parallel_text"]
    assert main(["align", *flags]) == 2
    assert f"data.text_dir is {url}, which is not written to; give --output=FILE" in capsys.readouterr().err
