"""Keys and certificates: OpenSSL and Flower accept them, and nothing is overwritten by accident."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from perada.cli import main as cli
from perada.errors import InputError
from perada.flower import certs
from perada.flower.address import Address, NoAnswer, probe


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "certs"
    words = ["flower", "certs", str(folder), "--server-name", "fl.example.org", "--server-name", "10.1.2.3"]
    assert cli.main([*words, "--sites", "north,south"]) == 0
    return folder


def test_files_and_their_modes(made: Path) -> None:
    files = {str(p.relative_to(made)): mode(p) for p in made.rglob("*") if p.is_file()}
    secret = {"ca.key", "server.key", "sites/north.key", "sites/south.key"}
    assert {name for name, bits in files.items() if bits == 0o600} == secret
    assert files.keys() - secret == {"ca.crt", "server.crt", "sites/north.pub", "sites/south.pub"}
    assert mode(made) == mode(made / "sites") == 0o700


def test_the_server_certificate_names_what_sites_dial(made: Path) -> None:
    found = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1", "::1"]


def test_flower_reads_the_keys_and_they_belong_together(made: Path) -> None:
    private = load_ssh_private_key((made / "sites" / "north.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.curve.name == "secp384r1"
    assert try_load_public_key(made / "sites" / "north.pub") == public_key_to_bytes(private.public_key())


def shake(folder: Path, ca: Path, host: str = "127.0.0.1") -> None:
    """Makes one TLS handshake with the folder's server certificate, checked as a site checks it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            plain, _ = listener.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as secure:
                    secure.recv(100)
                    secure.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")
            except OSError:
                plain.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            probe(Address(host, listener.getsockname()[1]), ca)
        finally:
            thread.join()


def test_a_site_trusts_the_server_of_its_own_authority_only(made: Path, tmp_path: Path) -> None:
    shake(made, made / "ca.crt")
    certs.make(tmp_path / "other", ["127.0.0.1"], [])
    with pytest.raises(InputError, match="does not vouch for the certificate of 127"):
        shake(made, tmp_path / "other" / "ca.crt")


def test_a_certificate_for_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certs.make(tmp_path, ["fl.example.org"], [])
    monkeypatch.setattr(certs, "_alternatives", lambda names: [x509.DNSName("other.example.org")])
    certs.renew_server(tmp_path, ["other.example.org"])
    with pytest.raises(InputError, match="refused"):
        shake(tmp_path, tmp_path / "ca.crt")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--server-name", "x", "--sites", "a"], "ca.crt exists"),
        (["--keys-only", "--sites", "north"], "north.key exists"),
        (["--renew", "west"], "no key of 'west'"),
        (["--renew", "north", "--keys-only"], "choose one"),
    ],
)
def test_nothing_is_overwritten(made: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}
    assert cli.main(["flower", "certs", str(made), *words]) == 2
    assert says in capsys.readouterr().err
    assert {p: p.read_bytes() for p in made.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sites", "a"], "--server-name"),
        (["--server-name", "fl.example.org", "--sites", "a,a"], "named twice"),
        (["--server-name", "fl.example.org", "--sites", "a,A"], "named twice"),
        (["--server-name", "fl.example.org", "--sites", "../a"], "site name must be letters"),
        (["--server-name", "fl.example.org", "--sites", "a,Server"], "site name 'Server'"),
        (["--server-name", "https://fl.example.org", "--sites", "a"], "neither a host's name nor an address"),
    ],
)
def test_bad_names_are_one_line(
    tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["flower", "certs", str(tmp_path / "new"), *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_renewing_the_server_needs_nothing_new_at_the_sites(tmp_path: Path) -> None:
    certs.make(tmp_path, ["127.0.0.1", "fl.example.org"], ["north"])
    old, site = (tmp_path / "server.crt").read_bytes(), (tmp_path / "sites" / "north.key").read_bytes()
    ca = (tmp_path / "ca.crt").read_bytes()
    assert cli.main(["flower", "certs", str(tmp_path), "--renew", "server"]) == 0
    assert (tmp_path / "server.crt").read_bytes() != old
    assert (tmp_path / "server.crt.old").read_bytes() == old
    assert (tmp_path / "ca.crt").read_bytes() == ca
    assert (tmp_path / "sites" / "north.key").read_bytes() == site
    assert b"fl.example.org" in x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes()).public_bytes(
        certs.serialization.Encoding.DER
    )
    shake(tmp_path, tmp_path / "ca.crt")
    assert mode(tmp_path / "server.key") == 0o600


def test_renewing_one_site_leaves_the_others(tmp_path: Path) -> None:
    certs.make(tmp_path, ["127.0.0.1"], ["north", "south"])
    old = {p.name: p.read_bytes() for p in (tmp_path / "sites").iterdir()}
    assert cli.main(["flower", "certs", str(tmp_path), "--renew", "north"]) == 0
    new = {p.name: p.read_bytes() for p in (tmp_path / "sites").iterdir()}
    assert {n for n in old if new[n] != old[n]} == {"north.key", "north.pub"}
    assert new["north.pub.old"] == old["north.pub"]
    assert set(certs.read_keys(tmp_path)) == {"north", "south"}  # .old files do not count


def test_a_site_may_make_its_own_key(tmp_path: Path) -> None:
    assert cli.main(["flower", "certs", str(tmp_path), "--keys-only", "--sites", "north"]) == 0
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"north.key", "north.pub"}


def test_no_answer_is_not_a_refusal(made: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(NoAnswer, match="refused"):
        probe(Address("127.0.0.1", port), made / "ca.crt")


def test_without_sites_there_is_a_folder_for_their_keys(tmp_path: Path) -> None:
    """docs/deploy.md: sites make their own keys and send them."""
    assert cli.main(["flower", "certs", str(tmp_path / "c"), "--server-name", "fl.example.org"]) == 0
    assert mode(tmp_path / "c" / "sites") == 0o700


def test_a_renewed_certificate_is_for_this_machine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the old one does not have these names."""
    with monkeypatch.context() as patch:
        patch.setattr(certs, "_alternatives", lambda names: [x509.DNSName("fl.example.org")])
        certs.make(tmp_path, ["fl.example.org"], [])
    certs.renew_server(tmp_path, [])
    assert certs.names_of(tmp_path / "server.crt") == ["fl.example.org", "localhost", "127.0.0.1", "::1"]


def test_which_keys_are_admitted(tmp_path: Path) -> None:
    certs.make(tmp_path, ["127.0.0.1"], ["a", "b", "c", "d"])
    keys = certs.read_keys(tmp_path)
    keys["b"] = keys["b"][:50]
    keys["d"] = keys["c"].replace(b" c", b" d")  # the comment says another
    rsa = generate_private_key(65537, 2048).public_key()
    keys["e"] = rsa.public_bytes(certs.serialization.Encoding.OpenSSH, certs.serialization.PublicFormat.OpenSSH)
    keys["f"] = b""
    good, wrong = certs.good_keys(keys)
    assert good == {"a": keys["a"]}
    assert wrong == [
        "b.pub cannot be read: b is not admitted",
        "e.pub is not an ECDSA key of a NIST curve: e is not admitted",
        "f.pub cannot be read: f is not admitted",
        "c and d have the same key: not admitted",
    ]
