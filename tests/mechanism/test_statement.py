import dp_accounting
import pytest

from dpmp import DPSGD

RELATIONS = dp_accounting.NeighboringRelation


def make_mechanism(**fields):
    defaults = {
        "num_examples": 1000,
        "expected_batch_size": 50,
        "iterations": 100,
        "l2_clip_norm": 1.0,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
    }
    return DPSGD(**{**defaults, **fields})


def statement_of(mechanism):
    """In one line."""
    return " ".join(mechanism.statement().split())


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (
            {"noise_multiplier": 0.5, "method": "per_example"},
            [
                "the largest contribution has 32756 units",
                "Its standard deviation is 16378 units of the grid.",
            ],
        ),
        (
            {},
            [
                "The clip norm is reduced by 1.56% to cover the rounding",
                f"has {make_mechanism().resolution} units",
                "other examples keep their places",
            ],
        ),
        (
            {"microbatch_size": 4},
            ["A microbatch has 4 examples."],
        ),
        (
            {"arithmetic": "unproved_float32"},
            ["up to ordinary rounding, which is NOT PROVED"],
        ),
        (
            {"arithmetic": "float32", "l2_clip_norm": 0.75},
            [
                "clipped to an L2 norm of 0.75.",
                "sums in float32",
                "depends on this example and the parameters alone, up to its last bit",
                "arithmetic rounds to nearest.",
            ],
        ),
        # No more noise and no less sampling than there is: 50 / 1237 = 0.0404203...
        (
            {
                "noise_multiplier": 1.23456,
                "num_examples": 1237,
                "l2_clip_norm": {"a": 3.0, "b": 4.0},
                "iterations": 77,
                "delta": 3e-6,
            },
            [
                ", 3e-06)-differentially private,",
                "one example of the first is replaced by padding in the second",
                "number of examples, 1237, is public",
                "with probability 0.04043, independently of all others.",
                "- Steps: 77.",
                "L2 norm of 5 in 2 groups",
                "divided by 50, the expected batch size.",
                "noise multiplier of 1.2345.",
                "- Assumed: the random bits are ideal",
                "- Not covered: running time",
                "losses, norms and other values of single examples",
                "hyper-parameters tuned on this data",
            ],
        ),
    ],
    ids=["exact", "bounded", "microbatches", "unproved", "float32", "figures"],
)
def test_it_says_what_is_done_and_claimed(fields, texts):
    mechanism = make_mechanism(**fields)
    statement = statement_of(mechanism)
    assert not [text for text in texts if text not in statement]
    assert mechanism.guarantee().accountant in statement
    size = mechanism.batch_selection_strategy.truncated_batch_size
    assert f"batch of more than {size} examples" in statement
    is_proved = "claim holds for the bits that are released" in statement
    assert is_proved == ("NOT PROVED" not in statement)
    assert all(len(line) <= 88 for line in mechanism.statement().splitlines())


def test_it_claims_nothing_where_delta_does_not_cover_the_sampler():
    mechanism = make_mechanism(noise_multiplier=0.36)
    assert mechanism.is_private
    statement = statement_of(mechanism)
    assert statement.startswith("No epsilon is claimed at delta 1e-05. Gradients are")
    assert "exceed the share of delta that is reserved for them" in statement
    assert "differentially private" not in statement
    assert all(len(line) <= 88 for line in mechanism.statement().splitlines())
    for remedy in ({"noise_multiplier": 0.5}, {"delta": 1e-2}, {"num_parameters": 1}):
        covered = make_mechanism(**{"noise_multiplier": 0.36, **remedy})
        assert "differentially private" in statement_of(covered)


@pytest.mark.parametrize(
    ("noise_multiplier", "delta"),
    [(0.7, 1e-5), (1.0, 1.2341e-6), (1.37, 9.991e-6), (3.3, 0.9994)],
)
def test_it_quotes_no_less_epsilon_and_delta_than_are_spent(noise_multiplier, delta):
    mechanism = make_mechanism(noise_multiplier=noise_multiplier, delta=delta)
    epsilon = mechanism.guarantee().epsilon
    quoted = statement_of(mechanism).split("are (")[1].split(")-")[0].split(", ")
    for text, spent in zip(quoted, (epsilon, delta), strict=True):
        assert spent <= float(text) < 1.01 * spent + 1e-3 * (spent is epsilon)


@pytest.mark.parametrize(
    ("relation", "text"),
    [
        (RELATIONS.REPLACE_ONE, "they differ in the content of one example"),
        (RELATIONS.ADD_OR_REMOVE_ONE, "one has one example more than the other"),
        (RELATIONS.REPLACE_SPECIAL, "is replaced by padding in the second"),
    ],
)
def test_it_names_the_neighbouring_relation(relation, text):
    assert text in statement_of(make_mechanism(neighboring_relation=relation))


@pytest.mark.parametrize(
    "given", [{}, {"sampling_prob": 0.04}, {"truncated_batch_size": 5000}], ids=str
)
def test_a_number_of_examples_that_is_protected_is_not_quoted(given):
    relation = RELATIONS.ADD_OR_REMOVE_ONE
    statement = statement_of(
        make_mechanism(num_examples=1237, neighboring_relation=relation, **given)
    )
    assert "is public" not in statement
    assert "The number of examples is protected too." in statement
    assert "1237" not in statement
    assert "1238" not in statement
    # And it says which settings were computed from that number.
    assert ("gives it away" in statement) == ("sampling_prob" not in given)
    assert ("how large it is" in statement) == ("truncated_batch_size" not in given)


@pytest.mark.parametrize(("limit", "is_shown"), [(100, True), (200, False)])
def test_a_limit_by_which_epsilon_shows_a_protected_number_is_said(limit, is_shown):
    relation = RELATIONS.ADD_OR_REMOVE_ONE
    given = {"sampling_prob": 0.05, "truncated_batch_size": limit, "iterations": 10}
    statement = statement_of(make_mechanism(neighboring_relation=relation, **given))
    assert ("depend on that number" in statement) == is_shown


@pytest.mark.parametrize(("delta", "is_said"), [(1e-3, True), (0.99e-3, False)])
def test_a_delta_that_one_random_example_satisfies_is_said(delta, is_said):
    statement = statement_of(make_mechanism(delta=delta))
    assert ("publishing one random example would satisfy it" in statement) == is_said
    # Not where it would say how many examples there are.
    relation = RELATIONS.ADD_OR_REMOVE_ONE
    hidden = make_mechanism(delta=delta, neighboring_relation=relation)
    assert "Delta" not in statement_of(hidden)
