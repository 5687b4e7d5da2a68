"""Signatures on certificates: who vouches for one.

A ledger's chain has no key: whoever writes all of it anew can prove anything. An Ed25519 signature (RFC 8032) binds the
certificate, and with it the ledger's head and the model's hash, to somebody who holds a private key. It is made over the very
bytes of `certificate.json`, with a fixed prefix before them, and lies beside it as `certificate.sig`; the certificate itself
stays what the ledger gives. Whose key it is, only those can say who got the public key from its owner.
"""

from __future__ import annotations

import binascii
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tacit.privacy.certificate import verified_content, without_duplicates
from tacit.privacy.files import read_whole, replace_whole
from tacit.privacy.ledger import canonical
from tacit.privacy.validation import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FORMAT = "tacit-signature/1"
# Before the signed bytes, so that nothing that the key signs elsewhere passes for a certificate, or the other way round.
PREFIX = b"tacit-signature/1: certificate.json\n"
_NAME = "certificate.sig"
_LARGEST_FILE = 1 << 16  # of a key or a signature, in bytes
_SEAL = object()


@dataclass(frozen=True)
class Verified:
    """A certificate that was found to be what its ledger proves, and who signed it.

    `signed_by` is the public key, 64 hexadecimal digits, of a signature that fits; None if there is none. `expected` says that
    it is the key which was asked for; otherwise nobody has said whose it is.

    *Guarantee.* Only `verified` makes one, so whatever holds one may be shown to others.

    >>> Verified({}, None, False)
    Traceback (most recent call last):
    ...
    TypeError: a certificate is verified by tacit.privacy.signature.verified alone
    """

    certificate: dict[str, Any]
    signed_by: str | None
    expected: bool
    _seal: InitVar[object] = None  # not kept, so that dataclasses.replace cannot make another one

    def __post_init__(self, _seal: object) -> None:
        if _seal is not _SEAL:
            raise TypeError("a certificate is verified by tacit.privacy.signature.verified alone")

    @property
    def signer(self) -> str:
        """The state of the signature, in words."""
        if self.signed_by is None:
            return "not signed"
        return f"signed by {self.signed_by} " + (
            "(the key that was asked for)" if self.expected else "(nobody has said whose key that is)"
        )


def verified(run_directory: str | os.PathLike[str], *, public_key: str | None = None) -> Verified:
    """The certificate of a run directory, if it is what its ledger proves and its signature, if there is one, is of these bytes.

    With a `public_key` (as `public_key_of` takes it) there must be a signature, and by this key.

    *Guarantee.* That of `verify`, for the very bytes that were signed. A `certificate.sig` that does not fit is not passed over.

    >>> verified("nowhere")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: there is no run directory at nowhere
    """
    wanted = None if public_key is None else public_key_of(public_key)
    certificate, content = verified_content(run_directory)
    path = Path(run_directory) / _NAME
    signer = signer_of(content, path) if os.path.lexists(path) else None
    if wanted is not None and signer is None:
        raise UserError(f"{run_directory} holds no {_NAME}: nobody signed this certificate")
    if wanted not in (None, signer):
        raise UserError(f"{path} is by another key, {signer}, not by {wanted}")
    return Verified(certificate, signer, wanted is not None, _SEAL)


def sign(run_directory: str | os.PathLike[str], key: Ed25519PrivateKey) -> Verified:
    """Sign the certificate of a run directory, as `certificate.sig` beside it, if it is what its ledger proves.

    *Guarantee.* Only what `verify` passes is signed, and nothing but the bytes that it read. A signature of the same certificate
    by another key is left alone.
    """
    certificate, content = verified_content(run_directory)
    path = Path(run_directory) / _NAME
    signer = public_hex(key)
    if os.path.lexists(path):
        try:
            before = signer_of(content, path)
        except UserError:  # of a certificate that is no more, or none at all
            before = signer
        if before != signer:
            raise UserError(
                f"{path} is a signature by another key, {before}; take it away first if yours is to replace it"
            )
    fields = {
        "format": FORMAT,
        "certificate_sha256": hashlib.sha256(content).hexdigest(),
        "public_key": signer,
        "signature": signature_of(key, content).hex(),
    }
    _replace(path, canonical(fields) + b"\n")
    return Verified(certificate, signer, True, _SEAL)


def signature_of(key: Ed25519PrivateKey, content: bytes) -> bytes:
    """The Ed25519 signature of a certificate's bytes, with the prefix before them.

    *Guarantee.* A deterministic function of key and content (RFC 8032).

    >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    >>> signature_of(Ed25519PrivateKey.from_private_bytes(bytes(32)), b"{}").hex()[:16]
    '0ed1ddb68ce90d14'
    """
    return key.sign(PREFIX + content)


def signer_of(content: bytes, path: Path) -> str:
    """The public key of a signature file, if it is a signature of these bytes.

    *Guarantee.* Returns only if the file is, byte by byte, what `sign` writes for this content and that key.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        written = read_whole(path, largest=_LARGEST_FILE)
        fields = json.loads(written.decode("ascii"), object_pairs_hook=without_duplicates)
        one_form = canonical(fields) + b"\n" == written and fields["format"] == FORMAT and len(fields) == 4
        signer, signature = _hexadecimal(fields["public_key"]), bytes.fromhex(fields["signature"])
        if not one_form or signer != fields["public_key"] or signature.hex() != fields["signature"]:
            raise ValueError
        digest = fields["certificate_sha256"]
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is not a signature that tacit wrote; take it away, or sign again") from None
    if digest != hashlib.sha256(content).hexdigest():
        raise UserError(
            f"{path} is a signature of another certificate, or certificate.json has changed since; take it away, or sign again"
        )
    try:
        key.verify(signature, PREFIX + content)
    except InvalidSignature:
        raise UserError(
            f"{path} is no signature of this certificate by {signer}; take it away, or sign again"
        ) from None
    return signer


def new_key(path: str | os.PathLike[str], passphrase: str | None = None) -> str:
    """Make a private key, in PEM (PKCS #8), encrypted if there is a passphrase; returns its public key, 64 hexadecimal digits.

    *Guarantee.* From the operating system's randomness; readable by its owner alone; no file is ever overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     public_key = new_key(f"{folder}/key.pem")
    ...     public_hex(load_key(f"{folder}/key.pem")) == public_key
    True
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase is not None:
        if not passphrase:
            raise UserError("a passphrase must not be empty; leave it out for a key that is not encrypted")
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} exists already; a key is never overwritten, choose another name") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another place for the key") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        os.unlink(path)
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another place for the key") from None
    return public_hex(key)


def load_key(path: str | os.PathLike[str], passphrase: Callable[[], str] | None = None) -> Ed25519PrivateKey:
    """The private key of a PEM file; `passphrase` is asked if it is encrypted.

    *Guarantee.* An Ed25519 key, or a `UserError` that says what the file is instead. What it says holds nothing of the key.
    """
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        pem = _read(Path(path))
        if os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            warnings.warn(f"others may read the private key {path}; `chmod 600` it", stacklevel=2)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is far too large for one"
        raise UserError(f"the key {path} cannot be read: {reason}") from None
    if b"PUBLIC KEY-----" in pem or b"CERTIFICATE-----" in pem:
        raise UserError(f"{path} holds no private key; sign with the private key that it belongs to")
    if b"-----BEGIN OPENSSH PRIVATE KEY-----" in pem:
        raise UserError(f"{path} is a key of OpenSSH; sign with one of its own (tacit sign --new-key KEY.pem)")
    try:
        key = load_pem_private_key(pem, None)
    except TypeError:  # it is encrypted
        if passphrase is None:
            raise UserError(f"{path} is encrypted; its passphrase is needed") from None
        given = passphrase().encode()
        try:
            key = load_pem_private_key(pem, given)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError):
            raise UserError(f"{path} cannot be opened: the passphrase is wrong, or the file is damaged") from None
    except (ValueError, UnsupportedAlgorithm, InternalError):  # the last of keys that OpenSSL chokes on
        raise UserError(f"{path} is not a private key in PEM; make one with `tacit sign --new-key KEY.pem`") from None
    if not isinstance(key, Ed25519PrivateKey):
        kind = type(key).__name__.removesuffix("PrivateKey").lstrip("_")
        raise UserError(f"{path} is a key of another kind ({kind}); make an Ed25519 key (tacit sign --new-key KEY.pem)")
    return key


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public key that belongs to a private one, as 64 hexadecimal digits: what is given to those who are to check.

    *Guarantee.* Nothing can be learned from it of the private key.

    >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    >>> public_hex(Ed25519PrivateKey.from_private_bytes(bytes(32)))[:16]
    '3b6a27bcceb6a42d'
    """
    return key.public_key().public_bytes_raw().hex()


def public_key_of(text: str) -> str:
    """A public key, as 64 hexadecimal digits, from such digits or from the name of a PEM file that holds it.

    *Guarantee.* 64 hexadecimal digits in lower case, or a `UserError`.

    >>> public_key_of("3B6A27BCCEB6A42D62A3A8D02A6F0D73653215771DE243A63AC048A18B59DA29")[:16]
    '3b6a27bcceb6a42d'
    """
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        return _hexadecimal(text)
    except ValueError:
        pass
    wanted = "a public key is 64 hexadecimal digits, or the name of a PEM file that holds one"
    try:
        pem = _read(Path(text))
    except (OSError, ValueError):
        raise UserError(f"{wanted}, not {text[:80]!r}") from None
    if b"PRIVATE KEY-----" in pem:
        raise UserError(f"{text} holds a private key, which must stay with its owner; {wanted}")
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm, InternalError):  # the last of keys that OpenSSL chokes on
        raise UserError(f"{text} holds no public key; {wanted}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{text} is a key of another kind; only Ed25519 signs certificates")
    return key.public_bytes_raw().hex()


def _hexadecimal(text: str) -> str:
    """A public key of 64 digits in lower case; a ValueError otherwise."""
    if len(text) != 64 or not text.isascii() or not text.isalnum():
        raise ValueError
    return binascii.unhexlify(text).hex()


def _read(path: Path) -> bytes:
    with open(path, "rb") as file:
        content = file.read(_LARGEST_FILE + 1)
    if len(content) > _LARGEST_FILE:
        raise ValueError
    return content


def _replace(path: Path, content: bytes) -> None:
    """The whole file, or none of it."""
    try:
        replace_whole(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room or change the permission") from None
