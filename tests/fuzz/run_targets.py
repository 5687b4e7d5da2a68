"""Targets in a run directory that somebody else may have made: ledger, certificate, signature, and the keys beside them."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tacit.privacy import Ledger, PrivacyPlan, certificate_of
from tacit.privacy.beside import Adaptive
from tacit.privacy.clipping import Automatic, Flat, Grouped
from tacit.privacy.composition import composed_certificate
from tacit.privacy.driven import LossDriven
from tacit.privacy.ledger import _ORIGIN, _line, _sealed, canonical, read_ledger
from tacit.privacy.schedules import Linear
from tacit.privacy.signature import load_key, public_key_of, sign, signature_of, signer_of, verified
from tacit.privacy.validation import UserError
from tacit.report.certificate_page import certificate_page
from tacit.training.directory import read_metrics

from .target import Target, workshop, written

WORDS = (
    *b'{ } [ ] : , " null NaN Infinity 1e400 "kind":"release" "kind":"automatic","of": "kind":"whole-release" "what":'.split(),
    *b'"steps":1000000000000 "sample_rate":1e-300 "noise_multiplier": "sampled_by":"tacit" "facts":{"examples":'.split(),
    *rb'\u001b[2J \ud800 "entry": "hash": "epochs": "multipliers":['.split(),
    *(b"\n", b"[" * 3000, b'{"a":' * 400),
)


def _ledger(plan: PrivacyPlan, multipliers: list[float], **facts: Any) -> Ledger:
    ledger = Ledger.in_memory(plan, delta=1e-5, **facts)
    for sigma in multipliers:
        ledger.record_release(noise_multiplier=sigma, sample_rate=plan.sample_rate, sampled_by="tacit")
    return ledger


@cache
def ledgers() -> list[list[dict[str, Any]]]:
    """Entries of honest runs of several kinds."""
    flat = _ledger(PrivacyPlan(sample_rate=0.1, steps=3, expected_batch_size=10), [1.0] * 3, examples=100, data="toy")
    flat.record_disclosure("the training loss")
    flat.record_model("0" * 64)
    grouped = Grouped((("a.*",), ("*",)), (1.0, 2.0))
    falling = _ledger(
        PrivacyPlan(sample_rate=0.5, steps=2, clipping=Automatic(grouped), noise=Linear(2.0, 1.0)), [2.0, 1.0]
    )
    driven = LossDriven(1.0, 3.0, order=8.0, budget=1.0)
    adaptive = _ledger(
        PrivacyPlan(sample_rate=0.01, steps=5, clipping=Adaptive(1.0), noise=driven), [1.0], reproducible=True
    )
    whole = Ledger.in_memory(
        PrivacyPlan(sample_rate=1.0, steps=1, clipping=Flat(0.1), whole_releases=(8.0,)), delta=1e-5
    )
    whole.record_whole_release(noise_multiplier=8.0, what="statistics")
    return [list(ledger.entries) for ledger in (flat, falling, adaptive, whole)]


def ledger(content: bytes) -> None:
    read_ledger(_folder() / written("run/ledger.jsonl", content).name)


def ledger_seeds() -> list[bytes]:
    return [b"".join(map(_line, entries)) for entries in ledgers()]


def rechained(content: bytes) -> bytes:
    """Every line that is JSON, numbered and hashed anew, so that the chain is whole whatever the lines say."""
    lines: list[bytes] = []
    previous = _ORIGIN
    for line in content.splitlines():
        try:
            fields = {key: value for key, value in json.loads(line).items() if key != "hash"}
            entry = _sealed({**fields, "entry": len(lines), "previous": previous})
            lines.append(_line(entry))
            previous = entry["hash"]
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return b"".join(lines)


def run_directory(content: bytes) -> None:
    """A ledger whose chain is whole, with its certificate: verified, shown as a page, and composed with another run."""
    folder = _folder()
    chained = rechained(content)
    written("run/ledger.jsonl", chained)
    entries = [json.loads(line) for line in chained.splitlines()]
    written("run/certificate.json", _certificate(entries))
    (folder / "certificate.sig").unlink(missing_ok=True)
    found = verified(folder)
    certificate_page(found)
    composed_certificate([folder, _other()])


def _certificate(entries: list[dict[str, Any]]) -> bytes:
    try:
        return json.dumps(certificate_of(entries)).encode()
    except (Exception, RecursionError):  # what is wrong with the entries is for `verified` to say
        shell = {"ledger": {"entries": len(entries), "head": entries[-1]["hash"] if entries else ""}, "epsilon": 1.0}
        return digested(canonical(shell))


@cache
def _other() -> Path:
    """Another run, which is honest."""
    folder = workshop() / "other"
    folder.mkdir()
    (folder / "ledger.jsonl").write_bytes(b"".join(map(_line, ledgers()[0])))
    (folder / "certificate.json").write_text(json.dumps(certificate_of(ledgers()[0])))
    return folder


def _folder() -> Path:
    folder = workshop() / "run"
    folder.mkdir(exist_ok=True)
    return folder


def certificate(content: bytes) -> None:
    """A certificate beside an honest ledger, to be verified and signed."""
    folder = _folder()
    written("run/ledger.jsonl", ledger_seeds()[0])
    written("run/certificate.json", content)
    (folder / "certificate.sig").unlink(missing_ok=True)
    certificate_page(verified(folder))
    sign(folder, _key())


def certificate_seeds() -> list[bytes]:
    return [json.dumps(certificate_of(ledgers()[0]), indent=2).encode()]


def digested(content: bytes) -> bytes:
    """With the digest that fits the other fields, whatever they say."""
    try:
        fields = {key: value for key, value in json.loads(content).items() if key != "digest"}
        return json.dumps({**fields, "digest": hashlib.sha256(canonical(fields)).hexdigest()}).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content


@cache
def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes(32))


SIGNED = b'{"a": 1}'


def signature(content: bytes) -> None:
    signer_of(SIGNED, written("signature", content))


@cache
def signature_seeds() -> list[bytes]:
    from tacit.privacy.signature import FORMAT, public_hex

    fields = {
        "format": FORMAT,
        "certificate_sha256": hashlib.sha256(SIGNED).hexdigest(),
        "public_key": public_hex(_key()),
        "signature": signature_of(_key(), SIGNED).hex(),
    }
    return [canonical(fields) + b"\n"]


def key(content: bytes) -> None:
    """A file as a private key, then as a public one."""
    path = written("key", content)
    path.chmod(0o600)
    with suppress(UserError):
        load_key(path, lambda: "passphrase")
    public_key_of(str(path))


@cache
def key_seeds() -> list[bytes]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    secret = serialization.BestAvailableEncryption(b"passphrase")
    plain = serialization.NoEncryption()
    curve, other = ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)
    return [
        _key().private_bytes(pem, pkcs8, plain),
        _key().private_bytes(pem, pkcs8, secret),
        _key().public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
        _key().private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain),
        curve.private_bytes(pem, pkcs8, plain),
        other.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo),
    ]


def metrics(content: bytes) -> None:
    for row in read_metrics(written("metrics", content)):
        assert isinstance(row, dict)


TARGETS = [
    Target("ledger", ledger, ledger_seeds, WORDS, rechained),
    Target("run", run_directory, ledger_seeds, WORDS, seconds=60.0, inputs=20),
    Target("certificate", certificate, certificate_seeds, WORDS, digested, seconds=20.0, inputs=40),
    Target("signature", signature, signature_seeds, WORDS),
    Target(
        "key",
        key,
        key_seeds,
        (b"-----BEGIN PUBLIC KEY-----\n", b"-----BEGIN PRIVATE KEY-----\n", b"Proc-Type: 4,ENCRYPTED\n"),
    ),
    Target("metrics", metrics, lambda: [b'{"epoch": 1, "test_accuracy": 0.5}\n{"epoch": 2}\n'], WORDS),
]
