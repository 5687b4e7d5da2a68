"""The page says what the certificate says, never more, and is safe to open whatever the certificate's words are."""

import base64
import functools
import hashlib
import json
import math
import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from tacit.privacy import Constant, Grouped, Ledger, Linear, PrivacyPlan, UserError, certificate_of, sign, verified
from tacit.privacy.ledger import SORTED
from tacit.privacy.meaning import most_accuracy, most_true_positives
from tacit.privacy.signature import _SEAL, Verified
from tacit.report.certificate_page import _factor, _percent, _probability, certificate_page, write_certificate_page

WHEN = datetime(2026, 3, 1, 9, 30, tzinfo=UTC)
HOSTILE = "</style></title><script>alert('1')</script><img src=x onerror=\"alert(2)\">&lt;\u202e\u0000\ud800"


def found(kind="plain"):
    return made(kind)


@functools.cache
def made(kind):
    noise = Linear(3.0, 1.0) if kind == "many levels" else Constant(1.0)
    plan = PrivacyPlan(sample_rate=0.1, steps=10, noise=noise, whole_releases=(8.0,), expected_batch_size=4)
    if kind == "grouped":
        plan = PrivacyPlan(sample_rate=0.1, steps=10, clipping=Grouped((("a",), ("b",)), (1.0, 1.0)))
    facts = {"examples": 1234, "reproducible": kind == "void", "data": "scans", "model": "small-cnn"}
    ledger = Ledger.in_memory(plan, delta=1e-5, **facts)
    if plan.whole_releases:
        ledger.record_whole_release(noise_multiplier=8.0, what="means")
    if kind == "void":
        ledger.record_disclosure("the training loss")
    for step in range(10):
        sampled_by = SORTED if kind == "none" else "tacit"
        ledger.record_release(
            noise_multiplier=0.2 if kind == "large" else plan.noise_multiplier(step),
            sample_rate=0.1,
            sampled_by=sampled_by,
        )
    ledger.record_model("ab" * 32)
    return Verified(certificate_of(ledger.entries), None, False, _SEAL)


ATTRIBUTES = [
    "lang",
    "charset",
    "http-equiv",
    "content",
    "name",
    "class",
    "scope",
]  # none that fetches or runs anything
KINDS = ["plain", "void", "none", "large", "many levels", "grouped"]


class Page(HTMLParser):
    """The text of a page, its tags and their attributes; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, content):
        super().__init__()
        self.open, self.tags, self.words, self.style = [], [], [], ""
        self.feed(content)
        self.close()
        assert self.open == []
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)


def page(kind="plain"):
    return Page(certificate_page(found(kind), checked=WHEN))


@pytest.mark.parametrize("kind", KINDS)
def test_it_holds_no_script_and_asks_nobody_for_anything(kind):
    shown = page(kind)
    assert not {tag for tag, _ in shown.tags} & {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "form",
        "base",
        "a",
    }
    assert {name for _, attributes in shown.tags for name in attributes} == set(ATTRIBUTES)
    assert not re.search(r"url\(|@import|http|//", shown.style)


def test_its_policy_allows_its_own_style_and_nothing_else():
    shown = page()
    policy = next(a["content"] for tag, a in shown.tags if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(shown.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def hostile(value, key=None):
    if isinstance(value, dict):
        return {(name if key != "facts" else name + HOSTILE): hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("kind", KINDS)
def test_no_string_of_a_certificate_becomes_part_of_the_page_but_as_text(kind):
    certificate = hostile(found(kind).certificate)
    certificate["facts"]["model"] = certificate["facts"]["data"] = HOSTILE
    content = certificate_page(Verified(certificate, HOSTILE, False, _SEAL), checked=WHEN)
    content.encode("utf-8")
    shown = Page(content)
    assert {tag for tag, _ in shown.tags} == {tag for tag, _ in page(kind).tags}
    visible = HOSTILE.replace("\u202e", r"\u202e").replace("\0", r"\u0000").replace("\ud800", r"\ud800")
    assert shown.text.count(visible) >= 10


def test_the_numbers_are_the_certificates_and_what_follows_from_them_rounded_up():
    certificate, shown = found().certificate, page()
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    assert f"at most {_factor(epsilon)} times" in shown.text
    for bound in (most_accuracy(epsilon, delta), *(most_true_positives(epsilon, delta, f) for f in (0.01, 0.001))):
        text = _percent(bound)
        assert text in shown.text
        assert bound <= float(text.rstrip("%")) / 100 + 1e-9
    for text in (
        certificate["statement"],
        certificate["model_sha256"],
        certificate["ledger"]["head"],
        "1,234 examples",
    ):
        assert text in shown.text
    for text in [*certificate["caveats"], *certificate["released"], str(epsilon), "10 of 10 planned", "1 March 2026"]:
        assert text in shown.text


def test_valid_or_not_stands_first_with_every_reason():
    for kind, verdict in (("plain", "✓ Valid for release"), ("void", "✗ Not valid for release")):
        text = page(kind).text
        assert verdict in text
        assert text.index(verdict) < text.index("What is guaranteed")
    text = page("void").text
    for reason in found("void").certificate["void_because"]:
        assert 0 < text.index(reason) < text.index("What is guaranteed")
    assert text.count("This would hold but for the reasons above.") == 2
    assert "✓" not in text
    assert "a known seed" in text
    assert "operating system" in page().text


def test_where_no_epsilon_holds_no_number_is_given():
    text = page("none").text
    assert "no guarantee holds" in text
    assert "Nothing." in text
    assert "attack" not in text.partition("The facts")[0].replace("attacks on their last bits", "")
    assert "%" not in text


def test_an_epsilon_that_rules_out_little_is_called_so():
    assert "rules out very little" in page("large").text
    assert "rules out very little" not in page().text


def test_many_levels_of_noise_are_summed_up():
    assert "from 1 to 3, in 10 levels" in page("many levels").text


def test_the_signature_is_told_as_it_is(tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    ledger = Ledger.create(tmp_path / "ledger.jsonl", PrivacyPlan(sample_rate=0.1, steps=1), delta=1e-5)
    ledger.record_release(noise_multiplier=1.0, sample_rate=0.1, sampled_by="tacit")
    ledger.close()
    (tmp_path / "certificate.json").write_text(json.dumps(certificate_of(ledger.entries)))
    assert "not signed" in Page(certificate_page(verified(tmp_path))).text
    key = sign(tmp_path, Ed25519PrivateKey.from_private_bytes(bytes(32))).signed_by
    unknown = Page(certificate_page(verified(tmp_path))).text
    assert f"signed by {key} (nobody has said whose key that is)" in unknown
    assert f"tacit verify RUN_DIR --public-key {key}" in unknown
    assert "signed by the expected key" in Page(certificate_page(verified(tmp_path, public_key=key))).text


def test_a_long_fact_is_cut_and_says_so():
    certificate = {**found().certificate, "facts": {"note": "x" * 5000}}
    text = Page(certificate_page(Verified(certificate, None, False, _SEAL))).text
    assert "(5,000 characters in certificate.json)" in text
    assert "x" * 601 not in text


def test_it_is_made_of_a_verified_certificate_alone():
    with pytest.raises(TypeError, match="verified"):
        certificate_page(found().certificate)


def test_it_is_written_where_asked_or_the_place_is_named(tmp_path):
    written = write_certificate_page(found(), tmp_path / "page.html", checked=WHEN)
    assert written.read_text(encoding="utf-8") == certificate_page(found(), checked=WHEN)
    for place, says in (("page.pdf", "a page is a file"), ("no/page.html", "make it first")):
        with pytest.raises(UserError, match=says):
            write_certificate_page(found(), tmp_path / place)
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match="a page is a file"):
        write_certificate_page(found(), tmp_path / "folder.html")


@pytest.mark.parametrize("number", [1e-9, 0.01, 0.5, 1.0, 2.3025, 3.0, 6.9, 13.8, 13.9, 50.0, 700.0])
def test_what_is_shown_is_never_below_what_holds(number):
    factor = _factor(number).replace(",", "")
    mantissa, _, exponent = factor.partition(" × 10<sup>")
    assert float(mantissa) * 10.0 ** int(exponent.rstrip("</sup>") or 0) >= math.exp(number) * (1 - 1e-8)
    share = min(number / 1000, 1.0)
    assert float(_percent(share).rstrip("%")) / 100 >= share * (1 - 1e-6) - 1e-12
    shown, _, inverse = _probability(share).partition(" (1 in ")
    assert float(shown) >= share * (1 - 1e-8)
    assert not inverse or 1 / int(inverse.rstrip(")").replace(",", "")) >= share * (1 - 1e-8)
