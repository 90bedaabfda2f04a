"""Certificates and keys of a federation: who the server is, and which sites may talk to it.

    ca.crt  ca.key            the federation's own authority; its key signs server certificates and stays where it is
    server.crt  server.key    the server's, with every name and address that sites dial
    sites/NAME.pub            a site's public key: the server admits the keys in this folder and no others
    sites/NAME.key            a site's private key: only the site needs it

A site knows the server by `ca.crt`. The server knows a site by its key (ECDSA P-384 in OpenSSH's format, which Flower
reads). Only a renewal replaces a file.
"""

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

from ..errors import InputError
from .settings import check_sites

CA_DAYS = 3650
SERVER_DAYS = 365
LOCAL = ("localhost", "127.0.0.1", "::1")  # a server certificate is always for these, too
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*")


def make(folder: Path, server_names: Sequence[str], sites: Sequence[str]) -> list[Path]:
    """Makes a new authority, a server certificate and a key pair per site; returns the files."""
    sites, names = check_sites(sites), _alternatives(server_names)
    for name in ("ca.crt", "ca.key", "server.crt", "server.key"):
        advice = "--keys-only adds a site, --renew server or --renew NAME replaces one certificate or key"
        _refuse_existing(folder / name, advice)
    _refuse_keys(folder, sites)
    make_folder(folder)
    make_folder(folder / "sites")  # for keys that sites make themselves
    key = ec.generate_private_key(ec.SECP384R1())
    files = [*_write_authority(folder, key), *_write_server(folder, key, names)]
    return files + [file for site in sites for file in site_keys(folder, site)]


def site_keys(folder: Path, site: str) -> list[Path]:
    """Makes a new key pair for a site. A site that runs this itself sends only the `.pub` file to the server."""
    check_sites([site])
    _refuse_keys(folder, [site])
    make_folder(folder / "sites")
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = _key_files(folder, site)
    line = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return [
        _write(private, _pem(key, serialization.PrivateFormat.OpenSSH), secret=True),
        _write(public, line + b" " + site.encode() + b"\n"),
    ]


def renew_server(folder: Path, server_names: Sequence[str]) -> list[Path]:
    """Makes a new server key and certificate by the same authority, so that sites need nothing new.

    Without names the new certificate has those of the old one.
    """
    key = _authority_key(folder)
    names = _alternatives(server_names or names_of(folder / "server.crt"))
    _keep_old(folder / "server.crt", folder / "server.key")
    return _write_server(folder, key, names)


def renew_site(folder: Path, site: str) -> list[Path]:
    """Makes a new key pair for one site. A running server notices the new `.pub` file and drops the old key."""
    check_sites([site])
    files = _key_files(folder, site)
    if not any(file.exists() for file in files):
        raise InputError(f"no key of {site!r} in {folder / 'sites'}: --keys-only --sites {site} makes one")
    _keep_old(*files)
    return site_keys(folder, site)


def read_keys(folder: Path) -> dict[str, bytes]:
    """Returns the content of each site's `.pub` file, empty if it may not be read."""
    keys = {}
    for path in sorted((folder / "sites").glob("*.pub")):
        try:
            keys[path.stem] = path.read_bytes()
        except FileNotFoundError:  # removed just now
            continue
        except OSError:
            keys[path.stem] = b""
    return keys


def good_keys(keys: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """Returns the keys that Flower accepts and that belong to one site, and a line about each of the others."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve  # `train` needs none

    owners: dict[bytes, list[str]] = {}
    problems = []
    for name, data in keys.items():
        try:
            key = serialization.load_ssh_public_key(data)
        except (ValueError, UnsupportedAlgorithm):
            problems.append(f"{name}.pub cannot be read: {name} is not admitted")
            continue
        if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
            problems.append(f"{name}.pub is not an ECDSA key of a NIST curve: {name} is not admitted")
            continue
        owners.setdefault(public_key_to_bytes(key), []).append(name)
    shared = [names for names in owners.values() if len(names) > 1]
    problems += [f"{' and '.join(names)} have the same key: not admitted" for names in shared]
    return {names[0]: keys[names[0]] for names in owners.values() if len(names) == 1}, problems


def expires(certificate: Path) -> datetime:
    """Returns when a certificate expires, in UTC."""
    return _load(certificate).not_valid_after_utc


def names_of(certificate: Path) -> list[str]:
    """Returns the names and addresses that a certificate is for."""
    names = _load(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value).lower() for name in names]


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    """Returns the names that sites dial, and `LOCAL`, as a certificate's alternative names."""
    if not names:
        raise InputError("--server-name: give every name or address that sites dial, such as fl.example.org")
    alternatives: list[x509.GeneralName] = []
    for name in dict.fromkeys([*names, *LOCAL]):
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name.strip("[]"))))
        except ValueError:
            if len(name) > 253 or not _HOST.fullmatch(name):
                raise InputError(f"--server-name {name!r} is neither a host's name nor an address") from None
            alternatives.append(x509.DNSName(name))
    return alternatives


def _load(certificate: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {certificate}: missing, or not a certificate") from error


def _write_authority(folder: Path, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"perada federation {os.urandom(4).hex()}")])
    others = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    certificate = (
        _builder(name, name, key, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused), critical=True)
        .sign(key, hashes.SHA384())
    )
    return _write_pair(folder, "ca", key, certificate)


def _write_server(folder: Path, signer: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> list[Path]:
    authority = _load(folder / "ca.crt")
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "perada server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _builder(subject, authority.subject, key, SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA384())
    )
    return _write_pair(folder, "server", key, certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a site's clock may be a little slow
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _write_pair(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> list[Path]:
    return [
        _write(folder / f"{name}.key", _pem(key, serialization.PrivateFormat.PKCS8), secret=True),
        _write(folder / f"{name}.crt", certificate.public_bytes(serialization.Encoding.PEM)),
    ]


def _authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    path = folder / "ca.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {path}: the authority's key is needed to renew the server's") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} is not a key that `perada flower certs` made")
    return key


def _pem(key: ec.EllipticCurvePrivateKey, layout: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, layout, serialization.NoEncryption())


def _key_files(folder: Path, site: str) -> tuple[Path, Path]:
    return folder / "sites" / f"{site}.key", folder / "sites" / f"{site}.pub"


def _refuse_keys(folder: Path, sites: Sequence[str]) -> None:
    for site in sites:
        for path in _key_files(folder, site):
            _refuse_existing(path, f"--renew {site} replaces that site's key")


def _refuse_existing(path: Path, advice: str) -> None:
    if path.exists():
        raise InputError(f"{path} exists and is not overwritten: {advice}")


def make_folder(path: Path) -> Path:
    """Makes a folder for its owner alone, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}") from error
    return path


def _keep_old(*paths: Path) -> None:
    """Renames files that are about to be renewed to NAME.old."""
    for path in paths:
        if path.exists():
            os.replace(path, path.with_name(path.name + ".old"))


def _write(path: Path, data: bytes, secret: bool = False) -> Path:
    """Writes a new file. Other users can never read a secret one, not even while it is being written."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
        with os.fdopen(handle, "wb") as f:
            f.write(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error
    return path
