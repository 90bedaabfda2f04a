"""Certificates and keys of a federation: who the server is, and which sites may talk to it.

    ca.crt  ca.key            the federation's own authority; the key signs server certificates and goes nowhere
    server.crt  server.key    the server's, with every name and address that sites dial
    sites/NAME.pub            a site's public key: the server lets in the keys in this folder and no others
    sites/NAME.key            its private key: only the site needs it

Sites know the server by `ca.crt`; the server knows a site by its key (ECDSA P-384 in OpenSSH's format, which is what
Flower reads). Nothing is ever overwritten unless a renewal is asked for.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from ..errors import InputError

CA_DAYS = 3650
SERVER_DAYS = 365
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*")
_TAKEN = {"server"}  # `--renew server` is the server's certificate
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_site(name: str) -> str:
    """A site's name is a file's name, too."""
    if not _SITE.fullmatch(name):
        raise InputError(
            f"site name {name!r}: use letters, digits, '.', '_' and '-', at most 64, no leading '.' or '-'"
        )
    if name.lower() in _TAKEN:
        raise InputError(f"site name {name!r} means something else here: choose another")
    return name


def check_sites(names: Sequence[str]) -> list[str]:
    """Names without repetition, in order: a site's place among them is its number in a simulation."""
    found = [check_site(name) for name in names]
    twice = sorted({name for name in found if [n.lower() for n in found].count(name.lower()) > 1})
    if twice:  # also on a file system that does not tell A from a
        raise InputError(f"site {twice[0]!r} is named twice")
    return sorted(found)


def make(folder: Path, server_names: Sequence[str], sites: Sequence[str]) -> list[Path]:
    """A new authority, a server certificate and a key pair for each site; returns what was written."""
    sites = check_sites(sites)
    names = _alternatives(server_names)
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        if (folder / name).exists():
            raise InputError(
                f"{folder / name} exists and is not overwritten: --add NAME adds a site, --renew server or "
                "--renew NAME replaces one certificate or key"
            )
    _refuse_keys(folder, sites)
    _folder(folder)
    _folder(folder / "sites")  # where the keys go that sites make themselves
    key = ec.generate_private_key(ec.SECP384R1())
    written = [*_authority(folder, key), *_server(folder, key, names)]
    for site in sites:
        written += site_keys(folder, site)
    return written


def site_keys(folder: Path, site: str) -> list[Path]:
    """A new key pair. A site may make its own and send the server nothing but the `.pub` file."""
    check_site(site)
    _refuse_keys(folder, [site])
    _folder(folder / "sites")
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return [
        _write(folder / "sites" / f"{site}.key", private, secret=True),
        _write(folder / "sites" / f"{site}.pub", public + b" " + site.encode() + b"\n"),
    ]


def renew_server(folder: Path, server_names: Sequence[str]) -> list[Path]:
    """A new key and certificate for the server by the same authority, so that sites need nothing new.

    Without names it keeps those of the old certificate.
    """
    key = _authority_key(folder)
    old = folder / "server.crt"
    names = _alternatives(server_names) if server_names else _names_of(old)
    names += [name for name in _alternatives(["localhost"]) if name not in names]
    for name in ("server.crt", "server.key"):
        _aside(folder / name)
    return _server(folder, key, names)


def renew_site(folder: Path, site: str) -> list[Path]:
    """A new key pair for one site; the server forgets the old key when it next starts or looks (`perada flower
    server` compares its list with this folder)."""
    files = [folder / "sites" / f"{check_site(site)}{ending}" for ending in (".key", ".pub")]
    if not any(f.exists() for f in files):
        raise InputError(f"no key of {site!r} in {folder / 'sites'}: --add {site} makes one")
    for file in files:
        _aside(file)
    return site_keys(folder, site)


def public_keys(folder: Path) -> dict[str, Path]:
    """The sites whose keys are in the folder, by name."""
    return {p.stem: p for p in sorted((folder / "sites").glob("*.pub"))}


def read_keys(folder: Path) -> dict[str, bytes]:
    """What is in the sites' `.pub` files now; one that goes away meanwhile is not there, one that may not be read is
    empty."""
    found = {}
    for name, path in public_keys(folder).items():
        try:
            found[name] = path.read_bytes()
        except FileNotFoundError:
            continue
        except OSError:
            found[name] = b""
    return found


def good_keys(keys: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """Those that are keys which Flower takes, each of one site; and a line about each of the others."""
    owners: dict[bytes, list[str]] = {}
    wrong = []
    for name, data in keys.items():
        try:
            key = serialization.load_ssh_public_key(data)
        except (ValueError, UnsupportedAlgorithm):
            wrong.append(f"{name}.pub cannot be read: {name} is not let in")
            continue
        if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
            wrong.append(f"{name}.pub is not an ECDSA key of a NIST curve: {name} is not let in")
            continue
        owners.setdefault(public_key_to_bytes(key), []).append(name)
    wrong += [f"{' and '.join(names)} have one and the same key: not let in" for names in owners.values() if names[1:]]
    return {names[0]: keys[names[0]] for names in owners.values() if not names[1:]}, wrong


def expires(certificate: Path) -> datetime:
    """When a certificate ends, in UTC."""
    return _load(certificate).not_valid_after_utc


def names(certificate: Path) -> list[str]:
    """The names and addresses that a certificate is for."""
    return [str(name.value).lower() for name in _names_of(certificate)]


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    """What sites dial, as the certificate's alternative names; this machine's own name for itself is always in."""
    if not names:
        raise InputError("--server-name: give every name or address that sites dial, such as fl.example.org")
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys([*names, "localhost", "127.0.0.1", "::1"]):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
        except ValueError:
            if len(name) > 253 or not _HOST.fullmatch(name):
                raise InputError(f"--server-name {name!r} is neither a host's name nor an address") from None
            found.append(x509.DNSName(name))
    return found


def _names_of(certificate: Path) -> list[x509.GeneralName]:
    return list(_load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _load(certificate: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {certificate}: missing, or no certificate") from error


def _authority(folder: Path, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"perada federation {os.urandom(4).hex()}")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    found = (
        _blank(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA384())
    )
    return [
        _write(folder / "ca.key", _pem(key), secret=True),
        _write(folder / "ca.crt", found.public_bytes(serialization.Encoding.PEM)),
    ]


def _server(folder: Path, signer: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> list[Path]:
    authority = _load(folder / "ca.crt")
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perada server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    found = (
        _blank(subject, authority.subject, key, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA384())
    )
    return [
        _write(folder / "server.key", _pem(key), secret=True),
        _write(folder / "server.crt", found.public_bytes(serialization.Encoding.PEM)),
    ]


def _blank(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a site's clock may be a little behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    path = folder / "ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {path}: the authority's key is needed to renew the server's") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} is not a key that `perada flower certs` made")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _refuse_keys(folder: Path, sites: Sequence[str]) -> None:
    for site in sites:
        for ending in (".key", ".pub"):
            if (path := folder / "sites" / f"{site}{ending}").exists():
                raise InputError(f"{path} exists and is not overwritten: --renew {site} replaces that site's key")


def _folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}") from error


def _aside(path: Path) -> None:
    """What a renewal replaces stays as NAME.old until the next renewal."""
    if path.exists():
        os.replace(path, path.with_name(path.name + ".old"))


def _write(path: Path, data: bytes, secret: bool = False) -> Path:
    """A new file; a secret one is never readable by others, not even while it is being written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
    except FileExistsError as error:
        raise InputError(f"{path} exists and is not overwritten") from error
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path
