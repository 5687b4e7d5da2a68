"""RDP at one order, which is what a filter adds up and claims."""

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from scipy import integrate, stats

from tacit.privacy.accounting import epsilon_of_rdp, rdp_budget, rdp_of


@pytest.mark.parametrize("order", [1.25, 1.5, 2.0, 8.0])
def test_no_order_is_below_the_kullback_leibler_divergence_even_where_its_series_does_not_converge(order):
    """Renyi divergences grow with their order, which is 1 for this one; at 1.25 dp-accounting finds no limit."""
    x = np.linspace(-30, 30, 100_001)
    noise = stats.norm.pdf(x)
    mixture = 0.5 * noise + 0.5 * stats.norm.pdf(x, loc=1)
    divergence = integrate.trapezoid(mixture * np.log(mixture / noise), x)
    assert rdp_of(0.5, [(1.0, 3)], order) >= 3 * divergence > 0.3


@pytest.mark.parametrize(("order", "spent", "delta"), [(8.0, 0.5, 1e-5), (1.75, 3.0, 1e-6), (64.0, 0.02, 1e-9)])
def test_what_one_order_gives_is_what_dp_accounting_makes_of_it(order, spent, delta):
    epsilon = epsilon_of_rdp(order, spent, delta)
    assert epsilon == pytest.approx(compute_epsilon([order], [spent], delta)[0], rel=1e-12)
    assert rdp_budget(order, epsilon, delta) == pytest.approx(spent, rel=1e-9)
