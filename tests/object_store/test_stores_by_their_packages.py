"""S3 by s3fs against moto's server, Google's store by gcsfs against an emulator, if they are installed."""

import socket
import threading
from collections.abc import Iterator

import pytest
from failing_store import hurry, s3_bucket
from test_filesystem import check_objects

from flaxformer_mt.errors import UserError
from flaxformer_mt.object_store.filesystem import ObjectStore
from flaxformer_mt.object_store.owner_lock import OwnerLock


@pytest.fixture
def s3(monkeypatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as url:
        yield url


@pytest.fixture
def gs(monkeypatch) -> Iterator[str]:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install gcsfs gcp-storage-emulator")
    server = pytest.importorskip("gcp_storage_emulator.server", reason="the emulator is not installed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    running = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    threading.Thread(target=running.start, daemon=True).start()
    yield "gs://bucket"
    running.stop()


@pytest.mark.filterwarnings("ignore")  # of these packages
@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_objects_by_the_real_packages(kind, request, tmp_path, monkeypatch, capfd):
    hurry(monkeypatch)
    bucket = request.getfixturevalue(kind)
    store = ObjectStore(f"{bucket}/runs/x")
    check_objects(store, tmp_path, conditions=kind == "s3")  # which the emulator of gs does not know
    lock = OwnerLock(store)
    lock.check()
    lock.release()
    assert ".lock" not in store.list()
    for use in (
        ObjectStore(f"{kind}://absent/x").list,
        lambda: ObjectStore(f"{kind}://absent/x").write("y", b""),
    ):
        with pytest.raises(UserError, match=rf"^{kind}://absent/x cannot be .*create the bucket"):
            use()
    if kind == "s3":  # the emulator of gs prints its own
        assert "Traceback" not in capfd.readouterr().err
