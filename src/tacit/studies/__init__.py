"""Papers reproduced: each is a file of data, run and compared by one shared runner."""

from __future__ import annotations

from tacit.privacy.validation import check_choice
from tacit.studies import curricula, losing_less, private_optimizers, tempered_sigmoids, weight_decay
from tacit.studies.study import Comparison, Printed, Study, Variant

_MODULES = (losing_less, tempered_sigmoids, private_optimizers, curricula, weight_decay)
STUDIES = {module.STUDY.name: module.STUDY for module in _MODULES}

__all__ = ["STUDIES", "Comparison", "Printed", "Study", "Variant", "study_of"]


def study_of(name: str) -> Study:
    """The study of this name.

    >>> study_of("losing-less").paper.startswith("Shamsabadi")
    True
    """
    found: Study = STUDIES[check_choice("study", name, STUDIES)]
    return found
