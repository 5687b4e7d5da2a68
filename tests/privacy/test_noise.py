"""The noise is what the plan says: its scale, its shape, its independence. Every check also rejects noise that is not.

A check computes a p-value and rejects below `ALPHA`, so on fresh randomness each would fail by chance once in a million; the
seeds are fixed, so none ever does.
"""

import copy
import itertools
import os
import pickle
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy import stats

from tacit.privacy import ClippedSum, Constant, Flat, Grouped, Ledger, Linear, PrivacyPlan, Randomness, UserError
from tacit.privacy import normals as arithmetic
from tacit.privacy.mechanism import _BLOCK
from tacit.privacy.normals import box_muller, grid_of, noisy_mean
from tacit.privacy.randomness import _BYTES_A_NONCE, _WORDS, Keystream

ALPHA = 1e-6
SIGMA = Constant(1.7)
SHAPES = {"conv.weight": (40, 25, 5), "conv.bias": (5000,), "head.weight": (70, 80)}
CLIPPINGS = {
    "flat": Flat(0.3),
    "grouped": Grouped((("conv*",), ("head*",)), (0.3, 0.4)),
    "grouped, shaped": Grouped((("conv.weight",), ("conv.bias", "head*")), (2.0, 0.1), noise_shape=(1.0, 7.0)),
}


class Altered(Randomness):
    """A generator with a fault: the noise passes through `fault` first."""

    def __init__(self, seed, fault):
        self._true, self._fault = Randomness.from_seed(seed), fault
        self.reproducible = True

    def normal(self, shape):
        return self._fault(self._true.normal(shape))


def scale_p_value(noise, std):
    """Two-sided p-value that `noise` is N(0, std^2): sum of squares / std^2 is chi-square with as many degrees of freedom."""
    statistic = float(np.sum((noise / std) ** 2))
    return 2 * min(stats.chi2.cdf(statistic, noise.size), stats.chi2.sf(statistic, noise.size))


def shape_p_value(noise, std):
    """Kolmogorov-Smirnov p-value that `noise` is N(0, std^2)."""
    return stats.kstest(noise / std, "norm").pvalue


def mean_p_value(noise, std):
    """Two-sided p-value that N(0, std^2) has the mean of `noise`."""
    return 2 * stats.norm.sf(abs(noise.mean()) / std * np.sqrt(noise.size))


def independence_p_value(first, second):
    """p-value that two samples are uncorrelated, and so are their squares (Bonferroni over the two)."""
    return 2 * min(stats.pearsonr(first, second).pvalue, stats.pearsonr(first**2, second**2).pvalue)


def plan_of(clipping=CLIPPINGS["flat"], noise=SIGMA, steps=8, batch=16.0):
    return PrivacyPlan(sample_rate=0.1, steps=steps, clipping=clipping, noise=noise, expected_batch_size=batch)


def sums_of(clipping, shapes=SHAPES, *, examples=0, value=0.0):
    gradients = {name: torch.full(shape, value, dtype=torch.float64) for name, shape in shapes.items()}
    return ClippedSum(gradients, torch.zeros(examples, len(clipping.clipping_norms)), clipping)


def noises(plan, randomness, releases=1, **summed):
    """The noise of so many releases, per parameter, undone from the division by the expected batch size."""
    mechanism = plan.mechanism(randomness, Ledger.in_memory(plan, delta=1e-5))
    value = summed.get("value", 0.0)
    return [
        {
            name: gradient.numpy().ravel() * plan.expected_batch_size - value
            for name, gradient in mechanism.release(sums_of(plan.clipping, **summed)).gradients.items()
        }
        for _ in range(releases)
    ]


def expected_std(clipping, name, sigma):
    """From the definition, not from `noise_stds`: s_j = c * shape_j with sum (C_j / s_j)^2 = 1 / sigma^2."""
    if isinstance(clipping, Flat):
        return sigma * clipping.clipping_norm
    shape = clipping.noise_shape or (1.0,) * len(clipping.groups)
    total = sum((bound / relative) ** 2 for bound, relative in zip(clipping.clipping_norms, shape))
    group = next(j for j, names in enumerate(clipping.groups) if any(name.startswith(n.rstrip("*")) for n in names))
    return sigma * np.sqrt(total) * shape[group]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_noise_has_the_scale_and_the_shape_and_the_mean_of_its_group(kind, name):
    """Each of the three checks rejects true noise with probability 1e-6."""
    clipping = CLIPPINGS[kind]
    noise, std = noises(plan_of(clipping), Randomness.from_seed(1))[0][name], expected_std(clipping, name, 1.7)
    assert scale_p_value(noise, std) > ALPHA
    assert shape_p_value(noise, std) > ALPHA
    assert mean_p_value(noise, std) > ALPHA


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_the_scale_check_rejects_noise_that_is_ten_percent_off(kind, factor):
    """Ten percent move the statistic of 5000 coordinates by at least 9 of its standard deviations."""
    clipping = CLIPPINGS[kind]
    wrong = noises(plan_of(clipping), Altered(1, lambda noise: noise * factor))[0]
    for name in SHAPES:
        assert scale_p_value(wrong[name], expected_std(clipping, name, 1.7)) < ALPHA


def test_the_scale_check_rejects_the_noise_of_another_group():
    """Noise of the effective multiplier put on every group alike is wrong for both groups of a shaped clipping."""
    clipping = CLIPPINGS["grouped, shaped"]
    noise = noises(plan_of(clipping), Randomness.from_seed(1))[0]
    assert scale_p_value(noise["conv.weight"], expected_std(clipping, "head.weight", 1.7)) < ALPHA


@pytest.mark.parametrize(
    "fault",
    [lambda z: np.sqrt(3) * (2 * stats.norm.cdf(z) - 1), lambda z: np.clip(z, -1.5, 1.5), np.sign, np.abs],
    ids=["uniform", "cut off", "signs", "absolute"],
)
def test_the_shape_check_rejects_other_distributions(fault):
    noise = noises(plan_of(), Altered(1, fault))[0]["head.weight"]
    assert shape_p_value(noise, expected_std(CLIPPINGS["flat"], "head.weight", 1.7)) < ALPHA


def test_the_mean_check_rejects_a_shift_of_a_tenth_of_the_scale():
    noise = noises(plan_of(), Altered(1, lambda z: z + 0.1))[0]["head.weight"]
    assert mean_p_value(noise, expected_std(CLIPPINGS["flat"], "head.weight", 1.7)) < ALPHA


def pairs_of(randomness):
    """Pairs that must be independent: coordinates, parameters, releases next to each other and far apart."""
    releases = noises(plan_of(), randomness, releases=4)
    first, second, last = (release["conv.weight"] for release in (releases[0], releases[1], releases[3]))
    return {
        "neighbouring coordinates": (first[:-1], first[1:]),
        "halves of a parameter": (first[:2500], first[2500:]),
        "parameters": (releases[0]["conv.bias"], first),
        "parameters, reversed": (releases[0]["conv.bias"], first[::-1]),
        "consecutive releases": (first, second),
        "the end of one release and the start of the next": (releases[0]["head.weight"][:5000], second),
        "distant releases": (first, last),
    }


@pytest.mark.parametrize("pair", pairs_of(Randomness.from_seed(2)))
def test_noise_is_independent(pair):
    """Each check rejects independent noise with probability 1e-6."""
    assert independence_p_value(*pairs_of(Randomness.from_seed(2))[pair]) > ALPHA


def test_the_independence_check_rejects_noise_used_twice_and_noise_smoothed():
    once = {}
    repeated = pairs_of(Altered(2, lambda z: once.setdefault(z.shape, z).copy()))
    smoothed = pairs_of(Altered(2, lambda z: z + 0.15 * np.roll(z.ravel(), 1).reshape(z.shape)))
    assert independence_p_value(*repeated["consecutive releases"]) < ALPHA
    assert independence_p_value(*repeated["distant releases"]) < ALPHA
    assert independence_p_value(*smoothed["neighbouring coordinates"]) < ALPHA


def test_noise_and_sampling_come_from_streams_that_do_not_touch():
    quiet, busy = Randomness.from_seed(3), Randomness.from_seed(3)
    busy.bernoulli(12345, 0.5)
    assert (quiet.normal(1000) == busy.normal(1000)).all()
    quiet.normal(777)
    quiet.bernoulli(12345, 0.5)
    assert (quiet.bernoulli(1000, 0.5) == busy.bernoulli(1000, 0.5)).all()


def test_noise_is_independent_of_who_takes_part():
    """Point-biserial correlation of the noise of coordinate i with the coin of example i; error probability 1e-6."""
    randomness = Randomness.from_seed(4)
    coins, noise = randomness.bernoulli(20_000, 0.5), randomness.normal(20_000)
    assert stats.pearsonr(coins, noise).pvalue > ALPHA
    assert stats.pearsonr(noise > 0.3, noise).pvalue < ALPHA


def test_an_empty_batch_gets_the_same_noise_as_a_full_one():
    empty, full = (noises(plan_of(), Randomness.from_seed(5), examples=n)[0] for n in (0, 40))
    for name in SHAPES:
        assert (empty[name] == full[name]).all()
        assert scale_p_value(empty[name], expected_std(CLIPPINGS["flat"], name, 1.7)) > ALPHA


@pytest.mark.parametrize("examples", [0, 1, 16, 400])
def test_the_divisor_is_the_expected_batch_size_whatever_the_batch(examples):
    plan = plan_of(noise=Constant(0.0), batch=16.0)
    mechanism = plan.mechanism(Randomness.from_seed(0), Ledger.in_memory(plan, delta=1e-5))
    released = mechanism.release(sums_of(plan.clipping, examples=examples, value=8.0))
    assert all((gradient == 0.5).all() for gradient in released.gradients.values())


def test_each_step_of_a_schedule_gets_its_own_scale():
    """Four checks with error probability 1e-6 each; each rejects the scale of the step before."""
    plan = plan_of(noise=Linear(4.0, 1.0), steps=4)
    for step, noise in enumerate(noises(plan, Randomness.from_seed(6), releases=4)):
        std = (4.0 - step) * 0.3
        assert scale_p_value(noise["head.weight"], std) > ALPHA
        assert scale_p_value(noise["head.weight"], std + 0.3) < ALPHA


def test_a_sum_in_half_precision_is_refused_before_anything_is_paid():
    plan = plan_of()
    ledger = Ledger.in_memory(plan, delta=1e-5)
    summed = ClippedSum({"w": torch.zeros(6, dtype=torch.bfloat16)}, torch.zeros(0, 1), plan.clipping)
    with pytest.raises(UserError, match="half precision"):
        plan.mechanism(Randomness.from_seed(7), ledger).release(summed)
    assert ledger.releases == 0


@pytest.mark.parametrize("same_number", [False, True])
@pytest.mark.parametrize("draw", [lambda r: r.normal(1), lambda r: r.bernoulli(1, 0.5)], ids=["noise", "coins"])
def test_a_forked_process_cannot_draw_its_parents_noise_or_coins(draw, same_number, monkeypatch):
    """Also if the system gave it the number of the process that the keys were made in, which had ended."""
    randomness = Randomness.from_operating_system()
    if same_number:
        number = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: number)
    draw(randomness)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            draw(Randomness.from_operating_system())  # its own it can use
            draw(randomness)
            os.write(writer, b"drawn")
        except UserError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"refused"
    draw(randomness)  # nor is the parent kept from it
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_in_double_precision_and_comes_back_in_the_type_of_the_sum(dtype):
    plan = plan_of()
    summed = ClippedSum({"w": torch.zeros(6000, dtype=dtype)}, torch.zeros(0, 1), plan.clipping)
    released = plan.mechanism(Randomness.from_seed(7), Ledger.in_memory(plan, delta=1e-5)).release(summed)
    assert released.gradients["w"].dtype == dtype
    grid, noise = grid_of(1.7 * 0.3, 16.0), Randomness.from_seed(7).normal(6000) * (1.7 * 0.3) / 16
    assert (released.gradients["w"].double().numpy() == np.rint(noise / grid) * grid).all()


def test_a_scalar_and_an_empty_parameter_get_noise_of_their_shape():
    plan = plan_of()
    summed = ClippedSum({"s": torch.zeros(()), "e": torch.zeros(0, 3)}, torch.zeros(0, 1), plan.clipping)
    released = plan.mechanism(Randomness.from_seed(7), Ledger.in_memory(plan, delta=1e-5)).release(summed).gradients
    assert released["s"].shape == ()
    assert released["s"] != 0
    assert released["e"].shape == (0, 3)


def test_objects_keyed_by_the_operating_system_never_repeat_each_other():
    """Two equal doubles among 4 x 4 x 1000 pairs from true randomness: probability below 1e-8."""
    drawn = [set(Randomness.from_operating_system().normal(1000).tolist()) for _ in range(4)]
    assert len(set.union(*drawn)) == 4000
    coins = [Randomness.from_operating_system().bernoulli(1000, 0.5).tolist() for _ in range(4)]
    assert len({tuple(row) for row in coins}) == 4


def test_launches_and_seeds_and_streams_never_repeat_each_other():
    objects = [Randomness.from_seed(seed, launch=launch) for seed in (0, 1, 10) for launch in (0, 1, 10, 100)]
    drawn = [value for randomness in objects for value in randomness.normal(500)]
    assert len(set(drawn)) == len(drawn)
    coins = {tuple(randomness.bernoulli(200, 0.5).tolist()) for randomness in objects}
    assert len(coins) == len(objects)
    again = Randomness.from_seed(1, launch=10).normal(500)
    assert set(again.tolist()) <= set(drawn)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_randomness_cannot_be_copied_because_a_copy_repeats_the_noise(duplicate):
    with pytest.raises(TypeError, match="cannot be copied"):
        duplicate(Randomness.from_operating_system())


def chacha20_block(key, counter, nonce):
    """One block of RFC 8439, section 2.3, as slowly and plainly as it is written there."""

    def quarter(s, a, b, c, d):
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) % 2**32
            s[z] ^= s[x]
            s[z] = (s[z] << bits | s[z] >> (32 - bits)) % 2**32

    start = [*struct.unpack("<16I", b"expand 32-byte k" + key + struct.pack("<I", counter) + nonce)]
    state = start.copy()
    for _ in range(10):
        for column in range(4):
            quarter(state, column, column + 4, column + 8, column + 12)
        for diagonal in range(4):
            rest = ((diagonal + 1) % 4 + 4, (diagonal + 2) % 4 + 8, (diagonal + 3) % 4 + 12)
            quarter(state, diagonal, *rest)
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(start, state)))


def filled(keystream, words=16):
    """The next bytes of a keystream."""
    array = np.full(words, 99, dtype=np.uint64)
    keystream.fill(array)
    return array.tobytes()


def test_the_keystream_is_that_of_rfc_8439():
    """Appendix A.1, vectors 1, 2 and 5, and section 2.3.2 for the reference used below."""
    assert filled(Keystream(bytes(32))).hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    far = Keystream(bytes(32))
    far._nonces = itertools.count(2 << 88)  # the nonce whose last byte is 2
    assert filled(far, 8).hex() == (
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"
    )
    block = chacha20_block(bytes(range(32)), 1, bytes.fromhex("000000090000004a00000000"))
    assert block.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e")


def test_fills_go_on_where_the_last_one_ended():
    """Of whatever sizes: together they are the blocks 0, 1, 2, ... of nonce 0."""
    key = bytes(range(32))
    keystream, sizes = Keystream(key), [1, 16, 0, 3, 8, 100, 7, 1]
    drawn = b"".join(filled(keystream, words) for words in sizes)
    blocks = b"".join(chacha20_block(key, block, bytes(12)) for block in range(sum(sizes) // 8 + 1))
    assert drawn == blocks[: 8 * sum(sizes)]


def test_a_nonce_serves_for_2_to_the_30_blocks_and_then_the_next_one_begins_at_block_0():
    key = bytes(range(32))
    keystream = Keystream(key)
    for nonce in range(300):
        number = nonce.to_bytes(12, "little")
        assert filled(keystream) == chacha20_block(key, 0, number) + chacha20_block(key, 1, number)
        assert keystream._left == _BYTES_A_NONCE - 128
        keystream._left = 127  # one byte less than the next fill needs
    assert _BYTES_A_NONCE == 64 * 2**30
    keystream._left = 128
    last = filled(keystream)
    assert last == chacha20_block(key, 2, number) + chacha20_block(key, 3, number)
    assert keystream._left == 0


def test_bytes_count_as_used_before_they_are_drawn():
    """An interruption while they are drawn must not give a nonce more than its share."""
    keystream = Keystream(bytes(32))
    filled(keystream)
    left, present = keystream._left, keystream._present

    class Interrupted:
        def update_into(self, *buffers):
            present.update_into(*buffers)
            raise KeyboardInterrupt

    keystream._present = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        filled(keystream)
    assert keystream._left == left - 128


def test_threads_that_share_a_keystream_get_different_bits():
    keystream = Keystream(bytes(32))
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: filled(keystream, 8), range(2000)))
    assert len(set(drawn)) == len(drawn)
    assert keystream._left == _BYTES_A_NONCE - 64 * len(drawn)


def test_no_block_of_keystream_is_used_twice_by_draws_streams_launches_or_objects():
    """Two of 2^512 blocks agree by chance with probability below 1e-100."""
    made = [Randomness.from_seed(s, launch=launch) for s in (0, 1) for launch in (0, 1)]
    made += [Randomness.from_operating_system() for _ in range(2)]
    blocks = []
    for keystream in [stream for randomness in made for stream in (randomness._sampling, randomness._noise)]:
        for words in (8, 16, 64, *[_WORDS] * 5, 8):
            content = filled(keystream, words)
            blocks += [content[at : at + 64] for at in range(0, len(content), 64)]
    assert len(set(blocks)) == len(blocks) > 100_000


def test_every_draw_takes_words_of_its_own(monkeypatch):
    """Whatever is drawn, in whatever sizes: all of it comes from `fill`, and no piece is larger than it can be."""
    sizes = []
    fill = Keystream.fill
    monkeypatch.setattr(Keystream, "fill", lambda self, words: (sizes.append(len(words)), fill(self, words)))
    randomness = Randomness.from_seed(0)
    randomness.normal(3 * _WORDS + 5)
    randomness.normal(7)
    quarter = _WORDS // 4  # the last bits of the radii: a half word a pair
    assert sizes == [_WORDS, quarter, _WORDS, quarter, _WORDS, quarter, 6, 2, 8, 2]
    assert randomness._noise._left == _BYTES_A_NONCE - 8 * sum(sizes)
    del sizes[:]
    randomness.bernoulli(_WORDS + 5, 0.5)
    assert sizes[0::2] == [_WORDS // 4, 2]  # 16 bits a coin, and more for the few that these leave open
    assert randomness._sampling._left == _BYTES_A_NONCE - 8 * sum(sizes)


def test_a_piece_of_keystream_that_would_not_be_filled_is_refused():
    with pytest.raises(ValueError, match="at most"):
        Keystream(bytes(32)).fill(np.zeros(_WORDS + 1, dtype=np.uint64))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1001, _WORDS - 1, _WORDS, _WORDS + 1, 2 * _WORDS + 3])
def test_any_number_of_normals_can_be_drawn(count):
    numbers = Randomness.from_seed(8).normal(count)
    assert numbers.shape == (count,)
    assert numbers.dtype == np.float64
    assert np.isfinite(numbers).all()
    assert len(set(numbers.tolist())) == count
    assert (np.abs(numbers) < 11.6).all()


def tail_p_value(noise, threshold):
    """Two-sided p-value of how many of n standard normals lie beyond +-threshold: Binomial(n, 2 Phi(-threshold))."""
    beyond, law = int((np.abs(noise) > threshold).sum()), stats.binom(noise.size, 2 * stats.norm.sf(threshold))
    return min(1.0, 2 * min(law.cdf(beyond), law.sf(beyond - 1)))


def test_four_million_normals_have_the_shape_and_the_tails_of_normals():
    """Five checks with error probability 1e-6 each; the tail checks reject numbers cut at 4.4 and a scale 2% too large."""
    noise = Randomness.from_seed(9).normal((2000, 2000)).ravel()
    assert shape_p_value(noise, 1.0) > ALPHA
    assert scale_p_value(noise, 1.0) > ALPHA
    for threshold in (3.0, 4.0, 4.5):
        assert tail_p_value(noise, threshold) > ALPHA
    assert tail_p_value(np.clip(noise, -4.4, 4.4), 4.5) < ALPHA
    assert tail_p_value(noise * 1.02, 3.0) < ALPHA
    assert shape_p_value(noise * 1.02, 1.0) < ALPHA


def test_the_two_numbers_of_a_pair_are_independent():
    """They share a radius, so their squares would tell; error probability 1e-6, and a shared radius with a fixed angle fails."""
    noise = Randomness.from_seed(10).normal(_WORDS)
    first, second = noise[: _WORDS // 2], noise[_WORDS // 2 :]
    assert independence_p_value(first, second) > ALPHA
    assert independence_p_value(first, np.hypot(first, second)) < ALPHA


class Version:
    """The compiled arithmetic for one instruction set."""

    def __init__(self, name):
        self.name, self.noisy_mean = name, arithmetic._compiled.noisy_mean
        self.normals(np.zeros(2, dtype=np.uint64), np.zeros(1, dtype=np.uint32), np.zeros(2))

    def normals(self, words, finer, numbers):
        COMPILED.normals(words, finer, numbers, self.name)


COMPILED = arithmetic._compiled


@pytest.fixture(params=["any", "avx2", "avx512", "torch"])
def way(request, monkeypatch):
    """Every way of computing normals that can run here."""
    if request.param == "torch":
        monkeypatch.setattr(arithmetic, "_compiled", None)
        return
    if COMPILED is None:
        pytest.skip("the C code was not built")
    try:
        monkeypatch.setattr(arithmetic, "_compiled", Version(request.param))
    except ValueError as error:
        pytest.skip(str(error))


def pair_of(first, second, half=0):
    pair = np.empty(2)
    words = np.array([first % 2**64, second % 2**64], dtype=np.uint64)
    box_muller(words, np.array([half], dtype=np.uint32), pair)
    return pair


def test_the_most_extreme_words_give_finite_normals_out_to_eleven_standard_deviations(way):
    least, most = -(2**63), 2**63 - 1
    for first, second, half in itertools.product(*[(least, least + 1, -1, 0, 1, most)] * 2, (0, 1, 2**32 - 1)):
        pair = pair_of(first, second, half)
        assert np.isfinite(pair).all()
        expected = np.sqrt(-2 * np.log((first % 2**63 + (half + 0.5) * 2.0**-32) * 2.0**-63))
        assert np.hypot(*pair) == pytest.approx(expected, abs=1e-9)
    assert expected < 1e-6
    pair = pair_of(0, 0)
    assert 11.5 < pair[0] < 11.6
    # As the docstring says: so far out is an exact number with probability 1e-30.
    assert 2 * stats.norm.sf(pair[0]) < 1e-30


def test_normals_are_those_of_their_words_to_fourteen_digits(way):
    """Against longer arithmetic: random words, all quarters of the circle and their borders, both ends of the radius. Beyond
    the fourteen digits, each is as near as the docstring of `box_muller` says, which the bound in docs/security.md rests on.
    """
    rng = np.random.default_rng(0)
    ends = [2**63 - 1 - 2**k for k in range(62)] + [2**k for k in range(64)]
    borders = [((turn << 61) + step) % 2**64 for turn in range(8) for step in (-1, 0, 1)]
    first = np.array([*rng.integers(0, 2**64, 4000, dtype=np.uint64).tolist(), *ends], dtype=np.uint64)
    second = np.array(
        [*borders, *rng.integers(0, 2**64, len(first) - len(borders), dtype=np.uint64).tolist()], dtype=np.uint64
    )
    finer = rng.integers(0, 2**32, len(first), dtype=np.uint32)
    numbers = np.empty(2 * len(first))
    box_muller(np.concatenate([first, second]), finer, numbers)
    longer = np.longdouble
    below = longer(2**63) - (first % 2**63).astype(longer) - (finer.astype(longer) + 0.5) * longer(2.0) ** -32
    u = (first % 2**63).astype(longer) + (finer.astype(longer) + 0.5) * longer(2.0) ** -32
    scale = longer(2.0) ** -63
    logarithm = np.where(below < u, np.log1p(-below * scale), np.log(u * scale))
    turn = second.view(np.int64).astype(longer) * (4 * np.arctan(longer(1))) * scale
    radius = np.sqrt(-2 * logarithm)
    errors = np.abs(numbers - np.concatenate([radius * np.cos(turn), radius * np.sin(turn)]))
    assert errors.max() < 1e-14
    in_units = errors / np.tile(2.0**-50 * radius, 2)
    assert 0.1 < in_units.max() < 1


def test_both_ways_of_computing_normals_agree(monkeypatch):
    if arithmetic._compiled is None:
        pytest.skip("the C code was not built")
    compiled = Randomness.from_seed(3).normal(100_001)
    monkeypatch.setattr(arithmetic, "_compiled", None)
    assert np.abs(Randomness.from_seed(3).normal(100_001) - compiled).max() < 1e-14


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_noisy_mean_is_the_nearest_value_of_its_grid(way, dtype):
    rng = np.random.default_rng(1)
    clipped, noise = rng.standard_normal(1001).astype(dtype), rng.standard_normal(1001)
    private = np.empty(1001, dtype=dtype)
    noisy_mean(clipped, noise, 3.7, 129.0, private)
    mean, grid = (clipped.astype(np.float64) + 3.7 * noise) / 129.0, grid_of(3.7, 129.0)
    assert (private == np.rint(mean / grid) * grid).all()
    assert np.abs(private - mean).max() <= grid / 2 * (1 + 1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_without_noise_a_mean_is_not_rounded_to_a_grid(way, dtype):
    clipped, private = np.random.default_rng(1).standard_normal(1001).astype(dtype), np.empty(1001, dtype=dtype)
    noisy_mean(clipped, np.ones(1001), 0.0, 129.0, private)
    assert (private == (clipped.astype(np.float64) / 129.0).astype(dtype)).all()


def test_the_compiled_arithmetic_refuses_what_does_not_fit():
    if arithmetic._compiled is None:
        pytest.skip("the C code was not built")
    words, numbers, floats = np.zeros(4, dtype=np.uint64), np.zeros(4), np.zeros(4, dtype=np.float32)
    finer = np.zeros(2, dtype=np.uint32)
    with pytest.raises(ValueError, match="even count"):
        arithmetic._compiled.normals(words[:3], finer[:1], numbers[:3])
    with pytest.raises(ValueError, match="as many"):
        arithmetic._compiled.normals(words, finer, numbers[:2])
    with pytest.raises(ValueError, match="half as many"):
        arithmetic._compiled.normals(words, finer[:1], numbers)
    with pytest.raises(ValueError, match="as many"):
        arithmetic._compiled.noisy_mean(floats, numbers[:3], 1.0, 1.0, 1.0, floats)
    with pytest.raises(ValueError):
        arithmetic._compiled.normals(words[::2], finer[::2], numbers[::2])


def test_memory_does_not_grow_with_what_is_drawn():
    """In a process of its own: 256 MB of normals and 64 MB of coins take little more than themselves."""
    code = (
        "import resource; from tacit.privacy import Randomness; r = Randomness.from_seed(0);"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; r.normal(2**18); r.bernoulli(2**18, 0.5);"
        "a = peak(); n = r.normal(2**25); b = peak(); del n; r.normal(5); c = r.bernoulli(2**26, 0.1); print(b - a, peak() - b)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    normals, coins = map(int, done.stdout.split())
    assert normals < 1.05 * 256 * 1024
    assert coins < 1.05 * 64 * 1024


@pytest.mark.parametrize("probability", [0.0, 2.0**-11, 0.02048, 0.3, 1 - 2.0**-53, 1.0])
def test_coins_fall_at_their_rate(probability):
    """Binomial, error probability 1e-6; a rate that is 3% off is rejected where coins fall often enough."""
    coins = Randomness.from_seed(11).bernoulli(1_000_000, probability)
    heads, law = int(coins.sum()), stats.binom(coins.size, probability)
    assert 2 * min(law.cdf(heads), law.sf(heads - 1)) > ALPHA
    if 0.01 < probability < 0.9:
        assert stats.binom(coins.size, probability * 1.03).cdf(heads) < ALPHA


def test_a_coin_shows_true_for_as_many_of_2_to_the_64_numbers_as_its_probability_says(monkeypatch):
    """A coin's number is its 16 bits and, if these leave it open, 48 bits of a further word."""

    def coin(number, probability):
        parts = iter([number >> 48, (number % 2**48) << 16])
        monkeypatch.setattr(Keystream, "fill", lambda self, words: words.fill(next(parts)) if len(words) else None)
        return bool(Randomness.from_seed(0).bernoulli(1, probability)[0])

    for probability in (0.0, 2.0**-64, 1e-9, 0.02048, 0.5, 1 - 2.0**-53, 1.0):
        below = int(probability * 2**64)
        for number in {0, 1, below - 1, below, below + 1, below - 2**48, below + 2**48, 2**64 - 1}:
            if 0 <= number < 2**64:
                assert coin(number, probability) == (number < below)


def test_one_draw_serves_many_parameters_and_no_number_serves_two():
    """600 equal parameters of three releases are uncorrelated, and no six numbers in a row come twice.

    A value of the grid has probability at most 0.4 / 256, so that six in a row agree in one of (600 94)^2 / 2 pairs with
    probability below 1e-7.
    """
    shapes = {f"p{number}": (9, 11) for number in range(200)}
    releases = noises(plan_of(), Randomness.from_seed(12), releases=3, shapes=shapes)
    rows = np.stack([noise for release in releases for noise in release.values()])
    runs = {row[at : at + 6].tobytes() for row in rows for at in range(94)}
    assert len(runs) == 94 * len(rows)
    # 600 * 599 / 2 correlations of 99 numbers each: Bonferroni keeps the error probability at 1e-6.
    correlations = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
    worst = np.abs(correlations).max()
    t = worst * np.sqrt(97 / (1 - worst**2))
    assert 2 * stats.t.sf(t, 97) * correlations.size > ALPHA
    twice = np.corrcoef(rows[0], rows[0] + 0.1 * rows[1])[0, 1]
    assert 2 * stats.t.sf(twice * np.sqrt(97 / (1 - twice**2)), 97) * correlations.size < ALPHA


def test_parameters_longer_than_a_block_get_the_noise_of_their_group_throughout():
    """Exactly: each block is one draw, whatever parameters and groups begin and end in it."""
    sizes = {"a": 100_000, "b": 1, "c": 2 * _BLOCK + 5, "d": 77}
    clipping = Grouped((("a", "c"), ("b", "d")), (2.0, 0.1), noise_shape=(1.0, 7.0))
    plan = plan_of(clipping)
    gradients = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    released = plan.mechanism(Randomness.from_seed(7), Ledger.in_memory(plan, delta=1e-5)).release(
        ClippedSum(gradients, torch.zeros(0, 2), clipping)
    )
    drawn, left = Randomness.from_seed(7), sum(sizes.values())
    noise = np.concatenate([drawn.normal(min(_BLOCK, left - at)) for at in range(0, left, _BLOCK)])
    at = 0
    for name, size in sizes.items():
        expected = (gradients[name].numpy() + noise[at : at + size] * expected_std(clipping, name, 1.7)) / 16
        grid = grid_of(expected_std(clipping, name, 1.7), 16.0)
        on_grid = released.gradients[name].numpy() / grid
        # A mean that lies within 1e-6 grids of the middle between two of them may have gone to either.
        assert np.abs(on_grid - expected / grid).max() < 0.5 + 1e-6
        assert (on_grid == np.rint(on_grid)).all()
        at += size


@pytest.mark.parametrize(
    "sum_of",
    [
        lambda: torch.randn(8, 3, 5, 5),
        lambda: torch.randn(8, 3, 5, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(8, 1, 5, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(6, 4).T,
        lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
        lambda: torch.randn(6, 8)[:, ::2],
        lambda: torch.ones(1, 4).expand(6, 4),
        lambda: torch.randn(5, requires_grad=True),
    ],
    ids=[
        "contiguous",
        "channels last",
        "one channel",
        "transposed",
        "permuted",
        "strided",
        "expanded",
        "differentiable",
    ],
)
def test_a_gradient_keeps_the_values_and_the_layout_of_its_sum(sum_of):
    torch.manual_seed(0)
    clipped, plan = sum_of(), plan_of(noise=Constant(0.0))
    summed = ClippedSum({"first": torch.ones(3), "w": clipped}, torch.zeros(0, 1), plan.clipping)
    released = plan.mechanism(Randomness.from_seed(0), Ledger.in_memory(plan, delta=1e-5)).release(summed)
    gradient = released.gradients["w"]
    torch.testing.assert_close(gradient, clipped.detach() / 16)
    assert not gradient.requires_grad
    if clipped.is_contiguous(memory_format=torch.channels_last) if clipped.dim() == 4 else False:
        assert gradient.is_contiguous(memory_format=torch.channels_last)
    if clipped.numel() == clipped.untyped_storage().nbytes() // clipped.element_size() and 1 not in clipped.shape:
        assert gradient.stride() == clipped.stride()
