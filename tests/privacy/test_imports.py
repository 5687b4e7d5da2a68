"""Accounts, calibrations and verifications answer at once: they do not wait for torch."""

import subprocess
import sys

import pytest

LIGHT = [
    "plan",
    "accounting",
    "ledger",
    "certificate",
    "clipping",
    "composition",
    "schedules",
    "validation",
    "randomness",
    "sampling",
    "normals",
    "statistics",
    "beside",
    "curricula",
    "driven",
    "dice",
    "spending",
    "signature",
    "schema",
    "files",
]


def modules_after(statement):
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_nothing_but_the_mechanism_imports_torch():
    loaded = modules_after("; ".join(f"import tacit.privacy.{name}" for name in LIGHT))
    assert {f"tacit.privacy.{name}" for name in LIGHT} <= loaded
    assert "torch" not in loaded


def test_using_the_plan_and_the_certificate_does_not_import_torch():
    loaded = modules_after(
        "from tacit.privacy import PrivacyPlan, Ledger, certificate_of as c; p = PrivacyPlan(sample_rate=0.1, steps=1); "
        "l = Ledger.in_memory(p, delta=1e-5); l.record_release(noise_multiplier=2.0, sample_rate=0.1); c(l.entries)"
    )
    assert "tacit.privacy.certificate" in loaded
    assert "torch" not in loaded


def test_the_core_imports_nothing_of_the_rest_of_tacit():
    loaded = modules_after("; ".join(f"import tacit.privacy.{name}" for name in [*LIGHT, "mechanism"]))
    assert "torch" in loaded  # so the checks above see it where it is
    assert {name for name in loaded if name.startswith("tacit.")} <= {"tacit.privacy"} | {
        f"tacit.privacy.{name}" for name in [*LIGHT, "mechanism", "_normals"]
    }


def test_every_public_name_is_there_and_no_other():
    import tacit.privacy

    for name in tacit.privacy.__all__:
        assert getattr(tacit.privacy, name).__name__ == name
    with pytest.raises(AttributeError):
        tacit.privacy.nothing_of_this_name  # noqa: B018
