"""A signature says who vouches for a certificate: it is of these bytes and by this key, or it is refused."""

import dataclasses
import functools
import hashlib
import json
import os
import re
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa, x25519

from tacit.privacy import Flat, Ledger, PrivacyPlan, UserError, certificate_of, load_key, new_key, sign, verified
from tacit.privacy import certificate as certificates
from tacit.privacy import signature as signatures
from tacit.privacy.signature import PREFIX, public_hex, public_key_of, signature_of, signer_of

PLAN = PrivacyPlan(sample_rate=0.1, steps=2, clipping=Flat(1.0), expected_batch_size=4)
KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))

# RFC 8032, section 7.1: secret key, public key, message, signature
VECTORS = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
        "4a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@functools.cache
def files():
    """An honest run's ledger and certificate."""
    ledger = Ledger.in_memory(PLAN, delta=1e-5, examples=40)
    for _ in range(2):
        ledger.record_release(noise_multiplier=1.0, sample_rate=0.1, sampled_by="tacit")
    lines = b"".join(
        json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n" for entry in ledger.entries
    )
    return lines, json.dumps(certificate_of(ledger.entries), indent=2).encode() + b"\n"


@pytest.fixture
def run(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    ledger, certificate = files()
    (directory / "ledger.jsonl").write_bytes(ledger)
    (directory / "certificate.json").write_bytes(certificate)
    return directory


def pem(key, passphrase=None):
    encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def public_pem(key):
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.mark.parametrize("vector", VECTORS)
def test_signatures_are_those_of_rfc_8032(vector, monkeypatch, tmp_path):
    secret, public, message, expected = (bytes.fromhex(part) for part in vector)
    path = tmp_path / "key.pem"
    path.write_bytes(pem(ed25519.Ed25519PrivateKey.from_private_bytes(secret)))
    path.chmod(0o600)
    key = load_key(path)
    assert public_hex(key) == public.hex()
    assert signature_of(key, message) != expected, "the prefix is part of it"
    monkeypatch.setattr(signatures, "PREFIX", b"")
    assert signature_of(key, message) == expected


def test_a_signed_certificate_is_verified_and_says_by_whom(run):
    assert verified(run).signed_by is None
    assert verified(run).signer == "not signed"
    before = (run / "certificate.json").read_bytes()
    assert sign(run, KEY).signed_by == public_hex(KEY)
    assert (run / "certificate.json").read_bytes() == before, "the certificate stays what the ledger gives"
    unknown, known = verified(run), verified(run, public_key=public_hex(KEY))
    assert (unknown.signed_by, unknown.expected) == (public_hex(KEY), False)
    assert (known.signed_by, known.expected) == (public_hex(KEY), True)
    assert unknown.signer == f"signed by {public_hex(KEY)} (nobody has said whose key that is)"
    assert known.certificate == json.loads(before)


def test_others_can_check_the_signature_without_tacit(run, tmp_path):
    """The message is the prefix and the file; whoever has Ed25519 can check it."""
    sign(run, KEY)
    fields = json.loads((run / "certificate.sig").read_text())
    content = (run / "certificate.json").read_bytes()
    assert set(fields) == {"format", "certificate_sha256", "public_key", "signature"}
    assert fields["certificate_sha256"] == hashlib.sha256(content).hexdigest()
    key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(fields["public_key"]))
    key.verify(bytes.fromhex(fields["signature"]), PREFIX + content)


def test_another_key_than_the_one_asked_for_is_refused_and_so_is_no_signature(run):
    with pytest.raises(UserError, match="nobody signed"):
        verified(run, public_key=public_hex(KEY))
    sign(run, OTHER)
    with pytest.raises(UserError, match=f"by another key, {public_hex(OTHER)}, not by {public_hex(KEY)}"):
        verified(run, public_key=public_hex(KEY))


def test_changing_any_single_byte_of_the_signature_fails(run):
    sign(run, KEY)
    path = run / "certificate.sig"
    content, signed = path.read_bytes(), (run / "certificate.json").read_bytes()
    assert signer_of(signed, path) == public_hex(KEY)
    for position, byte in enumerate(content):
        for other in {byte ^ 1, byte ^ 0x20, ord("0")} - {byte}:
            path.write_bytes(content[:position] + bytes([other]) + content[position + 1 :])
            with pytest.raises(UserError):
                signer_of(signed, path)


def test_removing_or_inserting_any_single_byte_of_the_signature_fails(run):
    sign(run, KEY)
    path = run / "certificate.sig"
    content, signed = path.read_bytes(), (run / "certificate.json").read_bytes()
    for position in range(len(content) + 1):
        shorter = content[:position] + content[position + 1 :]
        for changed in [content[:position] + b" " + content[position:], *([shorter] if shorter != content else [])]:
            path.write_bytes(changed)
            with pytest.raises(UserError):
                signer_of(signed, path)


def test_a_signature_is_of_every_single_byte_of_the_certificate(run):
    """Also of those changes that leave every value as it was, such as 1E-05 for 1e-05."""
    sign(run, KEY)
    path, content = run / "certificate.sig", (run / "certificate.json").read_bytes()
    for position, byte in enumerate(content):
        with pytest.raises(UserError):
            signer_of(content[:position] + bytes([byte ^ 0x20]) + content[position + 1 :], path)
    for cut in range(len(content)):
        with pytest.raises(UserError):
            signer_of(content[:cut], path)


def test_a_certificate_of_equal_values_in_other_bytes_does_not_pass_as_signed(run):
    sign(run, KEY)
    path = run / "certificate.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(UserError, match="of another certificate"):
        verified(run)


def test_a_hash_made_anew_does_not_help(run):
    sign(run, KEY)
    path = run / "certificate.sig"
    fields, content = json.loads(path.read_text()), b"{}"
    write(path, {**fields, "certificate_sha256": hashlib.sha256(content).hexdigest()})
    with pytest.raises(UserError, match="no signature of this certificate"):
        signer_of(content, path)


def write(path, fields):
    path.write_bytes(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n")


def test_a_signature_of_the_bytes_without_the_prefix_is_none(run):
    """What the key signs elsewhere never passes for a certificate's."""
    sign(run, KEY)
    path, content = run / "certificate.sig", (run / "certificate.json").read_bytes()
    for message in (content, b"tacit" + content, hashlib.sha256(content).digest()):
        write(path, {**json.loads(path.read_text()), "signature": KEY.sign(message).hex()})
        with pytest.raises(UserError, match="no signature of this certificate"):
            verified(run)


FORGED = {
    "nothing": b"",
    "not JSON": b"signed, honestly\n",
    "a list": b"[]\n",
    "no fields": b"{}\n",
    "deep": b"[" * 50_000,
    "long": b" " * 100_000,
    "not ASCII": '{"format":"é"}\n'.encode(),
    "numbers": b'{"certificate_sha256":1,"format":"tacit-signature/1","public_key":2,"signature":3}\n',
    "nulls": b'{"certificate_sha256":null,"format":"tacit-signature/1","public_key":null,"signature":null}\n',
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
def test_hostile_text_is_a_users_error_and_never_no_signature(run, content):
    (run / "certificate.sig").write_bytes(content)
    with pytest.raises(UserError, match="not a signature that tacit wrote"):
        verified(run)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "tacit-signature/2"},
        {"public_key": public_hex(KEY)[:-1]},
        {"public_key": public_hex(KEY).upper()},
        {"public_key": f" {public_hex(KEY)[1:]}"},
        {"signature": "00" * 63 + "0"},
        {"signature": "00" * 64 + " "},
        {"by": "me"},
    ],
)
def test_a_field_in_another_form_is_refused(run, change):
    sign(run, KEY)
    path = run / "certificate.sig"
    write(path, {**json.loads(path.read_text()), **change})
    with pytest.raises(UserError, match="not a signature that tacit wrote"):
        verified(run)


def test_a_key_that_stands_twice_is_refused(run):
    sign(run, KEY)
    path = run / "certificate.sig"
    text = path.read_text()
    path.write_text(text.replace("{", '{"public_key":"' + public_hex(OTHER) + '",', 1))
    with pytest.raises(UserError, match="not a signature that tacit wrote"):
        verified(run)


def test_a_signature_longer_by_the_order_of_the_group_is_refused(run):
    """S + L would be the same number modulo L: RFC 8032 allows only the smaller."""
    sign(run, KEY)
    path = run / "certificate.sig"
    fields = json.loads(path.read_text())
    order = 2**252 + 27742317777372353535851937790883648493
    signature = bytes.fromhex(fields["signature"])
    other = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    write(path, {**fields, "signature": (signature[:32] + other).hex()})
    with pytest.raises(UserError, match="no signature"):
        verified(run)


@pytest.mark.parametrize("name", ["certificate.sig", "certificate.json", "key.pem"])
def test_a_file_of_a_terabyte_is_refused_without_being_read(run, name):
    sign(run, KEY)
    with open(run / name, "ab") as file:
        os.truncate(file.fileno(), 2**40)
    with pytest.raises(UserError):
        load_key(run / name) if name == "key.pem" else verified(run)


def test_a_directory_in_a_files_place_is_a_users_error(run):
    for name in ("certificate.sig", "model.safetensors"):
        (run / name).mkdir()
        with pytest.raises(UserError):
            verified(run)
        (run / name).rmdir()
    (run / "certificate.sig").symlink_to("nowhere")
    with pytest.raises(UserError, match="not a signature"):
        verified(run)


def test_only_what_verifies_is_signed(run):
    path = run / "certificate.json"
    path.write_bytes(path.read_bytes().replace(b'"epsilon": ', b'"epsilon": 0.'))
    with pytest.raises(UserError):
        sign(run, KEY)
    assert sorted(item.name for item in run.iterdir()) == ["certificate.json", "ledger.jsonl"]


def test_a_signature_by_another_key_is_left_alone_and_an_old_one_is_replaced(run):
    sign(run, OTHER)
    before = (run / "certificate.sig").read_bytes()
    with pytest.raises(UserError, match="another key"):
        sign(run, KEY)
    assert (run / "certificate.sig").read_bytes() == before
    sign(run, OTHER)
    assert (run / "certificate.sig").read_bytes() == before, "the same signature"
    write(run / "certificate.sig", {**json.loads(before), "certificate_sha256": "0" * 64})
    assert sign(run, KEY).signed_by == verified(run).signed_by == public_hex(KEY)


def test_what_is_signed_is_what_was_verified_even_if_the_file_changes_meanwhile(run, monkeypatch):
    path = run / "certificate.json"
    honest, compute = path.read_bytes(), certificates.certificate_of

    def exchanged(entries):
        path.write_bytes(b'{"epsilon": 0.001}')
        return compute(entries)

    monkeypatch.setattr(certificates, "certificate_of", exchanged)
    sign(run, KEY)
    assert signer_of(honest, run / "certificate.sig") == public_hex(KEY)


def test_nothing_but_verification_makes_a_verified_certificate(run):
    found = verified(run)
    with pytest.raises(TypeError):
        dataclasses.replace(found, signed_by=public_hex(KEY))


def test_a_new_key_is_its_owners_alone_and_never_overwrites(tmp_path):
    path = tmp_path / "key.pem"
    umask = os.umask(0)
    try:
        public = new_key(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert public_hex(load_key(path)) == public
    before = path.read_bytes()
    with pytest.raises(UserError, match="never overwritten"):
        new_key(path)
    assert path.read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="exists already"):
        new_key(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    assert new_key(tmp_path / "another.pem") != public
    with pytest.raises(UserError, match="cannot be written"):
        new_key(tmp_path / "no" / "key.pem")


def test_an_encrypted_key_needs_its_passphrase(tmp_path):
    path = tmp_path / "key.pem"
    public = new_key(path, "open sesame")
    assert b"ENCRYPTED" in path.read_bytes()
    assert public_hex(load_key(path, lambda: "open sesame")) == public
    for wrong in ("open barley", "", "x" * 5000):
        with pytest.raises(UserError, match="passphrase is wrong"):
            load_key(path, lambda wrong=wrong: wrong)
    with pytest.raises(UserError, match="is encrypted"):
        load_key(path)
    with pytest.raises(UserError, match="must not be empty"):
        new_key(tmp_path / "empty.pem", "")
    assert not (tmp_path / "empty.pem").exists()


def test_a_key_that_others_may_read_is_a_warning(tmp_path):
    path = tmp_path / "key.pem"
    new_key(path)
    path.chmod(0o640)
    with pytest.warns(UserWarning, match="others may read"):
        load_key(path)


RSA = rsa.generate_private_key(65537, 1024)
WRONG_KEYS = {
    "RSA": (pem(RSA), r"another kind \(RSA"),
    "EC": (pem(ec.generate_private_key(ec.SECP256R1())), "another kind"),
    "Ed448": (pem(ed448.Ed448PrivateKey.generate()), "another kind"),
    "X25519": (pem(x25519.X25519PrivateKey.generate()), "another kind"),
    "public": (public_pem(KEY), "holds no private key"),
    "OpenSSH": (
        KEY.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
        "OpenSSH",
    ),
    "garbage": (b"\0\xff" * 40, "not a private key"),
    "nothing": (b"", "not a private key"),
    "cut": (pem(KEY)[:60], "not a private key"),
    "damaged": (pem(KEY).replace(b"MC4C", b"MC4D"), "not a private key"),
    "huge": (b"x" * 2**17, "cannot be read"),
}


@pytest.mark.parametrize("kind", WRONG_KEYS)
def test_another_file_than_an_ed25519_key_is_refused_in_words(tmp_path, kind):
    content, says = WRONG_KEYS[kind]
    path = tmp_path / "key.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match=says) as error:
        load_key(path, lambda: "")
    secret = re.sub(rb"-----[^-]+-----|\s", b"", content)
    assert not secret or secret.decode("latin-1")[:40] not in str(error.value)


def test_a_public_key_is_digits_or_a_pem_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "public.pem"
    path.write_bytes(public_pem(KEY))
    assert public_key_of(str(path)) == public_key_of(public_hex(KEY)) == public_key_of(public_hex(KEY).upper())
    for content, says in (
        (pem(KEY), "must stay with its owner"),
        (public_pem(RSA), "another kind"),
        (b"nothing", "holds no public key"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=says):
            public_key_of(str(path))
    for wrong in ("", "abc", "g" * 64, public_hex(KEY)[:-1], public_hex(KEY) + "0", "²" * 64, "a" * 10_000, "\0"):
        with pytest.raises(UserError, match="64 hexadecimal digits"):
            public_key_of(wrong)


def test_openssl_agrees(run, tmp_path):
    """The recipe of docs/guarantee.md, where there is an openssl that can do it."""
    sign(run, KEY)
    fields = json.loads((run / "certificate.sig").read_text())
    (tmp_path / "public.pem").write_bytes(public_pem(KEY))
    (tmp_path / "signature").write_bytes(bytes.fromhex(fields["signature"]))
    (tmp_path / "message").write_bytes(PREFIX + (run / "certificate.json").read_bytes())
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "public.pem", "-rawin", "-in", "message"]
    try:
        done = subprocess.run(
            [*command, "-sigfile", "signature"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("there is no openssl here")
    if "rawin" in done.stderr:
        pytest.skip("this openssl is too old for Ed25519")
    assert "Signature Verified Successfully" in done.stdout
