"""What the audit must do on the digits recipe, shown: honest trainings stay below the claim, broken ones do not.

    python tests/audit/acceptance.py [--times 20] [--out results/audit/digits.json]

Twenty honest audits, of seeds 0 to 19, at 95% confidence: each below the claim, each at least half of it. Then one audit a
mutant. Exit status 0 if all of it came out so.
"""

import argparse
import json
import sys
from pathlib import Path

from broken import MUTANTS

from tacit.audit import Subject, audit


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    subject = Subject.of_recipe("digits")
    print(f"digits: epsilon {subject.claim:.4f} at delta {subject.delta:g} is claimed", flush=True)
    honest = []
    for seed in range(arguments.times):
        found = audit(subject, repeats=arguments.repeats, seed=seed)
        honest.append(found)
        print(f"honest, seed {seed:2d}: epsilon at least {found.bound.epsilon:.4f} ({found.seconds:.0f} s)", flush=True)
    broken = {}
    for name, mutant in MUTANTS.items():
        with mutant():
            broken[name] = audit(subject, repeats=4, seed=0)
        bound = broken[name].bound
        print(f"{name}: epsilon at least {bound.epsilon:.4f} by the {bound.details['score']}", flush=True)
    bounds = [found.bound.epsilon for found in honest]
    result = {
        "recipe": "digits",
        "attack": "mechanism",
        "epsilon": subject.claim,
        "delta": subject.delta,
        "confidence": 0.95,
        "method": honest[0].bound.method,
        "scores_each": len(honest[0].scores),
        "honest": {
            "seeds": list(range(arguments.times)),
            "below_the_claim": sum(not found.exceeds for found in honest),
            "at_least_half_of_it": sum(bound >= subject.claim / 2 for bound in bounds),
            "epsilon_lower_bounds": bounds,
            "beside_by_a_gaussian_curve": [found.beside[0].epsilon for found in honest],
        },
        "mutants": {
            name: {
                "epsilon_lower_bound": found.bound.epsilon,
                "exceeds_claim": found.exceeds,
                "score": found.bound.details["score"],
                "scores": len(found.scores),
            }
            for name, found in broken.items()
        },
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    found = result["honest"]
    print(
        f"{found['below_the_claim']} of {len(honest)} honest audits are below the claim, {found['at_least_half_of_it']} reach "
        f"half of it ({min(bounds):.4f} to {max(bounds):.4f}); {sum(one.exceeds for one in broken.values())} of "
        f"{len(broken)} mutants are above it"
    )
    all_well = found["below_the_claim"] == found["at_least_half_of_it"] == len(honest)
    sys.exit(0 if all_well and all(one.exceeds for one in broken.values()) else 1)


if __name__ == "__main__":
    main()
