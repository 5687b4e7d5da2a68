"""Attacks and estimators that test the claim from outside: lower bounds on epsilon, to be compared with the certificate's."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.audit.audits import Audit, audit
    from tacit.audit.canaries import attack_canaries
    from tacit.audit.mechanism import attack_mechanism
    from tacit.audit.membership import attack_lira, attack_loss
    from tacit.audit.one_run import bound_by_one_run
    from tacit.audit.scores import Roc, Scores
    from tacit.audit.subject import Subject
    from tacit.audit.thresholds import LowerBound, bound_by_threshold

_HOMES = {
    "Audit": "audits",
    "LowerBound": "thresholds",
    "Roc": "scores",
    "Scores": "scores",
    "Subject": "subject",
    "attack_canaries": "canaries",
    "attack_lira": "membership",
    "attack_loss": "membership",
    "attack_mechanism": "mechanism",
    "audit": "audits",
    "bound_by_one_run": "one_run",
    "bound_by_threshold": "thresholds",
}

__all__ = [
    "Audit",
    "LowerBound",
    "Roc",
    "Scores",
    "Subject",
    "attack_canaries",
    "attack_lira",
    "attack_loss",
    "attack_mechanism",
    "audit",
    "bound_by_one_run",
    "bound_by_threshold",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tacit.audit.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
