"""The trusted core: what is sampled, how it is clipped, what noise is added, and what that guarantees.

Nothing here imports the rest of tacit, and nothing but the mechanisms imports torch, so that accounts, calibrations and
verifications answer at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.privacy.accounting import epsilon_of, epsilon_of_all
    from tacit.privacy.beside import Adaptive
    from tacit.privacy.certificate import certificate_of, verify
    from tacit.privacy.clipping import Automatic, Clipping, Flat, Grouped, clip_factors, effective_multiplier
    from tacit.privacy.composition import composed_certificate
    from tacit.privacy.curricula import Curriculum, Table
    from tacit.privacy.dice import DicePlan, dice_epsilon, dice_epsilon_that_holds, dice_noise
    from tacit.privacy.dice_mechanism import DiceMechanism
    from tacit.privacy.driven import LossDriven
    from tacit.privacy.ledger import Ledger, read_ledger
    from tacit.privacy.mechanism import ClippedSum, GaussianMechanism, PrivateGradient
    from tacit.privacy.plan import PrivacyPlan
    from tacit.privacy.randomness import Randomness
    from tacit.privacy.sampling import PoissonSampler
    from tacit.privacy.schedules import Constant, Linear, NoiseSchedule
    from tacit.privacy.schema import certificate_schema
    from tacit.privacy.signature import Verified, load_key, new_key, sign, verified
    from tacit.privacy.spending import epsilon_along, equal_constant
    from tacit.privacy.statistics import BoundedSum
    from tacit.privacy.validation import UserError

_HOMES = {
    "Adaptive": "beside",
    "Automatic": "clipping",
    "BoundedSum": "statistics",
    "ClippedSum": "mechanism",
    "Clipping": "clipping",
    "Constant": "schedules",
    "Curriculum": "curricula",
    "DiceMechanism": "dice_mechanism",
    "DicePlan": "dice",
    "Flat": "clipping",
    "GaussianMechanism": "mechanism",
    "Grouped": "clipping",
    "Ledger": "ledger",
    "Linear": "schedules",
    "LossDriven": "driven",
    "NoiseSchedule": "schedules",
    "PoissonSampler": "sampling",
    "PrivacyPlan": "plan",
    "PrivateGradient": "mechanism",
    "Randomness": "randomness",
    "Table": "curricula",
    "UserError": "validation",
    "Verified": "signature",
    "certificate_of": "certificate",
    "certificate_schema": "schema",
    "clip_factors": "clipping",
    "composed_certificate": "composition",
    "dice_epsilon": "dice",
    "dice_epsilon_that_holds": "dice",
    "dice_noise": "dice",
    "effective_multiplier": "clipping",
    "epsilon_along": "spending",
    "epsilon_of": "accounting",
    "epsilon_of_all": "accounting",
    "equal_constant": "spending",
    "load_key": "signature",
    "new_key": "signature",
    "read_ledger": "ledger",
    "sign": "signature",
    "verified": "signature",
    "verify": "certificate",
}

__all__ = [
    "Adaptive",
    "Automatic",
    "BoundedSum",
    "ClippedSum",
    "Clipping",
    "Constant",
    "Curriculum",
    "DiceMechanism",
    "DicePlan",
    "Flat",
    "GaussianMechanism",
    "Grouped",
    "Ledger",
    "Linear",
    "LossDriven",
    "NoiseSchedule",
    "PoissonSampler",
    "PrivacyPlan",
    "PrivateGradient",
    "Randomness",
    "Table",
    "UserError",
    "Verified",
    "certificate_of",
    "certificate_schema",
    "clip_factors",
    "composed_certificate",
    "dice_epsilon",
    "dice_epsilon_that_holds",
    "dice_noise",
    "effective_multiplier",
    "epsilon_along",
    "epsilon_of",
    "epsilon_of_all",
    "equal_constant",
    "load_key",
    "new_key",
    "read_ledger",
    "sign",
    "verified",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"tacit.privacy.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
