"""The attacks see what they say they see, through tacit's own trainings."""

import math

import numpy as np
import pytest
from scipy.stats import kstest, norm

from tacit.audit import Subject, attack_canaries, attack_mechanism, audit
from tacit.audit.canaries import NOBODY, WithCanaries
from tacit.audit.listening import Listener
from tacit.audit.membership import attack_lira, attack_loss, confidences, likelihood_ratios, pooled, target_of
from tacit.audit.scores import Roc
from tacit.data import Dataset
from tacit.privacy import Automatic, Constant, Flat, Grouped, PrivacyPlan, UserError
from tacit.training.run import load_data

QUIET = ["privacy.epsilon=none", "privacy.noise_multiplier=0.05", "privacy.epochs=2"]

CLIPPINGS = [
    Flat(0.3),
    Grouped((("a.*",), ("b.*", "c")), (0.3, 2.0), (1.0, 5.0)),
    Automatic(Grouped((("a",), ("b",)), (1.0, 1.0))),
]


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=["flat", "grouped", "automatic"])
def test_one_release_without_sampling_is_a_gaussian_mechanism_of_the_plans_multiplier(clipping):
    plan = PrivacyPlan(sample_rate=1.0, steps=1, clipping=clipping, noise=Constant(0.8), expected_batch_size=7.0)
    scores = attack_mechanism(plan, delta=1e-5, canaries=20_000, seed=0)["likelihood ratio"]
    mu = 1 / 0.8
    # log-likelihood ratios of N(mu, 1) against N(0, 1); each of the two tests fails by chance once in 10^6
    assert kstest(scores.included, norm(mu**2 / 2, mu).cdf).pvalue > 1e-6
    assert kstest(scores.excluded, norm(-(mu**2) / 2, mu).cdf).pvalue > 1e-6


def test_the_scores_of_sampled_steps_are_those_of_the_subsampled_gaussian():
    rate, sigma, steps, count = 0.3, 0.9, 12, 20_000
    plan = PrivacyPlan(sample_rate=rate, steps=steps, noise=Constant(sigma), expected_batch_size=50)
    found = attack_mechanism(plan, delta=1e-5, canaries=count, seed=1)["likelihood ratio"]
    generator = np.random.default_rng(2)
    for part, scores in ((1.0, found.included), (0.0, found.excluded)):
        seen = generator.normal(size=(count, steps)) + part * (generator.random((count, steps)) < rate) / sigma
        ratios = np.log(1 - rate + rate * np.exp(seen / sigma - 1 / (2 * sigma**2))).sum(axis=1)
        assert kstest(scores, ratios).pvalue > 1e-6


def test_likelihood_ratios_do_not_overflow_and_are_summed_exactly():
    generator = np.random.default_rng(0)
    steps = [generator.normal(size=5) * scale for scale in [1.0] * 10 + [500.0] + [1.0] * 3]
    listener = Listener(5, 0.2)
    for seen in steps:
        listener.hear([seen], [2.0])
    slow = [sum(np.logaddexp(math.log(0.8), math.log(0.2) + 2 * seen[i] - 2) for seen in steps) for i in range(5)]
    scores = listener.scores(np.ones(5, dtype=bool))
    np.testing.assert_allclose(scores["likelihood ratio"].values, slow, rtol=1e-12)
    np.testing.assert_allclose(scores["spread over the steps"].values, np.var(2 * np.array(steps), axis=0, ddof=1))


def test_an_audit_with_a_seed_repeats_and_one_without_does_not():
    plan = PrivacyPlan(sample_rate=0.5, steps=10, expected_batch_size=50)
    first, again, other, free = (
        attack_mechanism(plan, delta=1e-5, canaries=50, seed=seed)["likelihood ratio"] for seed in (3, 3, 4, None)
    )
    assert (first.values == again.values).all()
    assert (first.took_part == again.took_part).all()
    assert not (first.values == other.values).any()
    assert not (first.values == free.values).any()


def test_canaries_take_their_places_among_the_real_examples_and_change_none_of_them():
    images = np.random.default_rng(0).random((30, 5)).astype(np.float32)
    data = Dataset("toy", images, np.arange(30) % 3, ("a", "b", "c"), (0.0,), (1.0,))
    labels, took_part = np.arange(8) % 3, np.arange(8) % 2 == 1
    examples = WithCanaries.drawn(data, labels, took_part, 50.0, np.random.default_rng(1))
    (inputs, features), targets = examples.batch()
    real = examples.identities == NOBODY
    assert (inputs[real].numpy() == images).all()
    assert (targets[real].numpy() == data.labels).all()
    assert not features[real].any()
    assert sorted(examples.identities[~real]) == [1, 3, 5, 7]
    for place in np.flatnonzero(~real):
        identity = examples.identities[place]
        assert targets[place] == labels[identity]
        assert features[place].nonzero().flatten().tolist() == [identity]
        assert not inputs[place].any()
    few, _ = examples.batch(np.array([3, 1]))
    assert (few[0] == inputs[[3, 1]]).all()
    assert len(examples.batch(np.array([], dtype=np.int64))[1]) == 0


@pytest.mark.parametrize("network", ["linear", "small-cnn"])
def test_in_a_whole_training_with_hardly_any_noise_each_canary_is_found(network):
    # At so high a rate, a canary stays out of all 12 steps once in half a million.
    often = ["privacy.batch_size=1000", "privacy.epochs=8"]
    subject = Subject.of_recipe("digits", [*QUIET, *often, f"model.name={network}"])
    scores = attack_canaries(subject, canaries=60, seed=0)
    assert 15 < scores.took_part.sum() < 45
    assert Roc.of(scores).area == 1.0
    assert scores.included.min() > 100, "its direction is known at each step"


def test_canaries_in_an_honest_training_stay_below_the_claim_by_every_bound():
    subject = Subject.of_recipe("digits", ["model.name=linear", "privacy.epochs=4"])
    found = audit(subject, "canaries", canaries=400, seed=0)
    assert found.bound.method == "one-run"
    assert 0 < found.bound.epsilon < found.claim
    assert all(other.epsilon < found.claim for other in found.beside)
    assert any("extra records" in caveat for caveat in found.caveats)


@pytest.fixture(scope="module")
def attacked():
    """A recipe without noise to speak of, and a model of it whose examples took part by fair coins."""
    subject = Subject.of_recipe("digits", [*QUIET, "model.name=linear"])
    return subject, target_of(subject, seed=0)


def test_the_model_attacked_was_trained_on_those_of_whom_it_is_said(attacked):
    subject, target = attacked
    assert target.by_coin
    assert target.took_part.sum() != len(load_data(subject.recipe).train)
    assert abs(target.took_part.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(target.pool))
    scores = attack_loss(target)
    assert (scores.took_part == target.took_part).all()
    assert (scores.values == confidences(target.model, target.pool)).all()


def test_shadow_models_score_every_example_and_come_in_pairs(attacked):
    subject, target = attacked
    told = []
    scores = attack_lira(subject, target, shadows=2, seed=0, advance=told.append)
    assert len(scores) == len(target.pool)
    assert told == [1, 1]
    with pytest.raises(UserError, match="an even number of them, not 3"):
        attack_lira(subject, target, shadows=3)


def test_examples_in_the_training_part_come_before_those_held_out():
    split = load_data(Subject.of_recipe("digits").recipe)
    whole, in_training = pooled(split)
    assert (whole.take(np.flatnonzero(in_training)).images == split.train.images).all()
    assert (whole.take(np.flatnonzero(~in_training)).labels == split.test.labels).all()


def test_the_likelihood_ratio_of_shadows_finds_what_a_single_threshold_cannot():
    generator = np.random.default_rng(0)
    examples, shadows = 2000, 16
    hardness = generator.normal(scale=5, size=examples)  # which hides what taking part adds
    first = generator.random((shadows // 2, examples)) < 0.5
    was_in = np.concatenate([first, ~first])
    seen = hardness + 1.0 * was_in + 0.5 * generator.normal(size=was_in.shape)
    took_part = generator.random(examples) < 0.5
    found = hardness + 1.0 * took_part + 0.5 * generator.normal(size=examples)
    ratios = likelihood_ratios(found, seen, was_in)
    areas = [np.mean(scores[took_part][:, None] > scores[~took_part][None, :]) for scores in (found, ratios)]
    assert areas[0] < 0.62
    assert areas[1] > 0.85
    exact = norm.logpdf(found, hardness + 1, 0.5) - norm.logpdf(found, hardness, 0.5)
    assert np.corrcoef(ratios, exact)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("changes", "attack", "says"),
    [
        (
            [*QUIET, "privacy.clipping=adaptive"],
            "mechanism",
            "Adaptive follows .* choose --attack loss or --attack lira",
        ),
        ([*QUIET, "privacy.groups=layers"], "canaries", "one clipping norm"),
        (["privacy.error_norm=0.01"], "mechanism", "no epsilon holds"),
        (QUIET, "mechansim", "did you mean 'mechanism'"),
    ],
)
def test_what_an_attack_cannot_follow_is_refused_in_one_sentence(changes, attack, says):
    with pytest.raises(UserError, match=says) as refusal:
        audit(Subject.of_recipe("digits", changes), attack)
    assert "\n" not in str(refusal.value)
