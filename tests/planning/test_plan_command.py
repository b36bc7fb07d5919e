"""The command `plan`: which method it chooses, and whether its figures are true."""

import dataclasses
import functools
import json
import pathlib
import re
import textwrap
import types

import dp_accounting
import jax
import jax.numpy as jnp
import optax
import pytest

import dpmp
from dpmp import DPSGD, lora
from dpmp.__main__ import main
from dpmp.planning import _methods, _plans
from dpmp.planning._decoder import ADAPTED, Decoder
from dpmp.planning._methods import METHODS, Model, activation_bytes
from dpmp.planning.memory import compiled_memory

TARGET = ["--num-examples", "50000", "--epsilon", "2", "--delta", "1e-6"]
FULL, WITHOUT_MASTERS, LORA, INT8, FOUR_BITS = (method.name for method in METHODS)
LLAMA = pathlib.Path(__file__).parents[1] / "examples/llm/fixtures/llama/config.json"
GPT2 = LLAMA.parents[1] / "gpt2/config.json"
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}

# Fixed bytes and bytes of an example, as compiled: by size, length, rank and remat.
COMPILED = {
    (10**8, 512, None, False): (0, 0.593e9),
    (10**9, 512, None, False): (0, 2.773e9),
    (10**9, 512, 8, False): (0.450e9, 2.143e9),
    (10**9, 512, 8, True): (0.460e9, 0.234e9),
    (8_030_257_152, 1000, 8, False): (2.357e9, 14.802e9),
    (8_030_257_152, 1000, 8, True): (2.484e9, 1.305e9),
    (7 * 10**10, 1024, 8, False): (4.173e9, 107.024e9),
    (7 * 10**10, 1024, 8, True): (4.002e9, 3.933e9),
}


@pytest.fixture
def _compiled_before(monkeypatch):
    def found(decoder, length, rank, remat):
        def is_near(num_parameters):
            return abs(num_parameters - decoder.num_parameters) < decoder.width

        (size,) = filter(is_near, {key[0] for key in COMPILED})
        return COMPILED[size, length, rank, remat]

    monkeypatch.setattr(_methods, "activation_bytes", found)


@pytest.fixture(autouse=True)
def _few_strategies(monkeypatch):
    monkeypatch.setattr(_plans, "_BANDS", (2,))  # each takes a search


@pytest.fixture
def _without_search(monkeypatch):
    def with_noise(mechanism, *, epsilon, delta):
        return dataclasses.replace(mechanism, noise_multiplier=2.0, delta=delta)

    monkeypatch.setattr(DPSGD, "calibrate", with_noise)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return path


def plan(capsys, *options):
    options = [str(x) for x in options]
    assert main(["plan", *TARGET, *options]) == 0
    text = capsys.readouterr().out
    assert main(["plan", *TARGET, *options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    if "memory" in figures:
        assert sum(figures["memory"].values()) == figures["total_memory"]
        noise = figures["trained"] ** 0.5 * figures["start"]["noise_in_mean"]
        assert figures["noise_norm"] == pytest.approx(noise)
    if program := re.search(r"Run this:\n\n((?:  .*\n|\n)*)", text):
        figures["program"] = textwrap.dedent(program[1])
    return " ".join(text.split()), figures


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def new_adapters(decoder, params, rank):
    args = {"fun": decoder.loss_fn, "example_args": (jnp.zeros((1, 4), int),)}
    return lora.init(jax.random.key(0), params, rank, ADAPTED, **args)


SCENARIOS = {
    "1B on 24 GB": ("--parameters 1e9 --memory 24", WITHOUT_MASTERS, 2),
    "100M on 24 GB": ("--parameters 1e8 --memory 24", FULL, 32),
    "few entries": ("--parameters 1e9 --memory 24 --trainable 2e6", LORA, 8),
    "a rank": ("--parameters 1e9 --memory 24 --rank 8", LORA, 8),
    "70B on 80 GB": ("--parameters 70e9 --memory 80 --length 1024", FOUR_BITS, 0),
}


@pytest.mark.usefixtures("_compiled_before", "_without_search")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_first_method_that_fits_is_chosen(scenario, capsys):
    options, method, microbatch_size = SCENARIOS[scenario]
    text, figures = plan(capsys, *options.split())
    assert (figures["method"], figures["microbatch_size"]) == (method, microbatch_size)
    memory = 1e9 * float(options.split("--memory ")[1].split()[0])
    assert (figures["total_memory"] <= memory) == (microbatch_size > 0)
    assert (f"microbatch_size={microbatch_size}," in text) == (microbatch_size > 0)
    assert ("lora.apply" in text) == (method == LORA)
    if microbatch_size:
        params = {"attention": {"kernel": jnp.ones((4, 4))}}
        scope = {"model": types.SimpleNamespace(params=params)}
        scope["loss_fn"] = lambda params, batch: batch @ params["attention"]["kernel"]
        exec(figures["program"], scope)
        assert scope["mechanism"].num_parameters == figures["trained"]
        dpmp.DPTrainer(
            mechanism=scope["mechanism"],
            loss_fn=scope["loss_fn"],
            optimizer=optax.sgd(0.1),
            policy=scope["policy"],
        ).init(scope.get("adapters", params))


@pytest.mark.usefixtures("_compiled_before", "_without_search")
def test_a_llama_of_8b_on_24_gb_needs_a_base_of_4_bits_or_checkpoints(config, capsys):
    options = "--config", config, "--memory", 24, "--length", 1000
    text, figures = plan(capsys, *options, "--rate", "2e14flops")
    assert (figures["method"], figures["trained"]) == (FOUR_BITS, 5_767_168)
    assert figures["memory"]["frozen base"] == round(4.5 / 8 * 8_030_257_152)
    assert f'layer is computed twice, and "{LORA}" fits' in text
    tokens = 1000 * figures["start"]["batch_size"] * figures["start"]["iterations"]
    hours = 4 * 8_030_257_152 * tokens / 2e14 / 3600
    assert f"At this rate it takes {hours:.3g} hours." in text


@pytest.mark.usefixtures("_compiled_before")
def test_the_noise_is_that_of_the_mechanism(monkeypatch, capsys):
    monkeypatch.setattr(_plans, "_NUM_SIZES", 2)
    monkeypatch.setattr(DPSGD, "calibrate", functools.cache(DPSGD.calibrate))
    options = "--parameters", "1e9", "--memory", 24, "--steps", 50
    text, figures = plan(capsys, *options, "--neighbors", "REPLACE_ONE")
    start = figures["start"]
    assert (start["batch_size"], start["iterations"]) == (10_000, 50)
    mechanism = DPSGD(
        num_examples=50_000,
        expected_batch_size=10_000,
        iterations=50,
        l2_clip_norm=1.0,
        num_parameters=figures["trained"],
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    ).calibrate(epsilon=2.0, delta=1e-6)
    assert start["noise_multiplier"] == mechanism.noise_multiplier
    assert [x["batch_size"] for x in figures["plans"]] == [8192, 10_000, 16_384]
    norm_of_all = mechanism.stddev * 999_999_360**0.5
    assert norm_of_all > 10
    assert figures["method"] == LORA
    assert f"With all parameters it would be {norm_of_all:.3g}. Above 10" in text
    assert "iterations=50, l2_clip_norm=1.0, microbatch_size=8" in text
    assert "neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_without_search")
def test_a_small_model_is_compiled_and_fits(tmp_path, capsys):
    output = tmp_path / "plan.png"
    options = "--config", LLAMA, "--memory", 0.01, "--length", 8, "--output", output
    _, figures = plan(capsys, *options)
    assert figures["method"] == FULL
    assert figures["memory"]["master parameters"] == 4 * figures["trained"]
    assert 0 < figures["memory"]["activations"] < 0.01e9
    assert output.stat().st_size > 10_000


@pytest.mark.usefixtures("_without_search")
def test_the_norm_of_the_noise_and_the_hours_need_no_model(capsys):
    given = "--trainable 1e6 --rate 40examples --batch-size 1000 --steps 77"
    text, figures = plan(capsys, *given.split())
    (start,) = (x for x in figures["plans"] if x["start_here"])
    assert (start["batch_size"], start["iterations"]) == (1000, 77)
    assert "has a norm of 2, over 1 million trained entries" in text
    assert f"At this rate it takes {1000 * 77 / 40 / 3600:.3g} hours." in text
    scope = {}
    exec(figures["program"], scope)
    made = scope["mechanism"]
    assert made.num_parameters == 1_000_000
    assert made.expected_batch_size == start["batch_size"]


@pytest.mark.parametrize(
    "path", [LLAMA, GPT2, LLAMA.parents[1] / "llama_untied/config.json"]
)
def test_a_configuration_has_the_parameters_of_its_model(path):
    from safetensors import numpy

    arrays = numpy.load_file(path.with_name("model.safetensors"))
    # Biases are left out, and a normalisation at the end.
    matrices = [x.size for x in arrays.values() if x.ndim == 2]
    decoder = Decoder.from_config(path)
    norms = 2 * decoder.layers * decoder.width
    assert decoder.num_parameters - norms == sum(matrices)


def test_a_decoder_has_the_size_that_is_asked_for():
    for size in (10**6, 7 * 10**10):
        decoder = Decoder.of_size(size)
        assert 0 <= size - decoder.num_parameters < decoder.width
        assert decoder.heads * decoder.head_width == decoder.width
    decoder = Decoder.from_config(LLAMA)
    make = functools.partial(new_adapters, decoder, rank=3)
    adapters = jax.eval_shape(make, decoder.shapes(jnp.float32))
    sizes = [x.size for x in jax.tree.leaves(adapters)]
    assert sum(sizes) == decoder.num_adapted(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parameters 10", "a decoder must have at least"),
        ("--parameters 1e9", "memory must be"),
        ("--config missing.json", "must be the config.json of a decoder"),
        (
            "--parameters 1e9 --memory 9 --neighbors ADD_OR_REMOVE_ONE",
            "neighbours for which book-keeping has a proof",
        ),
        ("--rank 0", "0 must be a number of at least 1"),
        ("--batch-size 2.7", "2.7 must be a number of at least 1"),
        ("--processed 0", "num_processed must be"),
        ("--output missing/plan.png", "a directory that exists"),
        ("--rate 40", "40 must be a number with its unit"),
        ("--config config.json --memory 24", "must have no mixtures of experts"),
    ],
)
def test_wrong_options_are_refused(options, message, config, monkeypatch, capsys):
    config.write_text(json.dumps(LLAMA_3_8B | {"num_local_experts": 8}))
    monkeypatch.chdir(config.parent)
    with pytest.raises(SystemExit):
        main(["plan", *TARGET, *options.split()])
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("key", [[*COMPILED][2], [*COMPILED][3]])
def test_activations_are_those_of_compiled_programs(key):
    size, *options = key
    found = activation_bytes(Decoder.of_size(size), *options)
    assert found == pytest.approx(COMPILED[key], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "microbatch_size"),
    [(METHODS[0], 1), (METHODS[2], 8)],
    ids=["full", "lora"],
)
def test_a_plan_needs_up_to_30_percent_more_than_the_compiled_step(
    method, microbatch_size
):
    decoder, length, batch_size = Decoder.of_size(20_000_000), 256, 4 * microbatch_size
    model = Model(decoder, length, 8, decoder.num_adapted(8))
    planned = model.memory(method, batch_size, microbatch_size).total
    params, loss_fn = decoder.shapes(jnp.float32), decoder.loss_fn
    if method.is_lora:
        base = zeros(decoder.shapes(jnp.float16))
        params = new_adapters(decoder, base, rank=8)
        loss_fn = lora.apply(loss_fn, base)
    with jax.numpy_dtype_promotion("standard"):  # for optax.adam
        compiled = compiled_memory(
            loss_fn,
            params,
            jax.ShapeDtypeStruct((batch_size, length), jnp.int32),
            policy="mixed_float16",  # the CPU's compiler replaces bfloat16
            optimizer=optax.adam(1e-3),
            method="book_keeping",
            microbatch_size=microbatch_size,
        )
    assert 1 <= planned / compiled.total <= 1.3
