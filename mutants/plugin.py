"""For pytest in the copy: failing examples are not made smaller, which takes long, and it is the copy that is tested."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

# Nor does a machine that is busy fail a test.
settings.register_profile(
    "mutants",
    phases=[Phase.explicit, Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mutants")


def pytest_configure(config: pytest.Config) -> None:
    import tacit

    here = Path(__file__).resolve().parent
    if not Path(tacit.__file__).resolve().is_relative_to(here):
        raise pytest.UsageError(f"tacit was imported from {tacit.__file__}, not from the copy in {here}")
