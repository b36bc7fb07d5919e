"""Ground truth is exact: integers, fractions, decimals of 60 digits."""

import contextlib
import decimal
import functools
import itertools
import math
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_mechanism
from jax.sharding import NamedSharding, PartitionSpec
from programs import UNOPTIMIZED, equations
from scipy import stats

from dpmp._random import positions, threefry4x32
from dpmp.noise_addition import _alias_table, _discrete_gaussian
from dpmp.noise_addition._alias_table import look_up
from dpmp.noise_addition._discrete_gaussian import DiscreteGaussian

KEY = np.array([0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834], np.uint32)
STEP = np.int32(0)
COLUMNS, CAPACITY = 2**13, 2**115
BASE_VARIANCE = 65540
WIDTHS = [(1,), (1, 1), (12, 5), (128, 1), (40, 24, 1), (128**2, 128, 1)]
WIDEST = (16 * 128**2, 16 * 128, 16, 1)
NUM_DRAWS = 2**19
# Of two and four draws for statistics, of one to four for exact comparisons.
FEW_WIDTHS = [(12, 5), (120, 72, 3, 1)]
OTHER_WIDTHS = [*(WIDTHS[i] for i in (0, 3, 5)), WIDEST]
# With fixed keys nothing flakes; this is for the day on which a key changes.
SMALLEST_P_VALUE = 1e-6
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230782")


@pytest.fixture
def in_parts(monkeypatch):
    """A context in which an array of more than a hundred entries is a large one."""

    @contextlib.contextmanager
    def context(entries=100):
        with monkeypatch.context() as patch:
            patch.setattr(_discrete_gaussian, "_PART", entries)
            patch.setattr(_discrete_gaussian, "_NUMBERS_OF_DEVICES", 2 * 3 * 5)
            patch.setattr(_discrete_gaussian, "_SHORTEST_RUN", 1)
            yield

    return context


@pytest.fixture
def sixty_digits():
    with decimal.localcontext(decimal.Context(prec=60)):
        yield


@functools.cache
def true_masses():
    """exp(-x^2 / 2 s0^2) for x = 0, 1, ..., 8191, with 400 bits after the point.

    From exp(-(x+1)^2 u) = exp(-x^2 u) exp(-(2x+1) u). After these, masses are zero.
    """
    masses, mass = [], Decimal(1)
    with decimal.localcontext(decimal.Context(prec=150)):
        ratio = (-1 / Decimal(2 * BASE_VARIANCE)).exp()
        square = ratio * ratio
        for _ in range(8192):
            masses.append(int(mass * 2**400))
            mass, ratio = mass * ratio, ratio * square
    assert masses[-1] == 0
    return masses


@functools.cache
def true_total():
    return 2 * sum(true_masses()) - true_masses()[0]


def test_weights_are_the_rounded_probabilities():
    weights = _alias_table.weights()
    assert len(weights) == COLUMNS
    farthest = math.ceil(12.8 * BASE_VARIANCE**0.5)
    assert weights[4096 + farthest] == weights[4096 - farthest] > 0
    assert sum(weights) == 2**128
    assert weights[0] == 0
    assert weights[1:] == weights[:0:-1]
    excess = [
        weight * true_total() - 2**128 * true_masses()[abs(x)]
        for x, weight in enumerate(weights, -4096)
    ]
    # What rounding leaves over goes to zero.
    assert abs(excess.pop(4096)) < COLUMNS * true_total() // 2
    assert all(2 * abs(e) <= true_total() for e in excess)


def table_total_variation():
    """The exact distance of the table from the base distribution."""
    weights = _alias_table.weights()
    distances = [
        abs(Fraction(weight, 2**128) - Fraction(true_masses()[abs(x)], true_total()))
        for x, weight in enumerate(weights, -4096)
    ]
    beyond = 2 * sum(true_masses()[4096:]) - true_masses()[4096]
    return (sum(distances) + Fraction(beyond, true_total())) / 2


def test_the_charged_total_variation_covers_table_and_lattice(sixty_digits):
    table = table_total_variation()
    assert Fraction(1, 2**119) < table < Fraction(1, 2**118)
    error = lattice_error(4)
    assert 0.9 < error * 2 ** Decimal("112.9") < 1
    lattice = Fraction(error / (1 - error))
    assert lattice < Fraction(1, 2**112)
    charged = Fraction(_discrete_gaussian.NOISE_TOTAL_VARIATION)
    assert 1 < charged / (3 * (table + lattice)) < 5


@functools.cache
def table_as_integers():
    """Ends and other values of the columns, as the sampler reads them."""
    ends, others = _alias_table.alias_table()
    return [join(words) for words in np.stack(ends, axis=1)], others.tolist()


def join(words):
    """The integer of some words, highest first."""
    return functools.reduce(lambda n, word: n << 32 | int(word), words, 0)


def split(integers):
    """Arrays of the four words of some integers."""
    shifts = (96, 64, 32, 0)
    words = [[n >> shift & 0xFFFFFFFF for n in integers] for shift in shifts]
    return [jnp.asarray(np.array(word, np.uint32)) for word in words]


def look_up_integers(integers):
    table = _alias_table.alias_table()
    return np.asarray(jax.jit(look_up)(table, split(integers)))


def test_the_table_gives_every_value_its_weight():
    weights = [0] * COLUMNS
    for column, (end, other) in enumerate(zip(*table_as_integers(), strict=True)):
        own = end - column * CAPACITY
        assert 0 <= own < CAPACITY
        weights[column] += own
        weights[other + 4096] += CAPACITY - own
    assert tuple(weights) == _alias_table.weights()


def test_every_column_turns_from_one_value_to_the_other_at_its_end():
    integers, values = [], []
    for column, (end, other) in enumerate(zip(*table_as_integers(), strict=True)):
        first, last = column * CAPACITY, (column + 1) * CAPACITY - 1
        near = [end + sign * 2**i for i in (0, 32, 64, 96) for sign in (-1, 1)]
        # The highest words are equal, and the lower ones disagree about the order.
        mixed = [end + 2**64 - 2**32, end - 2**64 + 2**32, end + 2**96 - 1]
        for integer in {first, end, last, *near, *mixed}:
            if first <= integer <= last:
                integers.append(integer)
                values.append(column - 4096 if integer < end else other)
    assert len(integers) > 10 * COLUMNS
    np.testing.assert_array_equal(look_up_integers(integers), values)


def integer_of(value):
    """The first integer of a column that stands for a value."""
    ends, others = table_as_integers()
    column = value + 4096
    if ends[column] > column * CAPACITY:
        return column * CAPACITY
    return ends[others.index(value)]


@pytest.mark.parametrize("multipliers", [(12, 5), WIDEST], ids=str)
def test_the_largest_value_is_drawn(multipliers, monkeypatch):
    noise = DiscreteGaussian(multipliers)
    base = max(x for x, w in enumerate(_alias_table.weights(), -4096) if w)
    largest = base * sum(multipliers)
    blocks = split([integer_of(-base), integer_of(base)])
    monkeypatch.setattr(_discrete_gaussian, "threefry4x32", lambda *_: blocks)
    with jax.disable_jit():
        drawn = noise.sample(KEY, (2,), step=STEP, leaf=0)
    assert drawn.tolist() == [-largest, largest]
    assert largest < 2**31


@functools.cache
def draw(multipliers, step=0, leaf=0):
    noise = DiscreteGaussian(multipliers)
    sample = functools.partial(noise.sample, shape=(NUM_DRAWS,), leaf=leaf)
    drawn = jax.jit(sample, compiler_options=UNOPTIMIZED)(KEY, step=jnp.int32(step))
    return np.asarray(drawn)


def is_discrete_gaussian(samples, variance):
    """A chi-square test on 64 cells, the probabilities of which are sums over integers.

    By Poisson summation, exp(-x^2 / 2 s^2) adds up to s sqrt(2 pi) beyond all digits.
    """
    stddev = math.sqrt(variance)
    edges = np.ceil(stddev * stats.norm.ppf(np.arange(1, 64) / 64)).astype(int)
    bounds = [-int(9 * stddev), *edges, int(9 * stddev)]
    probabilities = [
        np.sum(np.exp(-(np.arange(a, b, dtype=np.float64) ** 2) / (2 * variance)))
        for a, b in itertools.pairwise(bounds)
    ]
    expected = np.array(probabilities) / (stddev * math.sqrt(2 * math.pi))
    observed = np.bincount(np.searchsorted(edges, samples, side="right"), minlength=64)
    return is_multinomial(observed, expected)


def is_multinomial(observed, probabilities):
    expected = probabilities * observed.sum()
    statistic = np.sum((observed - expected) ** 2 / expected)
    return stats.chi2.sf(statistic, observed.size - 1) > SMALLEST_P_VALUE


@pytest.mark.parametrize("multipliers", FEW_WIDTHS, ids=str)
def test_the_noise_has_its_variance_and_no_other(multipliers):
    samples, noise = draw(multipliers), DiscreteGaussian(multipliers)
    assert is_discrete_gaussian(samples, noise.variance)
    for factor in (0.98, 1.02):
        assert not is_discrete_gaussian(samples, factor**2 * noise.variance)


@pytest.mark.parametrize("multipliers", FEW_WIDTHS, ids=str)
def test_all_residues_are_as_likely(multipliers):
    # By Poisson summation, they then differ by 2 exp(-pi^2) of themselves or less.
    for modulus in (2, 128, 360):
        assert modulus**2 <= 2 * DiscreteGaussian(multipliers).variance
        counts = np.bincount(draw(multipliers) % modulus, minlength=modulus)
        assert is_multinomial(counts, np.full(modulus, 1 / modulus))


def lattice_error(variance):
    """e for sums over shifted integers with t^2 = variance."""
    terms = (-2 * PI**2 * variance * m * m for m in range(1, 40))
    return 2 * sum(term.exp() for term in terms)


def test_no_convolution_has_a_smaller_variance_than_four():
    variances = set()
    for a, b in itertools.product(range(1, 130), repeat=2):
        if are_multipliers((a, b)):
            variances.add(Fraction(BASE_VARIANCE, a * a + b * b))
        for k in (1, 128, 129):
            if are_multipliers((k * a, k * b, 1)):
                variances.add(BASE_VARIANCE / (k**2 + Fraction(1, a * a + b * b)))
    for k, j in itertools.product((1, 128, 129), (1, 16, 17)):
        if are_multipliers((j * k, j * k, j, 1)):
            variances.add(BASE_VARIANCE / (j**2 + Fraction(1, 2 * k * k + 1)))
    assert min(variances) == 4


def are_multipliers(multipliers):
    try:
        DiscreteGaussian(multipliers)
    except ValueError:
        return False
    return True


def test_the_effective_stddev_is_rounded_down():
    for multipliers in WIDTHS:
        noise = DiscreteGaussian(multipliers)
        stddev = noise.effective_stddev
        above = math.nextafter(stddev, math.inf)
        assert Fraction(stddev) ** 2 <= noise.variance - 4 < Fraction(above) ** 2
    assert DiscreteGaussian((128, 1)).variance == 32770**2
    assert 2**22 < DiscreteGaussian((128**2, 128, 1)).effective_stddev < 2**22 + 300
    assert 2**26 < DiscreteGaussian(WIDEST).effective_stddev < 2**26 + 5000


def test_noise_of_at_least_some_stddev_is_not_much_wider():
    logarithms = np.random.default_rng(0).uniform(0, math.log(6.7e7), 600)
    for stddev in np.exp(logarithms).tolist():
        noise = DiscreteGaussian.at_least(stddev)
        excess = noise.effective_stddev / stddev - 1
        assert excess >= 0
        assert stddev < 10_000 or excess < 0.01
        assert stddev < 33_000 or excess < 0.0025
        assert DiscreteGaussian.at_least(noise.effective_stddev) == noise
        above = math.nextafter(noise.effective_stddev, math.inf)
        assert DiscreteGaussian.at_least(above).variance > noise.variance
    assert DiscreteGaussian.at_least(Fraction(1, 3)) == DiscreteGaussian((1,))
    assert DiscreteGaussian.at_least(256) == DiscreteGaussian((1,))


def delta_of_discrete_gaussian(variance, sensitivity, epsilon):
    """The hockey-stick divergence of D_{Z,s} and its shift, summed without rounding."""
    radius = int(14 * math.sqrt(variance)) + sensitivity
    x = np.arange(-radius, radius + 1)
    here, there = (
        np.exp(-np.square(x - shift, dtype=np.float64) / (2 * variance))
        for shift in (0, sensitivity)
    )
    excess = np.maximum(here - math.exp(epsilon) * there, 0)
    return math.fsum(excess) / math.sqrt(2 * math.pi * variance)


@pytest.mark.parametrize(
    ("multipliers", "sensitivity", "epsilon"),
    [((1, 1), 362, 0.01), ((1, 1), 724, 4.0), ((128, 1), 32767, 1.0)],
)
def test_the_effective_stddev_can_be_accounted_for(multipliers, sensitivity, epsilon):
    noise = DiscreteGaussian(multipliers)
    delta = delta_of_discrete_gaussian(noise.variance, sensitivity, epsilon)

    def delta_of_gaussian(stddev):
        gaussian = privacy_loss_mechanism.GaussianPrivacyLoss(
            stddev, sensitivity=sensitivity
        )
        return gaussian.get_delta_for_epsilon(epsilon)

    rounding = 1e-13
    assert delta <= delta_of_gaussian(noise.effective_stddev) * (1 + rounding)
    assert delta > delta_of_gaussian(math.sqrt(noise.variance + 40)) * (1 + rounding)


@pytest.mark.parametrize("multipliers", OTHER_WIDTHS, ids=str)
def test_samples_are_those_of_the_definition(multipliers):
    ends, others = table_as_integers()
    step, leaf, places = 2**31 - 1, 2**30 - 2, jnp.arange(12, dtype=jnp.uint32)
    sample = functools.partial(DiscreteGaussian(multipliers).sample, leaf=leaf)
    samples = jax.jit(lambda step: sample(KEY, (3, 4), step=step))(jnp.int32(step))
    expected = np.zeros(12, int)
    for i, multiplier in enumerate(multipliers, 1):
        counter = [jnp.uint32(4 * leaf + i), places, jnp.uint32(step), jnp.uint32(0)]
        blocks = np.stack(jax.jit(threefry4x32)(list(KEY), counter), axis=1)
        for place, integer in enumerate(map(join, blocks)):
            column = integer // CAPACITY
            is_own = integer < ends[column]
            expected[place] += multiplier * (
                column - 4096 if is_own else others[column]
            )
    np.testing.assert_array_equal(samples.ravel(), expected)


def test_no_block_is_used_twice(monkeypatch):
    """Under one key, Threefry is a permutation: blocks differ where counters do."""
    counters = []

    def record(key, counter):
        np.testing.assert_array_equal(key, KEY)
        counters.append(np.stack(np.broadcast_arrays(*counter), axis=-1))
        return list(jnp.zeros_like(counters[-1]).T)

    def positions_in_a_large_array(shape, indices, one):
        high, low = np.unravel_index(positions(shape, indices, one)[1], (3, 3))
        return jnp.uint32(high), jnp.uint32(low)

    monkeypatch.setattr(_discrete_gaussian, "threefry4x32", record)
    monkeypatch.setattr(_discrete_gaussian, "positions", positions_in_a_large_array)
    noise = DiscreteGaussian((40, 24, 1))
    steps, leaves = (0, 1, -1), (0, 1, 2**30 - 1)
    with jax.disable_jit():
        for step, leaf in itertools.product(steps, leaves):
            noise.sample(KEY, (3, 3), step=jnp.int32(step), leaf=leaf)
    distinct = np.unique(np.reshape(counters, (-1, 4)), axis=0)
    assert len(distinct) == 3 * 3 * 3 * 9
    # Those of a jax key with the same words have a zero here.
    assert np.all(distinct[:, 0] > 0)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_any_shape(shape):
    sample = functools.partial(DiscreteGaussian((128, 1)).sample, KEY, shape, leaf=0)
    assert jax.eval_shape(sample, step=STEP) == jax.ShapeDtypeStruct(shape, jnp.int32)


def test_the_bits_do_not_depend_on_the_program(in_parts):
    noise = DiscreteGaussian((128**2, 128, 1))

    def sample(key, step):
        with in_parts():
            return noise.sample(key, (16, 24), step=step, leaf=2)

    expected = noise.sample(KEY, (16, 24), step=np.int32(3), leaf=2)
    steps = np.arange(5, dtype=np.int32)
    over_steps = jax.vmap(sample, (None, 0))
    over_both = jax.jit(jax.vmap(over_steps, (0, None)))(
        np.stack([KEY[::-1], KEY]), steps
    )
    np.testing.assert_array_equal(over_both[1, 3], expected)
    with jax.enable_x64():

        @jax.jit
        def tree(key, step):
            leaves = [noise.sample(key, (9,), step=step, leaf=i) for i in (0, 3)]
            return *leaves, sample(key, step)

        wide = tree(KEY, np.int32(3))[-1]
        assert wide.dtype == jnp.int32
        np.testing.assert_array_equal(wide, expected)


# The parts of some of these overlap: a prime number of entries has no divisors.
@pytest.mark.parametrize("shape", [(2, 3, 64), (389,), (2, 97, 2)], ids=str)
def test_parts_have_the_bits_of_a_draw_at_once(shape, in_parts):
    def sample():
        return DiscreteGaussian((128, 1)).sample(KEY, shape, step=STEP, leaf=2)

    expected = jax.jit(sample)()
    with in_parts():
        assert 3 <= len(_discrete_gaussian._divided(shape).starts) <= 4
        np.testing.assert_array_equal(jax.jit(lambda: sample())(), expected)


LARGE = [(2**30,), (256128, 2048), (50257, 1024), (14336, 4096), (24, 2048, 16384)]
LARGE.append((80, 8192, 28672))
# The share of an axis that each of many devices has is a prime number of indices.
WITHOUT_DIVISORS = [(151936, 1024), (32003, 4096), (16777259,)]


@pytest.mark.parametrize("shape", LARGE + WITHOUT_DIVISORS, ids=str)
def test_large_arrays_are_drawn_in_parts_that_many_devices_share(shape):
    division = _discrete_gaussian._divided(shape)
    axis, size, run = division.axis, shape[division.axis], division.run
    part = division.shape_with(run)
    assert (*part[:axis], size, *part[axis + 2 :]) == shape
    assert part[axis] == math.gcd(size, 256 * 3 * 5 * 7)
    assert part[axis + 1] == run
    assert math.prod(part[axis + 1 :]) >= 32
    # The parts cover every block.
    starts = division.starts.astype(int)
    wanted = math.ceil(math.prod(shape) / 2**24)
    assert min(8, wanted) <= len(starts) <= wanted
    assert starts[0] == 0
    assert np.all(np.diff(starts) <= run)
    assert part[axis] * (starts[-1] + run) == size
    assert len(starts) * math.prod(part) < 1.02 * math.prod(shape)
    assert shape not in WITHOUT_DIVISORS or math.prod(part) <= 2**24


@pytest.mark.parametrize(("axis", "devices"), [(0, 6), (2, 5)])
def test_any_number_of_devices_shares_a_part(axis, devices, in_parts):
    shape = (60, 60, 60)
    mesh = jax.make_mesh((devices,), ("a",), devices=jax.devices()[:devices])
    spec = PartitionSpec(*[None] * axis, "a")
    sample = functools.partial(DiscreteGaussian((2, 1)).sample, shape=shape, leaf=0)
    expected = sample(KEY, step=STEP)
    with in_parts(entries=110_000):
        assert _discrete_gaussian._divided(shape).run
        sample_parts = jax.jit(sample, out_shardings=NamedSharding(mesh, spec))
        compiled = sample_parts.lower(KEY, step=STEP).compile()
        np.testing.assert_array_equal(compiled(KEY, step=STEP), expected)
    of_all = 4 * math.prod(shape)
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * of_all / devices


@pytest.mark.parametrize("multipliers", [(1,), (40, 24, 1)], ids=str)
def test_the_program_has_no_floats_and_one_loop_over_the_draws(multipliers):
    noise = DiscreteGaussian(multipliers)
    closed = jax.make_jaxpr(
        lambda key, step: noise.sample(key, (3,), step=step, leaf=1)
    )
    names, lengths = set(), []
    for equation in equations(closed(KEY, STEP).jaxpr):
        names.add(equation.primitive.name)
        if equation.primitive.name == "scan":
            lengths.append(equation.params["length"])
        for variable in (*equation.invars, *equation.outvars):
            assert variable.aval.dtype == bool or np.issubdtype(
                variable.aval.dtype, np.integer
            )
    assert {"gather", "select_n", "xor"} <= names
    assert lengths == [len(multipliers)]
    assert not names & {"cond", "while", "sort", "reduce", "pure_callback"}


@pytest.mark.parametrize(
    "multipliers",
    [
        *((), (2,), (0, 1), (-2, 1), (129, 1), (92, 91), (6, 4), (3, 1, 2)),
        *((129 * 3, 129 * 2, 1), (92, 91, 1), (3, 3, 2, 1), (8, 4, 2, 2)),
        *((17, 17, 17, 1), (16 * 129, 16 * 129, 16, 1), (8, 4, 4, 2, 1)),
    ],
    ids=str,
)
def test_other_multipliers_are_refused(multipliers):
    with pytest.raises(ValueError, match=r"multipliers must be \(1,\), \(a, b\), "):
        DiscreteGaussian(multipliers)


@pytest.mark.parametrize("step", [np.zeros(1, np.int32), 0.0, np.int64(0)], ids=str)
def test_a_step_that_is_no_integer_of_32_bits_is_refused(step):
    with (
        jax.enable_x64(),
        pytest.raises(ValueError, match="step must be an int32 or uint32 scalar"),
    ):
        DiscreteGaussian((128, 1)).sample(KEY, (3,), step=step, leaf=0)
