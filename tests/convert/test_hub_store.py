"""The Hub: what is asked for, which answers become which messages, and the card of an upload."""

from pathlib import Path

import pytest

hub = pytest.importorskip("huggingface_hub")

from huggingface_hub import errors

from flaxformer_mt.config import Config, DataConfig
from flaxformer_mt.convert import hub_store
from flaxformer_mt.convert.model_cards import make_card
from flaxformer_mt.errors import UserError


class Api:
    files = ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx")
    asked: list = []
    error: Exception | None = None

    def list_repo_files(self, name, *, revision):
        self.asked.append((name, revision))
        if self.error is not None:
            raise self.error
        return list(self.files)

    def create_repo(self, name, *, exist_ok):
        self.asked.append(("create", name, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.asked.append(("upload", repo_id, sorted(path.name for path in Path(folder_path).iterdir())))


@pytest.fixture
def api(monkeypatch, tmp_path):
    def download(**options):
        Api.asked.append(options)
        return str(tmp_path)

    monkeypatch.setattr(Api, "asked", [])
    monkeypatch.setattr(Api, "error", None)
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", download)
    return Api


def test_names_of_the_hub():
    assert hub_store.find_hub_name("hf:facebook/nllb@main") == "facebook/nllb@main"
    assert hub_store.find_hub_name(Path("hf:google/mt5-small")) == "google/mt5-small"
    assert hub_store.find_hub_name("facebook/nllb") is None


def test_only_the_files_of_an_import_are_downloaded(api, monkeypatch, tmp_path):
    assert hub_store.fetch_model("a/b@v1") == tmp_path
    assert api.asked[0] == ("a/b", "v1")
    assert api.asked[1]["repo_id"] == "a/b" and api.asked[1]["revision"] == "v1"
    assert "model*.safetensors" in api.asked[1]["allow_patterns"]
    assert not any("bin" in pattern for pattern in api.asked[1]["allow_patterns"])
    monkeypatch.setattr(Api, "files", ("config.json", "pytorch_model.bin"))
    hub_store.fetch_model("a/b")
    assert "pytorch_model*.bin" in api.asked[-1]["allow_patterns"]


def test_without_a_network_the_cache_serves(api, tmp_path):
    class ConnectError(Exception):
        pass

    Api.error = ConnectError("no route")
    assert hub_store.fetch_model("a/b") == tmp_path
    assert api.asked[-1]["local_files_only"] is True


def test_no_argument_of_the_library_is_advised(api, monkeypatch):
    def find_nothing(**options):
        raise errors.LocalEntryNotFoundError(
            "No snapshot. To enable downloads, pass 'local_files_only=False'"
        )

    monkeypatch.setattr(hub, "snapshot_download", find_nothing)
    with pytest.raises(UserError, match="LocalEntryNotFoundError: No snapshot.; check the network"):
        hub_store.fetch_model("a/b")
    Api.error = RuntimeError("Could not determine home directory.")
    with pytest.raises(UserError, match="RuntimeError: Could not determine home directory.; set HOME to a"):
        hub_store.fetch_model("a/b")


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("RepositoryNotFoundError", r"correct the name, which is OWNER/NAME.*`hf auth login`"),
        ("GatedRepoError", "accept its terms on its page"),
        ("HFValidationError", "correct the name"),
    ],
)
def test_failures_name_the_model_and_the_remedy(api, kind, remedy):
    assert issubclass(getattr(errors, kind), Exception)  # the errors of the library have these names
    Api.error = type(kind, (Exception,), {})("404 for url")
    with pytest.raises(UserError, match=rf"hf:a/b cannot be downloaded: {kind}: 404 for url; {remedy}"):
        hub_store.fetch_model("a/b")


def test_an_upload_without_rights_names_the_remedy(api, monkeypatch, tmp_path):
    assert issubclass(errors.HfHubHTTPError, Exception)
    error = type("HfHubHTTPError", (Exception,), {})("403 Forbidden: you have no rights")

    def refuse(self, name, *, exist_ok):
        raise error

    monkeypatch.setattr(Api, "create_repo", refuse)
    with pytest.raises(
        UserError, match="hf:me/model cannot be uploaded: .*403.*; log in with `hf auth login`"
    ) as said:
        hub_store.push_model(tmp_path, "me/model")
    assert "\n" not in str(said.value)


def test_an_upload_has_a_card(api, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    config = Config(data=DataConfig(dataset="a:de-en,a:fr-en"))
    (folder / "README.md").write_text(make_card(config, {"format": "hf", "checkpoint": "best", "step": 7}))
    address = hub_store.push_model(folder, "me/model")
    assert address == "https://huggingface.co/me/model"
    assert api.asked == [("create", "me/model", True), ("upload", "me/model", ["README.md", "config.json"])]
    loaded = hub.ModelCard((folder / "README.md").read_text()).data.to_dict()
    assert loaded["language"] == ["de", "en", "fr"]
    assert (loaded["library_name"], loaded["pipeline_tag"]) == ("transformers", "translation")


def test_a_card_has_data_and_scores_with_signatures():
    part = {"name": "mine", "pairs": 12_345}
    test = {"bleu": 31.25, "signature": "nrefs:1|tok:13a", "chrf": 55.5, "chrf_signature": "nc:6"}
    test |= {"checkpoint": "best", "method": "beam", "beam_size": 5}
    report = {"data": {"train": {"parts": [part]}}, "test": test}
    export = {"format": "aiayn", "checkpoint": "best", "step": 7}
    text = make_card(Config(), export, report)
    data = hub.ModelCard(text).data.to_dict()
    assert (data["library_name"], data["metrics"]) == ("pytorch", ["bleu", "chrf"])
    for part in ("* mine: 12,345 training pairs", "* BLEU: 31.25, `nrefs:1|tok:13a`", "beam 5"):
        assert part in text
    per_direction = {"checkpoint": "best", "method": "beam", "beam_size": 5, "signature": "nrefs:1"}
    per_direction["directions"] = {"de-en": {"bleu": 30.0}, "fr-en": {"bleu": 20.0}}
    text = make_card(Config(), export, {"test": per_direction})
    assert "* BLEU de-en: 30.00, `nrefs:1`" in text and "* BLEU fr-en: 20.00" in text
