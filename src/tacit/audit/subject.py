"""What is audited: a finished run with its certificate, or a recipe with the plan it would run by."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from tacit.privacy.certificate import rounded_up, verify
from tacit.privacy.ledger import SORTED, read_ledger
from tacit.privacy.plan import PrivacyPlan
from tacit.privacy.validation import UserError, check_not_negative
from tacit.training.building import build_model
from tacit.training.directory import RunDirectory
from tacit.training.recipe import Recipe
from tacit.training.run import load_data


@dataclass(frozen=True)
class Subject:
    """A recipe, the plan by which it runs, and the epsilon that is claimed for it at delta.

    >>> subject = Subject.of_recipe("digits")
    >>> subject.claim <= 3, subject.delta
    (True, 1e-05)
    """

    name: str
    recipe: Recipe
    plan: PrivacyPlan
    claim: float
    delta: float
    run_directory: Path | None = None

    @classmethod
    def of_recipe(cls, name: str, changes: Iterable[str] = ()) -> Subject:
        """A recipe, by name or file, with changes of it; nothing is trained yet."""
        recipe = Recipe.load(name, changes)
        if recipe.privacy.error_norm is not None or recipe.curriculum.name == SORTED:
            raise UserError("no epsilon holds for this recipe that an audit could test; choose another")
        train = load_data(recipe).train
        network: nn.Module = build_model(recipe.model, train.input_shape, len(train.classes))
        if recipe.model.features is not None:
            assert isinstance(network, nn.Sequential)
            network = network[1]
        sizes = {key: value.numel() for key, value in network.named_parameters() if value.requires_grad}
        plan = recipe.plan(len(train), sizes)
        return cls(name, recipe, plan, _claimed(rounded_up(plan.epsilon(recipe.privacy.delta))), recipe.privacy.delta)

    @classmethod
    def of_run(cls, run_directory: str | os.PathLike[str], changes: Iterable[str] = ()) -> Subject:
        """A finished run: it is verified first, and its certificate is the claim. `changes` say where its data lie."""
        certificate = verify(run_directory)
        directory = RunDirectory(Path(run_directory))
        if certificate["releases"] != certificate["planned_releases"]:
            raise UserError(
                f"the run in {directory.path} made {certificate['releases']} of {certificate['planned_releases']} releases; "
                f"finish it with `tacit train --resume --out {directory.path}`, or audit its recipe"
            )
        plan = PrivacyPlan.from_dict(read_ledger(directory.ledger)[0]["plan"])
        if not directory.recipe.exists():
            raise UserError(f"{directory.path} holds no recipe.toml, by which it could be trained again")
        recipe = Recipe.load(directory.recipe, changes)
        claim = _claimed(certificate["epsilon"])
        return cls(str(run_directory), recipe, plan, claim, certificate["delta"], directory.path)

    def claiming(self, epsilon: float) -> Subject:
        """The same, judged by another epsilon.

        >>> Subject.of_recipe("digits").claiming(1.0).claim
        1.0
        """
        return dataclasses.replace(self, claim=check_not_negative("claim", epsilon))


def _claimed(epsilon: float | None) -> float:
    if epsilon is None:
        raise UserError("no epsilon is claimed here, so there is nothing to audit")
    return epsilon
