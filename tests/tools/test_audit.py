"""Audits pass on dpmp as it is, and fail on dpmp with a fault."""

import dataclasses
import functools
import itertools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusals import refusals
from small_runs import fixed_tickets, new_trainer

import dpmp
from benchmarks import sabotage
from dpmp import __main__, strategies
from dpmp.loss_scaling import DynamicScale
from dpmp.numerics import is_grid, to_float
from dpmp.tools import audit
from dpmp.tools.audit import _canaries
from dpmp.tools.audit._attacker import Attacker

REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
METRICS = dpmp.ReleasedMetrics(largest_loss=2, fraction_clipped=True)
WAYS = {
    "poisson": {},
    "allocation": {"sampling": "random_allocation"},
    "correlated": {"strategy": strategies.banded_toeplitz(3, iterations=12)},
    "inverse": {
        "strategy": strategies.banded_inverse(3, iterations=12, steps_per_epoch=8)
    },
}


@pytest.fixture(autouse=True)
def same_bits_in_every_run(monkeypatch):
    """A bound with 95 % confidence is above the claim in some runs."""
    fixed_tickets(monkeypatch)


def mechanism(**fields):
    sizes = {"num_examples": 4096, "expected_batch_size": 512, "iterations": 12}
    fields = sizes | {"l2_clip_norm": 1.0, "num_parameters": 4096} | fields
    return dpmp.DPSGD(**{"noise_multiplier": 1.0, "delta": 1e-5} | fields)


@pytest.mark.parametrize(
    ("way", "fields"),
    [
        ("poisson", {}),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("allocation", {"iterations": 13}),
                ("correlated", {}),
                ("inverse", {"released_metrics": METRICS}),
                ("poisson", {"l2_clip_norm": dpmp.AutomaticClipping()}),
                ("poisson", {"neighboring_relation": REPLACE_ONE}),
                ("poisson", {"released_metrics": METRICS}),
            )
        ),
    ],
)
def test_canaries_find_most_of_epsilon_and_not_more(way, fields):
    chosen = mechanism(**(WAYS[way] | fields)).calibrate(epsilon=8.0, delta=1e-5)
    found = audit.canaries(chosen, num_canaries=2**15, seed=1)
    assert 0.7 * found.claimed < found.epsilon <= found.claimed
    assert found.passed
    assert found.num_canaries == 2**15


# `test_canaries_find_most_of_epsilon_and_not_more` attacks Poisson sampling.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(x, marks=() if x == "inverse" else pytest.mark.slow)
        for x in WAYS
        if x != "poisson"
    ],
)
def test_an_attacker_on_an_ideal_run_finds_what_one_on_dpmp_finds(way):
    chosen = mechanism(**WAYS[way])
    attacker = Attacker(chosen)
    rng = np.random.default_rng(0)
    coins = rng.random(4096) < 0.5
    ideal = attacker.scores(attacker.simulate(coins, rng))
    found = attacker.scores(_canaries.trained(chosen, 4096, "float32")(coins))
    for is_in, power in itertools.product((coins, ~coins), (1, 2)):
        a, b = ideal[is_in] ** power, found[is_in] ** power
        deviation = np.sqrt((a.var() + b.var()) / len(a))
        assert abs(a.mean() - b.mean()) < 5 * deviation


def test_rates_are_those_of_likelihood_ratios():
    """A ratio of r in logarithms is exp(r) times as likely for canaries in the data."""
    attacker = Attacker(mechanism())
    rng = np.random.default_rng(0)
    coins = np.arange(200_000) < 100_000
    scores = attacker.scores(attacker.simulate(coins, rng))
    edges = np.linspace(-0.6, 0.6, 7)
    present, absent = (np.histogram(scores[x], edges)[0] for x in (coins, ~coins))
    ratios = np.log(present / absent)
    np.testing.assert_allclose(ratios, (edges[1:] + edges[:-1]) / 2, atol=0.06)


@refusals(
    ("noise_multiplier", [0.0], "must be private"),
    ("l2_clip_norm", [dpmp.AdaptiveClipNorm(initial=1.0)], "does not adapt"),
)
def test_what_has_no_claim_is_not_audited(wrong, message):
    with pytest.raises(ValueError, match=message):
        audit.canaries(dataclasses.replace(mechanism(), **wrong))


NUM_EXAMPLES, EXAMPLE = 64, 5  # as many as small runs have


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def data(value=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, 40)).astype(np.float32)
    if value is not None:
        x[EXAMPLE] = value
    return {"x": x, "y": np.ones(NUM_EXAMPLES, np.float32)}


PARAMS = {"w": jnp.zeros(40), "b": jnp.zeros(())}


def make_trainer(**fields):
    fields = {"l2_clip_norm": 0.1, "num_parameters": 41} | fields
    chosen = {"sampling_prob": None, "truncated_batch_size": None}  # by the mechanism
    return new_trainer(loss_fn=loss, **chosen, **fields)


def replay(value=None, *, prepare=None, **fields):
    names = "callback", "sensitive_callback", "files"
    callbacks = {x: fields.pop(x) for x in names if x in fields}
    neighbour = None if value is None else data(value)
    run = prepare or make_trainer(**fields)
    return audit.replay(
        run, PARAMS, data(), index=EXAMPLE, neighbour=neighbour, **callbacks
    )


ANOTHER = {"source": data(), "index": EXAMPLE, "neighbour": data(2.0)}
NEIGHBOUR = "the same ones at all others; got inde"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"index": NUM_EXAMPLES}, "index must be the number of an example"),
        ({"steps": 13}, "plan at least as many steps"),
        ({"trainer": "trainer"}, "trainer must be a DPTrainer, or a function"),
        ({"trainer": lambda data: None}, "must have another dataset to prepare it"),
        (ANOTHER | {"trainer": lambda data: None}, "must return the trainer, the data"),
        (ANOTHER | {"index": 3}, NEIGHBOUR),
        (ANOTHER | {"source": jax.tree.map(lambda x: x[::-1], data())}, NEIGHBOUR),
    ],
)
def test_arguments_of_a_replay_are_checked(wrong, message):
    given = {"trainer": make_trainer(), "params": PARAMS, "source": data()}
    with pytest.raises(ValueError, match=message):
        audit.replay(**given | wrong)


CONTRACT = {
    "allocation": {"sampling": "random_allocation"},
    "correlated": {"strategy": strategies.banded_toeplitz(2, iterations=7)},
    "inverse": {
        "strategy": strategies.banded_inverse(2, iterations=7, steps_per_epoch=4)
    },
    "exact": {"method": "per_example"},
    "bounded": {"arithmetic": "bounded", "policy": "mixed_bfloat16"},
    "float32": {"arithmetic": "float32", "method": "per_example"},
    "dynamic": {"policy": "mixed_float16", "loss_scale": DynamicScale()},
    "automatic": {"l2_clip_norm": dpmp.AutomaticClipping()},
    "adaptive": {"l2_clip_norm": dpmp.AdaptiveClipNorm(initial=0.1)},
    "groups": {"l2_clip_norm": {"w": 0.1, "b": 0.2}},
    "metrics": {"released_metrics": METRICS},
}
VALUES = {"nothing": None, "NaN": np.nan, "infinite": np.inf, "huge": 1e30}
VALUES |= {"tiny": 1e-30}
# Each contract with one value, and the values with the contracts that may need them.
# `sabotage` has Poisson sampling and the loss scale with huge values.
PAIRS = """
    allocation-NaN correlated-huge exact-huge bounded-NaN dynamic-nothing dynamic-tiny
    automatic-NaN adaptive-huge groups-nothing inverse-infinite metrics-huge
"""
FAST_PAIRS = "float32-NaN metrics-nothing"
FAST_FAULTS = {"clip norm doubled"}


@pytest.mark.parametrize(
    "pair",
    [
        *FAST_PAIRS.split(),
        *(pytest.param(x, marks=pytest.mark.slow) for x in PAIRS.split()),
    ],
)
def test_a_run_reveals_nothing_but_noisy_gradients(pair):
    name, value = pair.split("-")
    found = replay(VALUES[value], **CONTRACT[name])
    assert not found.differs
    assert 0 < found.largest_change <= 1
    assert found.passed
    assert "Nothing else differs" in str(found)
    assert "before was not under audit" in " ".join(str(found).split())


@pytest.mark.slow
@pytest.mark.parametrize("value", ["huge", "tiny"])  # whose squares need float64
def test_a_run_in_float64_reveals_nothing_more(value):
    dtypes = dict.fromkeys(("param_dtype", "compute_dtype"), "float64")
    with jax.enable_x64(True):
        found = replay(VALUES[value], policy=dpmp.Policy(**dtypes))
    assert found.passed
    assert found.largest_change > 0


def test_all_that_a_run_shows_is_compared(capsys, tmp_path):
    seen = []

    def keep(outputs):
        seen.append(float(jnp.sum(outputs.values)))
        print(seen[-1])
        (tmp_path / "sub").mkdir(exist_ok=True)
        with (tmp_path / "sub" / "log").open("a") as file:
            file.write(str(seen[-1]))

    def returns(state):
        return {"public": seen[-1]}

    found = replay(1e3, sensitive_callback=keep, callback=returns, files=tmp_path)
    assert not found.passed
    texts = ("the return value of the callback", "a file", "the text it prints")
    assert {*found.differs} == {*texts}
    assert "- the text it prints" in str(found)
    assert capsys.readouterr().out == ""
    assert not [*tmp_path.iterdir()]

    def fails(outputs):
        if float(jnp.max(outputs.grad_norms)) > 1e3:
            raise RuntimeError("a large gradient")

    assert "the error" in replay(1e3, sensitive_callback=fails).differs
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="must be an empty directory"):
        replay(1e3, files=tmp_path)
    assert (tmp_path / "mine").exists()


def test_an_optimizer_that_reads_the_host_is_found():
    seen = [0.0]

    def keep(outputs):
        seen[0] = float(jnp.sum(outputs.values))

    def rate(step):
        return jax.pure_callback(
            lambda _: np.float32(0.1 + seen[0]), jax.typeof(jnp.float32(0)), step
        )

    optimizer = optax.sgd(rate)
    found = replay(1e3, sensitive_callback=keep, optimizer=optimizer)
    assert found.differs == ("the sum of a step without the example", "the state")


def _that_writes(data, folder):
    (folder / "sizes").write_text(str(len(data["x"])))
    return make_trainer(), data, None


def _that_leaks(data, folder):
    print(data["x"].mean())
    centred = {**data, "x": data["x"] - data["x"].mean(0)}
    return make_trainer(), centred, lambda state: {"largest": data["x"].max()}


def _with_a_clip_norm(data, folder):
    return make_trainer(l2_clip_norm=float(data["x"].max())), data, None


def _that_fails(data, folder):
    if data["x"].max() < 5:
        raise RuntimeError("no large example")
    return make_trainer(), data, None


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (_that_writes, ()),
        (
            _that_leaks,
            (
                "the sum of a step without the example",
                "the return value of the callback",
                "the text it prints",
            ),
        ),
        (_with_a_clip_norm, ("the mechanism",)),
        (_that_fails, ("the error",)),
    ],
)
def test_what_a_run_prepares_from_its_data_is_compared(prepare, found, tmp_path):
    prepare = functools.partial(prepare, folder=tmp_path)
    seen = replay(9.0, prepare=prepare, files=tmp_path)
    assert set(found) <= set(seen.differs)
    assert seen.passed == (not found)
    assert "under audit" not in str(seen)


def test_a_preparation_may_share_and_must_not_always_fail():
    def never(data):
        raise RuntimeError(str(data["x"].max()))

    with pytest.raises(RuntimeError):  # as no data can be prepared
        replay(9.0, prepare=never)
    shared = {}

    def shares(data):
        return shared.setdefault("trainer", make_trainer()), data, None

    assert not replay(2.0, prepare=shares).has_preparation


@pytest.mark.parametrize(
    "fields",
    [
        WAYS["inverse"],
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for way, fields in WAYS.items()
            if way != "inverse"
        ),
        pytest.param({"num_examples": 512}, marks=pytest.mark.slow),  # all in each
        pytest.param({"num_examples": 4095}, marks=pytest.mark.slow),
        {"num_examples": 64, "sampling_prob": 1 / 256},  # most batches are empty
    ],
)
def test_batches_pass(fields):
    sizes = {"num_examples": 4096, "expected_batch_size": 512, "iterations": 12}
    found = audit.batches(
        dpmp.DPSGD(l2_clip_norm=1.0, noise_multiplier=1.0, **sizes | fields),
        num_batches=48,
    )
    assert found.passed
    assert str(found) == "48 batches are drawn as accounted for."


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST_FAULTS else pytest.mark.slow)
        for name in sabotage.FAULTS
    ],
)
def test_faults_are_caught(name, monkeypatch):
    if name != "noise at 0.9":  # large faults need fewer canaries
        monkeypatch.setattr(sabotage, "_NUM_CANARIES", 2**16)
    chosen = sabotage.FAULTS[name]
    with chosen.fault():
        assert chosen.audit(0).passed == name.startswith("none")


@pytest.mark.slow
def test_the_command_audits_every_way(monkeypatch, capsys):
    batches = functools.partial(audit.batches, num_batches=64)  # instead of 2000
    monkeypatch.setattr("dpmp.tools.audit._command.batches", batches)
    monkeypatch.setattr("dpmp.tools.audit._command._NUM_EXAMPLES", 2**12)
    monkeypatch.setattr("dpmp.tools.audit._command._BATCH_SIZE", 2**8)
    assert __main__.main(["audit", "--epsilon", "8", "--canaries", "4096"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for name in ("Poisson sampling", "random allocation", "correlated noise"):
        assert f"{name}, epsilon 8. 4096 canaries" in output
    assert output.count("are drawn as accounted for.") == 4
    monkeypatch.setattr("dpmp.tools.audit._command.WAYS", {"Poisson sampling": {}})
    with sabotage.FAULTS["no noise"].fault():
        assert __main__.main(["audit", "--epsilon", "8", "--canaries", "4096"]) == 1


GRAD_FN = dpmp.clipped_grad(loss, l2_clip_norm=0.1, arithmetic="exact")
ROWS = {name: x[:8] for name, x in data(1e3).items()}  # one example is huge


@jax.jit
def _sum(batch, mask):
    params = {"w": jnp.ones(40), "b": jnp.zeros(())}
    return GRAD_FN(params, batch, is_padding_example=mask)


def _centred_without_padding(batch, mask):
    mean = batch["x"].mean(0, where=~mask[:, None])
    return _sum({**batch, "x": batch["x"] - mean}, mask)


def _clipped_mean(batch, mask):
    params = {"w": jnp.ones(40), "b": jnp.zeros(())}
    kept = {name: x[~mask] for name, x in batch.items()}
    grads = jax.grad(loss)(params, kept)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(grads)))
    return jax.tree.map(lambda x: 8 * 0.1 * x / norm, grads)


def _multiplied(batch, mask, factor):
    sums = jax.tree.map(to_float, _sum(batch, mask), is_leaf=is_grid)
    return jax.tree.map(lambda x: factor * x, sums)


def _per_drawn(batch, mask):
    """For batches of 4 on average; the sum of 8 is smaller."""
    return _multiplied(batch, mask, 4 / max((~mask).sum(), 1))


@pytest.mark.filterwarnings("ignore:Mean of empty", "ignore:invalid value")
@pytest.mark.parametrize(
    ("sum_of_batch", "is_large", "reads_padding"),
    [
        (_sum, False, False),
        (lambda batch, mask: _multiplied(batch, mask, 0.1), False, False),
        (lambda batch, mask: _sum(batch, ~mask), False, True),
        (lambda batch, mask: _sum(batch, np.zeros(8, bool)), True, True),
        (_centred_without_padding, True, False),
        (_clipped_mean, True, False),
        (_per_drawn, True, False),
        (lambda batch, mask: {"w": np.full(3, np.nan)}, True, False),
    ],
)
def test_sums_of_a_loop_are_compared(sum_of_batch, is_large, reads_padding):
    found = audit.sums(sum_of_batch, ROWS, sensitivity=GRAD_FN.sensitivity())
    assert (found.largest_change > 1) == is_large
    assert found.reads_padding == reads_padding
    assert found.passed == (not is_large and not reads_padding)
    assert ("FALSE" in str(found)) == (not found.passed)
    assert found.passed or found.largest_change > 0.9
    assert ("clipping was not tested" in str(found)) == (found.largest_change < 0.5)


def test_sums_need_a_few_examples():
    for wrong in ({}, np.ones(2), {"x": np.ones(4), "y": np.ones(3)}, 1.0):
        with pytest.raises(ValueError, match="must have at least three examples"):
            audit.sums(_sum, wrong, sensitivity=1.0)
    with pytest.raises(ValueError, match=r"function of \(batch, is_padding_example\)"):
        audit.sums(lambda batch: batch, ROWS, sensitivity=1.0)
