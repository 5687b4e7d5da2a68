"""The estimators against mechanisms whose epsilon is known, closed forms, and the numbers of jax-privacy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from tacit.audit import Scores, bound_by_one_run, bound_by_threshold
from tacit.audit.one_run import epsilon_of_guesses, p_value
from tacit.audit.scores import Roc
from tacit.audit.thresholds import epsilon_of_mu, epsilon_of_rates, mu_of_rates, rates_at
from tacit.privacy import Constant, PrivacyPlan, UserError

DELTA = 1e-5


def gaussian(mu, count, seed):
    """Scores of one release of N(0, 1) or N(mu, 1), by a fair coin."""
    generator = np.random.default_rng(seed)
    took_part = generator.random(count) < 0.5
    return Scores(generator.normal(size=count) + mu * took_part, took_part)


def randomised_response(epsilon, count, seed):
    """The coin itself, turned over with probability 1 / (1 + e^epsilon): epsilon-differentially private, and not less."""
    generator = np.random.default_rng(seed)
    took_part = generator.random(count) < 0.5
    told = took_part ^ (generator.random(count) < 1 / (1 + math.exp(epsilon)))
    return Scores(told * 1.0, took_part)


def most_exceeding(repeats, error=0.05, by_chance=1e-6):
    """So many of the repeats of a bound may lie above the truth: more would happen with probability 1e-6."""
    return binom.ppf(1 - by_chance, repeats, error)


@pytest.mark.parametrize("method", ["Clopper-Pearson", "Gaussian"])
def test_the_bound_of_a_gaussian_mechanism_lies_above_the_truth_no_oftener_than_its_confidence_allows(method):
    truth, repeats = epsilon_of_mu(1.0, DELTA), 200
    bounds = [
        bound_by_threshold(gaussian(1.0, 2000, seed), delta=DELTA, method=method).epsilon for seed in range(repeats)
    ]
    assert sum(bound > truth for bound in bounds) <= most_exceeding(repeats)
    assert np.median(bounds) > 0


def test_the_bound_of_randomised_response_is_near_its_epsilon_and_seldom_above():
    repeats = 200
    for epsilon in (0.5, 2.0):
        bounds = [
            bound_by_threshold(randomised_response(epsilon, 4000, seed), delta=DELTA).epsilon for seed in range(repeats)
        ]
        assert sum(bound > epsilon for bound in bounds) <= most_exceeding(repeats)
        assert np.median(bounds) > 0.7 * epsilon


def test_one_run_on_randomised_response_is_near_its_epsilon_and_seldom_above():
    repeats = 100
    bounds = [
        bound_by_one_run(randomised_response(2.0, 2000, seed), delta=DELTA, guesses=2000).epsilon
        for seed in range(repeats)
    ]
    assert sum(bound > 2.0 for bound in bounds) <= most_exceeding(repeats)
    assert np.median(bounds) > 1.7


def test_trying_many_numbers_of_guesses_costs_no_confidence():
    repeats = 100
    bounds = [bound_by_one_run(randomised_response(1.0, 500, seed), delta=0.0).epsilon for seed in range(repeats)]
    assert sum(bound > 1.0 for bound in bounds) <= most_exceeding(repeats)


def test_with_enough_samples_the_bound_is_above_half_of_the_truth():
    scores = gaussian(1.0, 100_000, seed=0)
    assert epsilon_of_mu(1.0, 0.01) / 2 < bound_by_threshold(scores, delta=0.01).epsilon < epsilon_of_mu(1.0, 0.01)
    close = bound_by_threshold(scores, delta=DELTA, method="Gaussian").epsilon
    assert 0.9 * epsilon_of_mu(1.0, DELTA) < close < epsilon_of_mu(1.0, DELTA)


def test_perfect_separation_gives_the_closed_form():
    took_part = np.arange(2000) % 2 == 0
    scores = Scores(np.where(took_part, 5.0, -5.0), took_part)
    found = bound_by_threshold(scores, delta=DELTA)
    _, judging = scores.halves()
    all_right, none_wrong = 0.025 ** (1 / len(judging.included)), 0.025 ** (1 / len(judging.excluded))
    closed = max(math.log((all_right - DELTA) / (1 - none_wrong)), math.log((none_wrong - DELTA) / (1 - all_right)))
    assert found.epsilon == pytest.approx(closed, rel=1e-9)
    accuracy = 0.05 ** (1 / 2000)
    one_run = bound_by_one_run(scores, delta=0.0, guesses=2000).epsilon
    assert one_run == pytest.approx(math.log(accuracy / (1 - accuracy)), abs=2e-6)


def test_scores_that_know_nothing_prove_nothing():
    # in an order that would tell, if the order of equal scores were looked at
    constant = Scores(np.zeros(1000), np.arange(1000) >= 500)
    assert bound_by_threshold(constant, delta=DELTA).epsilon == 0
    assert bound_by_threshold(constant, delta=DELTA, method="Gaussian").epsilon == 0
    assert bound_by_one_run(constant, delta=DELTA).epsilon == 0
    repeats = 100
    positive = [
        (
            bound_by_threshold(gaussian(0.0, 1000, seed), delta=DELTA).epsilon > 0,
            bound_by_one_run(gaussian(0.0, 1000, seed), delta=DELTA).epsilon > 0,
        )
        for seed in range(repeats)
    ]
    assert max(np.sum(positive, axis=0)) <= most_exceeding(repeats)


@given(st.integers(1, 200), st.data(), st.floats(0, 5))
def test_without_delta_one_run_is_a_plain_binomial_tail(guesses, data, epsilon):
    correct = data.draw(st.integers(0, guesses))
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    tail = binom.sf(correct - 1, guesses, accuracy)
    assert p_value(300, guesses, correct, epsilon, 0.0) == pytest.approx(tail, rel=1e-9, abs=1e-300)


@settings(max_examples=50)
@given(st.integers(1, 60), st.data(), st.floats(0, 4), st.floats(0, 0.005))
def test_the_p_value_is_what_the_theorem_says_term_by_term(guesses, data, epsilon, delta):
    correct = data.draw(st.integers(1, guesses))
    probability = binom.pmf(np.arange(guesses + 1), guesses, 1 / (1 + math.exp(-epsilon)))
    terms = [probability[correct - i : correct].sum() / i for i in range(1, correct + 1)]
    expected = min(1.0, probability[correct:].sum() + 2 * 60 * delta * max(terms))
    assert p_value(60, guesses, correct, epsilon, delta) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@settings(max_examples=50)
@given(st.integers(1, 100), st.data(), st.floats(0, 1 / 200), st.floats(0, 5), st.floats(0, 1))
def test_what_contradicts_one_epsilon_contradicts_each_smaller_one(guesses, data, delta, epsilon, less):
    correct = data.draw(st.integers(0, guesses))
    larger = p_value(100, guesses, correct, epsilon, delta)
    assert p_value(100, guesses, correct, epsilon * less, delta) <= larger + 1e-12


def test_the_bound_of_one_run_lies_where_the_p_value_crosses_the_error_probability():
    epsilon = epsilon_of_guesses(1000, 200, 170, delta=DELTA, confidence=0.95)
    assert p_value(1000, 200, 170, epsilon, DELTA) <= 0.05 < p_value(1000, 200, 170, epsilon + 2e-6, DELTA)


def test_mu_becomes_the_epsilon_of_the_accountant():
    for mu in (0.3, 1.0, 3.0):
        exact = PrivacyPlan(sample_rate=1.0, steps=1, noise=Constant(1 / mu)).epsilon(DELTA)
        assert epsilon_of_mu(mu, DELTA) == pytest.approx(exact, rel=1e-3)
    assert epsilon_of_mu(1e-9, DELTA) == 0


@given(st.floats(0.001, 0.999), st.floats(0, 4))
def test_the_rates_of_a_gaussian_test_give_its_mu_back(false_positive_rate, mu):
    true_positive_rate = norm.sf(norm.isf(false_positive_rate) - mu)
    assert mu_of_rates(true_positive_rate, false_positive_rate) == pytest.approx(mu, abs=1e-3)


def test_scores_are_joined_by_identity_whatever_order_they_come_in():
    scores = {f"canary {i}": float(i) for i in range(50)}
    took_part = {f"canary {i}" for i in range(0, 50, 3)}
    backwards = dict(reversed(list(scores.items())))
    first, second = Scores.joined(scores, took_part), Scores.joined(backwards, sorted(took_part))
    assert (first.values == second.values).all()
    assert (first.took_part == second.took_part).all()
    assert sorted(first.included) == [float(i) for i in range(0, 50, 3)]
    with pytest.raises(UserError, match="'canary 99' took part, but has no score"):
        Scores.joined(scores, {"canary 99"})


def test_the_curve_counts_what_it_says():
    roc = Roc.of(Scores(np.array([3.0, 2.0, 2.0, 1.0]), np.array([True, True, False, False])))
    assert roc.area == pytest.approx(0.875), "of four pairs, three are in the right order and one is equal"
    assert (roc.true_positives_at(0.0), roc.true_positives_at(0.5)) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bound_by_threshold(gaussian(1, 100, 0), delta=2.0), "delta must lie strictly between 0 and 1"),
        (lambda: bound_by_threshold(gaussian(1, 100, 0), delta=DELTA, confidence=95), "confidence must lie between"),
        (lambda: bound_by_threshold(gaussian(1, 100, 0), delta=DELTA, method="gausian"), "did you mean"),
        (lambda: bound_by_one_run(gaussian(1, 100, 0), delta=0.1), "too many for delta 0.1; take at most 5"),
        (lambda: bound_by_one_run(gaussian(1, 100, 0), delta=DELTA, guesses=101), "more than the 100 canaries"),
        (lambda: Scores(np.array([np.nan]), np.array([True])), "must be finite"),
        (lambda: Roc.of(Scores(np.zeros(2), np.ones(2, dtype=bool))), "examples that did not"),
        (lambda: p_value(10, 5, 6, 1.0, 0.0), "6 correct ones of 5 guesses"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(call, says):
    with pytest.raises(UserError, match=says):
        call()


# jax-privacy 2.0.0: CanaryScoreAuditor over these scores, threshold_strategy=Explicit(threshold), significance 0.05.
QUANTILES = norm.ppf((np.arange(2000) + 0.5) / 2000)
CLOPPER_PEARSON = [(-1.0, 2.6137497753344183), (0.75, 1.1228107828169605), (2.0, 2.2442567221035445)]
ONE_RUN = [  # delta, guesses, correct, epsilon
    (1e-9, 2000, 1547, 1.139363135794189),
    (1e-5, 663, 617, 2.335519947406451),
    (1e-4, 663, 617, 2.2838341796179025),
    (1e-4, 280, 271, 2.5725080242731044),
]


@pytest.mark.parametrize(("threshold", "expected"), CLOPPER_PEARSON)
def test_clopper_pearson_gives_the_numbers_of_jax_privacy(threshold, expected):
    above = [(scores >= threshold).sum() for scores in (QUANTILES + 1.5, QUANTILES)]
    rates = rates_at(above[0], 2000, above[1], 2000, confidence=0.95)
    assert epsilon_of_rates(*rates, DELTA) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("delta", "guesses", "correct", "expected"), ONE_RUN)
def test_one_run_gives_the_numbers_of_jax_privacy(delta, guesses, correct, expected):
    assert epsilon_of_guesses(4000, guesses, correct, delta=delta, confidence=0.95) == pytest.approx(expected, abs=3e-6)


def test_jax_privacy_itself_agrees_where_it_is_installed():
    auditing = pytest.importorskip("jax_privacy.auditing")
    auditor = auditing.CanaryScoreAuditor(QUANTILES + 1.5, QUANTILES)
    for threshold, expected in CLOPPER_PEARSON:
        explicit = auditing.Explicit(threshold)
        found = auditor.epsilon_clopper_pearson(0.05, DELTA, False, threshold_strategy=explicit)
        assert found == pytest.approx(expected, rel=1e-9)
    found = auditor.epsilon_one_run(0.05, DELTA, threshold_strategy=auditing.Explicit(2.0))
    assert found == pytest.approx(ONE_RUN[1][3], abs=1e-5)
