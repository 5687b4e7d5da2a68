from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """An empty cache: no test reads or writes the user's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TACIT_CACHE", str(folder))
    return folder
