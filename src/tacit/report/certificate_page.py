"""A verified certificate as a page for people: one HTML file, without scripts, that asks nobody else for anything.

It is for those who decide whether a model may be given to others, and begins with what is guaranteed in plain words. Every string
is escaped, and what cannot be seen in it is made visible: facts of a run are somebody else's words.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tacit import __version__
from tacit.privacy.files import expanded
from tacit.privacy.meaning import factor_of, most_accuracy, most_true_positives, of_several_examples
from tacit.privacy.signature import Verified
from tacit.privacy.validation import UserError, visible

_FALSE_ALARMS = (0.01, 0.001)
_LONGEST = 600  # characters that are shown of a fact
_MOST_LEVELS = 6  # noise multipliers that are listed one by one
_SHOWN_ELSEWHERE = ("examples", "reproducible", "evaluated_on_held_out")
_USELESS = 0.99  # whoever may be right so often is hardly bounded
_VALID = (
    "Nobody can know the noise that was added, every batch was drawn by the sampler, and nothing else that was computed from the "
    "training data was disclosed. Whether epsilon and delta are small enough, those must decide who are responsible for the data."
)
_BUT_FOR = "This would hold but for the reasons above."


def write_certificate_page(found: Verified, path: str | Path, *, checked: datetime | None = None) -> Path:
    """Write the page of a verified certificate; returns where.

    >>> from tacit.privacy.signature import verified
    >>> write_certificate_page(verified("nowhere"), "certificate.html")
    Traceback (most recent call last):
    ...
    tacit.privacy.validation.UserError: there is no run directory at nowhere
    """
    given = expanded(path)
    if given.suffix.lower() not in (".html", ".htm") or given.is_dir():
        raise UserError(f"a page is a file that ends in .html, not {str(path)!r}")
    if not given.parent.is_dir():
        raise UserError(f"there is no folder {str(given.parent)!r} for the page {given.name!r}; make it first")
    try:
        given.write_text(certificate_page(found, checked=checked), encoding="utf-8")
    except OSError as error:
        raise UserError(f"the page {given} cannot be written: {error.strerror}") from None
    return given


def certificate_page(found: Verified, *, checked: datetime | None = None) -> str:
    """The page itself; `checked` is when the certificate was verified, by default now.

    A certificate that is not verified has no page:

    >>> certificate_page({"epsilon": 0.1})
    Traceback (most recent call last):
    ...
    TypeError: a page is made of a certificate that was verified
    """
    if not isinstance(found, Verified):
        raise TypeError("a page is made of a certificate that was verified")
    when = (checked or datetime.now(UTC)).astimezone(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    style = Path(__file__).with_name("certificate.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    certificate = found.certificate
    body = [
        "<h1>Privacy certificate</h1>",
        f'<p class="under">{_about(certificate)}. Verified on {when}; {_text(_signed(found))}.</p>',
        _verdict(certificate),
        _meaning(certificate),
        _attacker(certificate),
        _caveats(certificate),
        _facts(found),
        _again(found),
        f"<footer>Made by tacit {_text(__version__)} from a certificate that it had verified, on {when}. This page is a copy for "
        "reading: what counts is certificate.json with its ledger.</footer>",
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Privacy certificate: {_text(_short_verdict(certificate))}</title>\n<style>{style}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(part for part in body if part) + "\n</main>\n</body>\n</html>\n"
    )


def _about(certificate: dict[str, Any]) -> str:
    facts = certificate["facts"]
    model = f"Model {_text(facts['model'])}" if "model" in facts else "A model"
    data = f", trained on {_text(facts['data'])}" if "data" in facts else ""
    count = facts.get("examples")
    return f"{model}{data}{f' ({count:,} examples)' if type(count) is int else ''}"


def _signed(found: Verified) -> str:
    if found.signed_by is None:
        return "not signed"
    return "signed by the expected key" if found.expected else "signed, but nobody has said whose key it is"


def _short_verdict(certificate: dict[str, Any]) -> str:
    if certificate["epsilon"] is None:
        return "no guarantee"
    return "valid for release" if certificate["valid_for_release"] else "not valid for release"


def _verdict(certificate: dict[str, Any]) -> str:
    """Valid or not, why not, and the two numbers."""
    epsilon, void = certificate["epsilon"], certificate["void_because"]
    heading = "✓ Valid for release" if certificate["valid_for_release"] else "✗ Not valid for release"
    if epsilon is None:
        heading = "✗ Not valid for release: no guarantee holds"
    said = f"<p>Because</p>{_list(void)}" if void else f"<p>{_VALID}</p>"
    if epsilon is not None and most_accuracy(epsilon, certificate["delta"]) >= _USELESS:
        said = f"<p><strong>So large an epsilon rules out very little.</strong></p>{said}"
    numbers = [
        ("epsilon", "none" if epsilon is None else f"{_up(epsilon, 3):.3f}"),
        ("delta", _decimal(certificate["delta"])),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in numbers)
    return (
        f'<section class="verdict{"" if certificate["valid_for_release"] else " void"}"><h2>{heading}</h2>'
        f'<dl class="numbers">{shown}</dl>{said}</section>'
    )


def _meaning(certificate: dict[str, Any]) -> str:
    """The guarantee in plain words, and then in the certificate's own."""
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    quoted = f"<p>In the words of the certificate:</p><blockquote>{_text(certificate['statement'])}</blockquote>"
    if epsilon is None:
        return (
            "<h2>What is guaranteed</h2><p><strong>Nothing.</strong> Whoever has this model, or saw it being trained, may be "
            f"able to tell which examples it learned from, and what was in them.</p>{quoted}"
        )
    unless = "" if certificate["valid_for_release"] else f"<p><strong>{_BUT_FOR}</strong></p>"
    twice, twice_delta = of_several_examples(epsilon, delta, 2)
    weaker = (
        f"the factor is then {_factor(twice)}, and the addition {_probability(twice_delta)}"
        if twice_delta < 1
        else "nothing is guaranteed then"
    )
    return (
        f"<h2>What is guaranteed</h2>{unless}<p>Take any one training example, such as one scan of one patient, and imagine the "
        "same training without it. Whatever anybody may conclude from the model, about that patient or about anything else, and "
        "whatever else they know: with the example they come to that conclusion with a probability that is "
        f"<strong>at most {_factor(epsilon)} times</strong> as large as without it, plus at most {_probability(delta)}. The same "
        f"holds the other way round. (The factor is e<sup>epsilon</sup>, the addition is delta.)</p>{quoted}"
        "<p>It protects <strong>one example</strong>. Somebody with several examples in the data is protected less: with two of "
        f"them, {weaker}. And it does not hide what is true of people in general: a model may learn that, and it may then be "
        "applied to anybody, whether they took part or not.</p>"
    )


def _attacker(certificate: dict[str, Any]) -> str:
    """The best that anybody can do who wants to know whether somebody took part."""
    epsilon, delta = certificate["epsilon"], certificate["delta"]
    if epsilon is None:
        return ""
    accuracy = most_accuracy(epsilon, delta)
    rows = [
        (
            "meets people of whom half took part, and says of each whether they did",
            f"is right about {_percent(accuracy)} of them",
            "is right about 50%",
        ),
        *(
            (
                f"is so cautious that they wrongly name only {_percent(rate)} of those who did <em>not</em> take part",
                f"finds {_percent(most_true_positives(epsilon, delta, rate))} of those who did",
                f"finds {_percent(rate)}",
            )
            for rate in _FALSE_ALARMS
        ),
    ]
    body = "".join(
        f'<tr><td>{what}</td><td class="most">{most}</td><td>{guess}</td></tr>' for what, most, guess in rows
    )
    unless = "" if certificate["valid_for_release"] else f"<p><strong>{_BUT_FOR}</strong></p>"
    return (
        "<h2>Can anybody find out who took part?</h2><p>These are upper bounds for every attack, known or not yet known, by "
        "somebody who may hold the model, all its intermediate states, and all training data but the one example. They follow "
        f'from epsilon and delta alone.</p>{unless}<table class="attacks"><thead><tr><th>An attacker who</th><th>at best</th>'
        f"<th>by mere guessing</th></tr></thead><tbody>{body}</tbody></table>"
    )


def _caveats(certificate: dict[str, Any]) -> str:
    holds = certificate["epsilon"] is not None
    heading = "What the guarantee rests on, and what it leaves out" if holds else "What else there is to know"
    return f"<h2>{heading}</h2>{_list(certificate['caveats'])}"


def _facts(found: Verified) -> str:
    certificate = found.certificate
    facts, ledger = certificate["facts"], certificate["ledger"]
    count = facts.get("examples")
    rows = [
        ("Training examples", f"{count:,}" if type(count) is int else "not recorded"),
        (
            "Epsilon",
            f"{_number(certificate['epsilon'])} at delta {certificate['delta']:g}; {_text(certificate['accountant'])}",
        ),
        ("Epsilon by RDP", _number(certificate["epsilon_rdp"])),
        ("Neighbouring data sets", _text(certificate["neighbouring_relation"])),
        ("Sampling", _sampling(certificate["sampling"])),
        ("Steps", f"{certificate['releases']:,} of {certificate['planned_releases']:,} planned"),
        ("Noise", _noise(certificate["noise"])),
        ("Clipping", _clipping(certificate["clipping"])),
        ("Source of the noise", _source(certificate)),
        ("Released", _list(certificate["released"])),
        ("Model (SHA-256)", _code(certificate["model_sha256"] or "no model was written yet")),
        ("Ledger", f"{ledger['entries']:,} entries; the last has the hash {_code(ledger['head'])}"),
        ("Digest", _code(certificate["digest"])),
        ("Signature", _text(found.signer)),
        *((f"Said by the run: {name}", _shown(facts[name])) for name in sorted(facts) if name not in _SHOWN_ELSEWHERE),
    ]
    body = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{value}</td></tr>' for name, value in rows)
    return f'<h2>The facts</h2><table class="facts"><tbody>{body}</tbody></table>'


def _again(found: Verified) -> str:
    known = f" --public-key {found.signed_by}" if found.signed_by else ""
    whose = (
        "<p>Check first, with the one who is said to have signed, that this is their key.</p>"
        if found.signed_by
        else ""
    )
    return (
        "<h2>Check it again</h2><p>Nobody needs to believe this page. With tacit installed and the run directory at hand "
        "(certificate.json and ledger.jsonl, and model.safetensors if the model is to be checked too), this computes every "
        f"number anew, and ends with exit status 0 if all of it holds:</p><pre>tacit verify RUN_DIR{_text(known)}</pre>{whose}"
        "<p>And this shows whether a file is the model that the certificate is about:</p><pre>sha256sum model.safetensors</pre>"
    )


def _sampling(sampling: dict[str, Any]) -> str:
    if sampling["kind"] == "poisson":
        return f"Poisson: in each step, each example takes part by its own coin, with probability {sampling['sample_rate']:.6g}"
    return _text(sampling["kind"])


def _noise(noise: dict[str, Any]) -> str:
    levels = noise["levels"]
    if not levels:
        return "no release of a batch was made"
    if len(levels) > _MOST_LEVELS:
        first, last = levels[0]["noise_multiplier"], levels[-1]["noise_multiplier"]
        said = f"from {first:.6g} to {last:.6g}, in {len(levels):,} levels"
    else:
        said = ", ".join(f"{level['noise_multiplier']:.6g} ({level['releases']:,} releases)" for level in levels)
    follows = "; it followed the released loss" if "follows_the_released_loss" in noise else ""
    return f"Gaussian, noise multiplier {said}{follows}"


def _clipping(clipping: dict[str, Any]) -> str:
    if "sensitivity" not in clipping:
        return f"{_text(clipping['kind'])}, beginning at a norm of {clipping['first_clipping_norm']:.6g}"
    return f"{_text(clipping['kind'])}: one example moves a sum of gradients by at most {clipping['sensitivity']:.6g}"


def _source(certificate: dict[str, Any]) -> str:
    if any("known seed" in reason for reason in certificate["void_because"]):
        return "a known seed, for research"
    return "the operating system's cryptographic randomness"


def _shown(fact: Any) -> str:
    text = fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)
    if len(text) > _LONGEST:
        return f"{_text(text[:_LONGEST])}… ({len(text):,} characters in certificate.json)"
    return _text(text)


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in items) + "</ul>"


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>"


def _text(value: object) -> str:
    """Any value as text of the page: escaped, and control and formatting characters, which nobody sees, as their numbers.

    >>> _text('<b>"A & B"</b>')
    '&lt;b&gt;&quot;A &amp; B&quot;&lt;/b&gt;'
    >>> _text("abc\\u202edef")
    'abc\\\\u202edef'
    """
    return html.escape(visible(str(value)))


def _up(number: float, decimals: int) -> float:
    """Rounded up, so as never to claim less; what is there but for the last bits of a float stays.

    >>> _up(2.9990001, 3), _up(3.0, 3)
    (3.0, 3.0)
    """
    scale = 10.0**decimals
    return math.ceil(number * scale - 1e-9) / scale


def _number(epsilon: float | None) -> str:
    return "none" if epsilon is None else f"{epsilon:.6f}".rstrip("0").rstrip(".")


def _factor(epsilon: float) -> str:
    """e^epsilon, rounded up to three digits or so.

    >>> _factor(3.0), _factor(0.1), _factor(0.0), _factor(20.0), _factor(800.0)
    ('20.1', '1.11', '1', '4.86 × 10<sup>8</sup>', 'more than 10<sup>308</sup>')
    """
    factor = factor_of(epsilon)
    if math.isinf(factor):
        return "more than 10<sup>308</sup>"
    exponent = math.floor(math.log10(factor))
    if exponent < 6:
        return f"{_up(factor, max(2 - exponent, 0)):,.{max(2 - exponent, 0)}f}" if factor > 1 else "1"
    return f"{_up(factor / 10.0**exponent, 2):.2f} × 10<sup>{exponent}</sup>"


def _probability(delta: float) -> str:
    """A small probability in words, rounded up.

    >>> _probability(1e-5), _probability(3e-5), _probability(0.3), _probability(1e-320)
    ('0.00001 (1 in 100,000)', '0.00003 (1 in 33,333)', '0.3 (1 in 3)', '1e-320')
    """
    inverse = math.floor(1 / delta + 1e-9) if delta > 1e-300 else 0  # below, it is no number
    return f"{_decimal(delta)} (1 in {inverse:,})" if inverse > 1 else _decimal(delta)


def _decimal(delta: float) -> str:
    """With three digits, rounded up; without the e of programmers, unless it is tiny.

    >>> _decimal(1e-5), _decimal(0.0123456), _decimal(1e-12)
    ('0.00001', '0.0124', '1e-12')
    """
    if delta < 1e-9:
        return f"{delta:.3g}"
    decimals = max(-math.floor(math.log10(delta)), 1)
    return f"{_up(delta * 10.0**decimals, 2) / 10.0**decimals:.{decimals + 2}f}".rstrip("0")


def _percent(share: float) -> str:
    """Rounded up to a hundredth of a per cent.

    >>> _percent(0.20086), _percent(0.01), _percent(0.999999)
    ('20.09%', '1%', '100%')
    """
    return f"{min(_up(100 * share, 2), 100.0):.2f}".rstrip("0").rstrip(".") + "%"
