"""The generator's output as tacit uses it: bits, coins and normals pass the usual tests, and each test finds a planted fault.

A test computes a p-value and rejects below `ALPHA`: on fresh randomness it would fail by chance once in a million (once in a
million over all lags where it tries several, by Bonferroni); the seeds are fixed, so none ever does. What `test_noise.py` has,
the scale, shape and independence of releases, is not here again.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tacit.privacy import ClippedSum, Constant, Flat, Ledger, PrivacyPlan, Randomness
from tacit.privacy.normals import box_muller
from tacit.privacy.randomness import _WORDS, Keystream

ALPHA = 1e-6
PIECES = 6  # of 2^14 words: 6.3 million bits


def bits_of(randomness):
    """The bits of the noise stream, 0 and 1."""
    pieces = np.empty((PIECES, _WORDS), dtype=np.uint64)
    for piece in pieces:
        randomness._noise.fill(piece)
    return np.unpackbits(pieces.reshape(-1).view(np.uint8))


def two_sided(z):
    return float(2 * stats.norm.sf(abs(z)))


def monobit(bits):
    """As many ones as zeros."""
    return two_sided((2 * int(bits.sum()) - bits.size) / math.sqrt(bits.size))


def block_frequency(bits, size=128):
    """As many in every block: the squares of their excesses are chi-square."""
    ones = bits[: bits.size // size * size].reshape(-1, size).sum(axis=1, dtype=np.int64)
    return float(stats.chi2.sf(((ones - size / 2) ** 2).sum() * 4 / size, ones.size))


def runs(bits):
    """As often the same bit again as the other one."""
    changes = int((bits[1:] != bits[:-1]).sum())
    return two_sided((2 * changes - (bits.size - 1)) / math.sqrt(bits.size - 1))


def bytes_of(bits):
    return np.packbits(bits)


def byte_counts(bits):
    """Every byte as often as every other."""
    return float(stats.chisquare(np.bincount(bytes_of(bits), minlength=256)).pvalue)


def pairs_of_bytes(bits):
    """Every pair of bytes side by side, too."""
    return float(stats.chisquare(np.bincount(bytes_of(bits).view(np.uint16), minlength=2**16)).pvalue)


def serial_correlation(bits, lags=16):
    """Bytes are uncorrelated with those 1 to 16 before them."""
    centred = bytes_of(bits) - 127.5
    scale = centred.var() * math.sqrt(centred.size)
    return min(1.0, lags * min(two_sided((centred[lag:] * centred[:-lag]).sum() / scale) for lag in range(1, lags + 1)))


def birthday_spacings(bits, birthdays=4096, years=40):
    """Marsaglia's: of 4096 birthdays in a year of 2^32 days, the spacings that come again are Poisson of mean 4096^3 / 2^34."""
    days = bytes_of(bits).view(np.uint32)[: birthdays * years].reshape(years, birthdays).astype(np.int64)
    spacings = np.sort(np.diff(np.sort(days, axis=1), axis=1), axis=1)
    again = int((np.diff(spacings, axis=1) == 0).sum())
    law = stats.poisson(years * birthdays**3 / 2**34)
    return min(1.0, 2 * min(law.cdf(again), law.sf(again - 1)))


def planted(bits, fault):
    """The bits with a fault."""
    rng = np.random.default_rng(0)
    bits, numbers = bits.copy(), np.packbits(bits)
    if fault == "one in 500 zeros is a one":
        bits |= rng.random(bits.size) < 0.004
    elif fault == "every second block has three ones more and every other three less":
        blocks = bits[: bits.size // 128 * 128].reshape(-1, 128)
        blocks[0::2, :6], blocks[1::2, :6] = 1, 0
    elif fault == "one bit in 300 is the one before it":
        bits[1:] = np.where(rng.random(bits.size - 1) < 1 / 300, bits[:-1], bits[1:])
    elif fault == "no byte is 77":
        bits = np.unpackbits(np.where(numbers == 77, 78, numbers))
    elif fault == "one byte in 100 is the one before it":
        numbers[1::100] = numbers[0::100][: numbers[1::100].size]
        bits = np.unpackbits(numbers)
    elif fault == "a 31-bit congruential generator":
        state, drawn = np.uint64(1), np.empty(numbers.size // 4, dtype=np.uint64)
        factors, addends, factor, addend = [], [], 1, 0
        for _ in range(4096):  # so many steps at once
            factor, addend = factor * 1103515245 % 2**31, (addend * 1103515245 + 12345) % 2**31
            factors.append(factor)
            addends.append(addend)
        several = np.array([factors, addends], dtype=np.uint64)
        for start in range(0, drawn.size, 4096):
            row = (several[0] * state + several[1]) % np.uint64(2**31)
            drawn[start : start + 4096] = row[: drawn.size - start]
            state = row[-1]
        # its upper 16 bits twice, as people do to get 32
        halves = (drawn >> np.uint64(15)).astype(np.uint16)
        bits = np.unpackbits(halves.view(np.uint8))
        bits = np.concatenate([bits, bits])
    elif fault == "days in equal steps":
        days = (np.arange(numbers.size // 4, dtype=np.uint64) * np.uint64(2654435769)).astype(np.uint32)
        bits = np.unpackbits(days.view(np.uint8))
    return bits


@pytest.fixture(scope="module")
def bits():
    return bits_of(Randomness.from_seed(1))


TESTS_AND_FAULTS = [
    (monobit, "one in 500 zeros is a one"),
    (block_frequency, "every second block has three ones more and every other three less"),
    (runs, "one bit in 300 is the one before it"),
    (byte_counts, "no byte is 77"),
    (pairs_of_bytes, "one byte in 100 is the one before it"),
    (serial_correlation, "one byte in 100 is the one before it"),
    (birthday_spacings, "days in equal steps"),
]


@pytest.mark.parametrize(("test", "fault"), TESTS_AND_FAULTS, ids=[test.__name__ for test, _ in TESTS_AND_FAULTS])
def test_the_bits_pass_what_bits_with_a_fault_do_not(bits, test, fault):
    assert test(bits) > ALPHA
    assert test(planted(bits, fault)) < ALPHA


def test_a_congruential_generator_of_31_bits_passes_the_easy_tests_and_not_all(bits):
    """That they are many is no luxury: of its upper bits, the first tests see nothing."""
    congruential = planted(bits, "a 31-bit congruential generator")
    found = {test.__name__: test(congruential) for test, _ in TESTS_AND_FAULTS}
    assert found["monobit"] > ALPHA
    assert min(found.values()) < ALPHA


def agreement(first, second):
    """Whether bits of two streams agree as often as not."""
    return monobit(first[: second.size] ^ second[: first.size])


def test_streams_launches_and_draws_have_nothing_in_common(bits):
    """Bit by bit, and shifted by one to four words, Bonferroni over all; a stream again, and one bit in 300 of it, are found."""
    other = Randomness.from_seed(1)
    other._noise, other._sampling = other._sampling, other._noise
    others = [bits_of(made) for made in (other, Randomness.from_seed(1, launch=1), Randomness.from_seed(2))]
    others += [bits_of(Randomness.from_operating_system())]
    later = Randomness.from_seed(1)
    later.normal(1)
    values = [agreement(bits[64 * shift :], stream) for stream in others for shift in range(5)]
    assert min(values) * len(values) > ALPHA
    assert agreement(bits[3 * 64 :], bits_of(later)) < ALPHA, "the same keystream, three words on"
    mixed = np.where(np.random.default_rng(0).random(bits.size) < 1 / 300, bits, others[0])
    assert agreement(bits, mixed) < ALPHA


def test_normals_come_from_the_keystream_of_rfc_8439():
    """Appendix A.1, vector 1: the noise of the key 0 is Box and Muller's transform of that keystream, byte for byte."""
    keystream = bytes.fromhex(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    words = [int.from_bytes(keystream[at : at + 8], "little") for at in range(0, 40, 8)]
    randomness = Randomness(sampling_key=bytes([1] * 32), noise_key=bytes(32), reproducible=True)
    numbers = randomness.normal(4)
    for pair in range(2):
        last = (words[4] >> 32 * pair) % 2**32  # a half word a pair
        u = ((words[pair] % 2**63) * 2**33 + 2 * last + 1) / 2**96
        turn = (words[2 + pair] - 2**64 * (words[2 + pair] >= 2**63)) / 2**64
        radius = math.sqrt(-2 * math.log(u))
        assert numbers[pair] == pytest.approx(radius * math.cos(2 * math.pi * turn), abs=1e-14)
        assert numbers[2 + pair] == pytest.approx(radius * math.sin(2 * math.pi * turn), abs=1e-14)


def anderson_darling(numbers):
    """p-value of the Anderson-Darling statistic A^2, which sees the tails; far out P(A^2 > z) is sqrt(3) P(chi^2_1 > 2 z)."""
    ordered = np.sort(numbers)
    count = 2 * np.arange(1, ordered.size + 1) - 1
    total = (count * (stats.norm.logcdf(ordered) + stats.norm.logsf(ordered[::-1]))).mean()
    return min(1.0, math.sqrt(3) * stats.chi2.sf(2 * (-ordered.size - total), 1))


def test_normals_pass_anderson_and_darlings_test():
    """And not if they are 2% too wide, or of Student's t law with 50 degrees of freedom, or moved by a 50th."""
    numbers = Randomness.from_seed(3).normal(200_000)
    assert anderson_darling(numbers) > ALPHA
    assert anderson_darling(numbers * 1.02) < ALPHA
    assert anderson_darling(stats.norm.isf(stats.norm.sf(numbers)) + 0.02) < ALPHA
    assert anderson_darling(numbers * np.sqrt(50 / np.random.default_rng(0).chisquare(50, numbers.size))) < ALPHA


def test_as_many_normals_lie_beyond_four_and_five_standard_deviations_as_should():
    """Of 40 million, 2534 and 23 are expected; numbers cut off at 4, and tails twice as heavy, are found."""
    randomness = Randomness.from_seed(4)
    beyond = np.zeros(2, dtype=np.int64)
    for _ in range(40):
        numbers = np.abs(randomness.normal(1_000_000))
        far = numbers[numbers > 4.0]
        beyond += [far.size, int((far > 5.0).sum())]
    for threshold, count in zip((4.0, 5.0), beyond, strict=True):
        law = stats.binom(40_000_000, 2 * stats.norm.sf(threshold))
        assert 2 * min(law.cdf(count), law.sf(count - 1)) > ALPHA
        assert law.cdf(0) < ALPHA
    assert law.sf(3 * int(beyond[1]) - 1) < ALPHA
    assert stats.binom(40_000_000, 2 * stats.norm.sf(4.0)).sf(2 * int(beyond[0]) - 1) < ALPHA


@pytest.mark.parametrize("power", [20, 40, 60])
def test_the_far_tail_has_the_law_of_the_normal_tail(power):
    """Words whose u is below 2^-20, 2^-40, 2^-60 (radii beyond 5.3, 7.4, 9.1): there r^2 / 2 is exponential. Kolmogorov-Smirnov,
    error probability 1e-6; without the last 32 bits of the radius, u below 2^-60 has eight values, and is found.
    """
    keystream, count = Keystream(bytes(32)), 8192
    words, halves = np.empty(2 * count, dtype=np.uint64), np.empty(count // 2, dtype=np.uint64)
    keystream.fill(words)
    keystream.fill(halves)
    words[:count] = (words[:count] % np.uint64(2**63)) >> np.uint64(power)

    def p_value(finer):
        numbers = np.empty(2 * count)
        box_muller(words.copy(), finer, numbers)
        excess = (numbers[:count] ** 2 + numbers[count:] ** 2) / 2 - power * math.log(2)
        return stats.kstest(excess, "expon").pvalue

    assert p_value(halves.view(np.uint32)) > ALPHA
    if power == 60:
        assert p_value(np.zeros(count, dtype=np.uint32)) < ALPHA


def lag_p_value(rows, lags=24):
    """Rows are releases: a coordinate is uncorrelated with itself 1 to 24 releases ago, and so are the squares."""
    values = []
    for numbers in (rows, rows**2 - (rows**2).mean()):
        for lag in range(1, lags + 1):
            products = (numbers[lag:] * numbers[:-lag]).ravel()
            values.append(two_sided(products.sum() / math.sqrt(float((products**2).sum()))))
    return min(1.0, len(values) * min(values))


def test_the_noise_of_a_parameter_is_independent_of_its_noise_in_earlier_releases():
    """Also with a parameter count at which blocks and draws do not fall together; noise of which 2% is that of 17 releases ago
    is found."""
    plan = PrivacyPlan(sample_rate=0.1, steps=64, clipping=Flat(1.0), noise=Constant(1.0), expected_batch_size=1)
    mechanism = plan.mechanism(Randomness.from_seed(5), Ledger.in_memory(plan, delta=1e-5))
    sums = ClippedSum({"a": torch.zeros(7001), "b": torch.zeros(13)}, torch.zeros(0, 1), plan.clipping)
    rows = np.stack([mechanism.release(sums).gradients["a"].numpy() for _ in range(64)]).astype(np.float64)
    assert lag_p_value(rows) > ALPHA
    reused = rows.copy()
    reused[17:] = 0.98 * rows[17:] + 0.02 * rows[:-17]
    assert lag_p_value(reused) < ALPHA


def gaps_p_value(coins, probability):
    """Between two heads are as many coins as a geometric law says: chi-square over ten intervals, each as probable."""
    gaps = np.diff(np.flatnonzero(coins))
    borders = np.unique(stats.geom(probability).ppf(np.linspace(0, 1, 11)[1:-1]))
    cells = np.searchsorted(borders, gaps, side="left")
    expected = np.diff(np.concatenate([[0.0], stats.geom(probability).cdf(borders), [1.0]])) * gaps.size
    return float(stats.chisquare(np.bincount(cells, minlength=expected.size), expected).pvalue)


def test_coins_fall_without_memory_within_a_draw_and_over_draws():
    """Gaps within a draw, and how often an example is in two batches running: error probability 1e-6 each. Coins that stick
    once in 50, and batches that keep 2% of the one before, are found."""
    rate, randomness = 0.1, Randomness.from_seed(6)
    draws = np.stack([randomness.bernoulli(50_000, rate) for _ in range(20)])
    assert gaps_p_value(draws.ravel(), rate) > ALPHA
    rng = np.random.default_rng(0)
    sticky = draws.ravel().copy()
    sticky[1:] |= sticky[:-1] & (rng.random(sticky.size - 1) < 0.04)
    assert gaps_p_value(sticky, rate) < ALPHA

    def together(batches):
        law = stats.binom(batches[1:].size, rate**2)
        count = int((batches[1:] & batches[:-1]).sum())
        return 2 * min(law.cdf(count), law.sf(count - 1))

    assert together(draws) > ALPHA
    kept = draws.copy()
    kept[1:] |= draws[:-1] & (rng.random(draws[1:].shape) < 0.04)
    assert together(kept) < ALPHA
