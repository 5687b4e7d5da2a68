"""The catalogue of privacy bugs: `make mutants` makes them; here, that each can still be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants.catalogue import Mutant, catalogue

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("mutant", catalogue(None), ids=lambda mutant: mutant.name)
def test_every_bug_of_the_catalogue_fits_the_tree_and_names_tests_that_are_there(mutant: Mutant) -> None:
    source = (ROOT / "src" / "tacit" / mutant.file).read_text()
    assert mutant.applied(source) != source
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
