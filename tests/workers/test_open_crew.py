"""Where blocks are worked on: what is wrong with an address is told at once."""

import socket

import pytest

from flaxformer_mt.errors import UserError
from flaxformer_mt.workers.worker_pool import check_reachable


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto", "local", "anything"):
            check_reachable(address)
    for address in (f"127.0.0.1:{port}", f"ray://[::1]:{port}", "127.0.0.1:99999", "no host:80"):
        with pytest.raises(UserError, match=r"^--ray=.*: nobody answers there .* --ray=local") as caught:
            check_reachable(address)
        assert "\n" not in str(caught.value) and address in str(caught.value)
