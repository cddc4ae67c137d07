"""Requests to a real etcd: compare-and-set, leases, hints, users, TLS, endpoints that are down."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.launch.membership.etcd_address import EtcdAddress, read_etcd_address
from tests.helpers import etcd as helper
from tests.helpers.etcd import Etcd

pytestmark = pytest.mark.skipif(bool(helper.missing()), reason=helper.missing())
if not helper.missing():
    from fleet.launch.membership.etcd import EtcdRefusedError, EtcdStore, EtcdUnreachableError


@pytest.fixture
def store(etcd: Etcd) -> Iterator[EtcdStore]:
    one = EtcdStore(EtcdAddress(endpoints=(etcd.endpoint,)), timeout_s=2.0)
    yield one
    one.delete("/t/")
    one.close()


def test_read_put_swap_delete(store: EtcdStore) -> None:
    first = store.read("/t/")
    store.put("/t/a", '{"x": 1}')
    store.put("/t/no-json", "{")
    store.put("/tt", "9")
    view = store.read("/t/")
    assert (view.values, view.texts) == ({"a": {"x": 1}}, {"a": '{"x": 1}', "no-json": "{"})
    assert first.revision < view.revision
    assert view.created["a"] > first.revision
    assert not store.swap("/t/a", None, "2")
    assert not store.swap("/t/a", "1", "2")
    assert store.swap("/t/a", '{"x": 1}', "2")
    assert store.swap("/t/b", None, "3")
    assert store.swap("/t/b", "3", None), "deletes"
    assert store.read("/t/").values == {"a": 2}
    assert store.delete("/t/") == 2
    store.delete("/tt")


def test_swap_is_atomic(store: EtcdStore, etcd: Etcd) -> None:
    """Of eight writers at once, one wins."""
    store.put("/t/world", "0")
    stores = [EtcdStore(EtcdAddress(endpoints=(etcd.endpoint,)), timeout_s=5.0) for _ in range(8)]
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: won.append(stores[i].swap("/t/world", "0", f"{i + 1}"))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(won) == [False] * 7 + [True]
    for one in stores:
        one.close()


def test_keys_go_with_their_lease(store: EtcdStore) -> None:
    lease = store.grant(5)
    store.put("/t/node", "1", lease)
    assert store.keep_alive(lease)
    assert store.swap("/t/other", None, "1", lease)
    store.revoke(lease)
    assert store.read("/t/").values == {}
    assert not store.keep_alive(lease)
    with pytest.raises(EtcdRefusedError, match="lease not found"):
        store.put("/t/node", "1", lease)


def test_a_key_is_claimed_unless_it_is_under_the_lease_of_another(store: EtcdStore) -> None:
    old, own, other = (store.grant(5) for _ in range(3))
    assert store.claim("/t/claimed", "1", old, {old})
    assert store.claim("/t/claimed", "2", own, {old, own}), "as after a lost answer, or a lost lease"
    assert not store.claim("/t/claimed", "3", other, {other})
    assert store.read("/t/claimed").texts == {"": "2"}
    for lease in (old, own, other):
        store.revoke(lease)


def test_changes_are_hinted(store: EtcdStore, etcd: Etcd) -> None:
    other = EtcdStore(EtcdAddress(endpoints=(etcd.endpoint,)), timeout_s=2.0)
    timer = threading.Timer(0.3, lambda: store.put("/t/x", "1"))
    timer.start()
    began = time.monotonic()
    assert next(hints := other.watch("/t/", 3.0), "ended") is None
    assert time.monotonic() - began < 1.5
    hints.close()  # type: ignore[attr-defined]
    # etcd tells its watchers before the put has its revision: a watch that begins in between is told of it once more.
    timer.join()
    assert list(other.watch("/t/", 0.2)) == [], "it ends when nothing happens"
    other.close()


def test_an_endpoint_that_is_down_is_passed_over(etcd: Etcd) -> None:
    address = EtcdAddress(endpoints=(f"127.0.0.1:{helper.free_port()}", etcd.endpoint))
    store = EtcdStore(address, timeout_s=2.0)
    assert store.read("/t/").values == {}
    store.close()


def test_nothing_listens_and_nothing_answers(tmp_path: Path) -> None:
    """The first proves that etcd is down, the second proves nothing."""
    store = EtcdStore(EtcdAddress(endpoints=(f"127.0.0.1:{helper.free_port()}",)), timeout_s=0.3)
    with pytest.raises(EtcdUnreachableError, match="nothing listens there") as caught:
        store.read("/t/")
    assert caught.value.is_down
    with Etcd(tmp_path) as server:
        address = EtcdAddress(endpoints=(server.endpoint,))
        patient, hasty = EtcdStore(address, timeout_s=20), EtcdStore(address, timeout_s=0.3)
        patient.read("/t/")
        server.freeze()
        with pytest.raises(EtcdUnreachableError) as caught:
            hasty.read("/t/")
        assert not caught.value.is_down
        server.thaw()
        assert patient.read("/t/").values == {}
    for one in (store, patient, hasty):
        one.close()


def etcdctl(server: Etcd, *words: str) -> None:
    """Sends the requests of ``etcdctl`` through the gateway, since the program may be absent."""
    from etcd3gw import Etcd3Client

    client = Etcd3Client(host="127.0.0.1", port=server.port)
    path, *pairs = words
    client.post(client.get_url(path), json=dict(pair.split("=") for pair in pairs))
    client.session.close()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{}", "[1]", "null", '{"error": "' + "x" * 9000 + '"}', "[" * 200_000, "<html>", ""])
def test_what_answers_in_the_place_of_etcd_is_like_silence(
    text: str, etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy between may answer anything; once that ended the thread that renews a launcher's lease."""
    store = EtcdStore(EtcdAddress(endpoints=(etcd.endpoint,)), timeout_s=2.0)
    (client,) = store._clients
    with monkeypatch.context() as patch:
        patch.setattr(client, "post", lambda *_, **__: json.loads(text))
        for call in (lambda: store.read("/t/"), lambda: store.grant(5), lambda: store.keep_alive(1)):
            with pytest.raises(EtcdUnreachableError) as caught:
                call()
            assert len(str(caught.value)) < 400
    assert store.read("/t/").values == {}
    store.close()


def test_user_and_password(tmp_path: Path) -> None:
    """The token is fetched, renewed after etcd forgot it, and a wrong password is named."""
    with Etcd(tmp_path) as server:
        etcdctl(server, "auth/user/add", "name=root", "password=pw")
        etcdctl(server, "auth/role/add", "name=root")
        etcdctl(server, "auth/user/grant", "user=root", "role=root")
        etcdctl(server, "auth/enable")
        store = EtcdStore(read_etcd_address(f"root:pw@{server.endpoint}", Environment({})), timeout_s=5.0)
        store.put("/t/a", "1")
        server.kill()
        server.start()  # simple tokens do not survive
        assert store.read("/t/").values == {"a": 1}
        wrong = EtcdStore(read_etcd_address(f"root:no@{server.endpoint}", Environment({})), timeout_s=5.0)
        nobody = EtcdStore(EtcdAddress(endpoints=(server.endpoint,)), timeout_s=5.0)
        for one in (wrong, nobody):
            with pytest.raises(EtcdRefusedError, match="FLEET_ETCD_USER") as caught:
                one.read("/t/")
            assert "no@" not in str(caught.value)
        for one in (store, wrong, nobody):
            one.close()


def openssl(folder: Path, words: str) -> None:
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    openssl(folder, "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem")
    (folder / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl(folder, f"req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr")
        signed = f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -out {name}.pem"
        openssl(folder, f"{signed} -extfile extensions")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_tls_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is checked against the job's own authority, whatever other programs' variables say."""
    make_certificates(tmp_path)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "server.pem"))
    files = ("--cert-file", "server.pem", "--key-file", "server.key", "--trusted-ca-file", "ca.pem")
    flags = [str(tmp_path / word) if not word.startswith("--") else word for word in files]
    with Etcd(tmp_path / "etcd", flags=[*flags, "--client-cert-auth"], scheme="https") as server:
        names = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
        env = {f"FLEET_ETCD_{name}": str(tmp_path / file) for name, file in names.items()}
        store = EtcdStore(read_etcd_address(server.endpoint, Environment(env)), timeout_s=5.0)
        store.put("/t/a", "1")
        assert store.read("/t/").values == {"a": 1}
        without = EtcdStore(
            read_etcd_address(server.endpoint, Environment({"FLEET_ETCD_CA": env["FLEET_ETCD_CA"]})), timeout_s=5.0
        )
        plain = EtcdStore(EtcdAddress(endpoints=(server.endpoint,)), timeout_s=5.0)
        make_certificates(tmp_path / "other")
        others = {"FLEET_ETCD_CA": str(tmp_path / "other" / "ca.pem")}
        stranger = EtcdStore(read_etcd_address(server.endpoint, Environment(others)), timeout_s=5.0)
        wrong = {
            without: "TLS: .*certificate.*; check FLEET_ETCD_CERT and FLEET_ETCD_KEY",
            plain: "does it speak TLS. Then set FLEET_ETCD_CA",
            stranger: "TLS: certificate verify failed.*; check FLEET_ETCD_CA",
        }
        for one, said in wrong.items():
            with pytest.raises(EtcdUnreachableError, match=said):
                one.read("/t/")
        for one in (store, *wrong):
            one.close()
