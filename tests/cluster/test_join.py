"""Joining a cluster: what does not answer is said at once."""

import socket
import time

import pytest

from mmray.cluster.join import check_answer, forget_dead_cluster
from mmray.errors import ResourceError


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nothing_listens_is_refused_at_once(form):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began_s = time.monotonic()
    with pytest.raises(ResourceError, match=f"nothing answers at the Ray address .*{port}"):
        check_answer(form.format(port))
    assert time.monotonic() - began_s < 10


def test_an_address_where_something_listens_passes():
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        check_answer(f"127.0.0.1:{head.getsockname()[1]}")


def test_ray_resolves_its_own_words():
    check_answer("auto")


def test_a_note_of_a_dead_cluster_is_removed_and_a_living_one_stays(tmp_path):
    note = tmp_path / "ray_current_cluster"
    forget_dead_cluster(note)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        note.write_text(address)
        head.listen()
        forget_dead_cluster(note)
        assert note.read_text() == address
    forget_dead_cluster(note)
    assert not note.exists()
