"""That no mistake between training and serving an adapter goes unnoticed.

Each fault is made on purpose, and an error must name it.
"""

import json
import re
from typing import Any, NamedTuple

import finetune_llm as example
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from lora.subjects import trained

from dpmp import lora
from examples import llm

TARGETS = "attention/(query|value)/kernel"
QUERY = "layers/attention/query/kernel"


class Case(NamedTuple):
    """A model, its adapters before and after training, and a folder with the latter."""

    model: llm.Pretrained
    initial: lora.Adapters
    adapters: lora.Adapters
    folder: Any


@pytest.fixture
def case(llama, tmp_path):
    model = llm.load(llama, dtype=jnp.bfloat16)
    initial = lora.init(jax.random.key(0), model.params, 2, TARGETS)
    adapters, folder = trained(initial), tmp_path / "out" / "adapter"
    lora.save(
        folder,
        adapters,
        model.params,
        initial=initial,
        names=llm.huggingface_name,
    )
    report = {"settings": {"model": str(llama)}, "tokenizer": model.tokenizer.digest}
    (tmp_path / "out" / "report.json").write_text(json.dumps(report))
    return Case(model, initial, adapters, folder)


def with_query(adapters, **factors):
    query = adapters.factors[QUERY]._replace(**factors)
    return lora.Adapters(
        **{**vars(adapters), "factors": adapters.factors | {QUERY: query}}
    )


def save(case, adapters, params=None, **kwargs):
    params = case.model.params if params is None else params
    lora.save(case.folder, adapters, params, initial=case.initial, **kwargs)


def edit_config(case, **changes):
    file = case.folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_arrays(case, change):
    """Changes the matrices in the file, and keeps what dpmp notes beside them."""
    file = case.folder / "adapter_model.safetensors"
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    arrays = safetensors.numpy.load_file(file)
    change(arrays)
    safetensors.numpy.save_file(arrays, file, metadata)


def name(layer, module, factor):
    return (
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{factor}.weight"
    )


def changed_base(case):
    """The base model after somebody has trained one of its arrays."""
    norm = case.model.params["norm"]
    return case.model.params | {"norm": {"scale": norm["scale"] + 1e-3}}


def adapter_not_moved(case):
    save(case, with_query(case.adapters, a=case.initial.factors[QUERY].a))


def saved_before_training(case):
    lora.save(case.folder, case.initial, case.model.params, initial=None)


def wrong_pattern(case):
    lora.init(jax.random.key(0), case.model.params, 2, "attn/q_proj")


def target_that_is_looked_up(case):
    wider = lora.init(jax.random.key(0), case.model.params, 2, "query|embed")
    lora.apply(case.model.apply, case.model.params)(wider, jnp.arange(4))


def stale_base(case):
    lora.load(case.folder, changed_base(case))


def base_trained_too(case):
    save(case, case.adapters, changed_base(case))


def merged_twice(case):
    once = lora.merge(case.model.params, case.adapters)
    lora.merge(once, case.adapters)


def served_on_the_merged_model(case):
    once = lora.merge(case.model.params, case.adapters)
    lora.apply(case.model.apply, once)(case.adapters, jnp.arange(4))


def factors_swapped(case):
    query = case.adapters.factors[QUERY]
    swapped = with_query(case.adapters, a=query.b, b=query.a)
    lora.apply(case.model.apply, case.model.params)(swapped, jnp.arange(4))


def matrix_turned_around(case):
    def turn(arrays):
        key = name(0, "q_proj", "A")
        arrays[key] = np.ascontiguousarray(arrays[key].T)

    edit_arrays(case, turn)
    lora.load(case.folder, case.model.params)


def layers_exchanged(case):
    def exchange(arrays):
        first, second = name(0, "q_proj", "B"), name(1, "q_proj", "B")
        arrays[first], arrays[second] = arrays[second], arrays[first]

    edit_arrays(case, exchange)
    lora.load(case.folder, case.model.params)


def another_scale(case):
    edit_config(case, lora_alpha=16)
    lora.load(case.folder, case.model.params)


def another_rank(case):
    edit_config(case, r=4)
    lora.load(case.folder, case.model.params)


def training_diverged(case):
    b = case.adapters.factors[QUERY].b
    save(case, with_query(case.adapters, b=b.at[0, 0, 0].set(jnp.nan)))


def file_cut_off(case):
    file = case.folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    lora.load(case.folder, case.model.params)


def two_targets_in_one_module(case):
    save(case, case.adapters, names=lambda path, layer: f"layers.{layer}.attn")


def other_tokenizer(case):
    file = case.folder.parents[1] / "llama" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(tokenizer))
    example.generate(case.folder.parent, "the", 4, 0)


OTHER_BASE = "must be used with the frozen arrays that they were made for"
FAULTS = {
    adapter_not_moved: re.escape(f"not_moved=['{QUERY}.a']"),
    saved_before_training: "every adapter must change its target",
    wrong_pattern: "at least one array must be selected; got targets='attn/q_proj'",
    target_that_is_looked_up: "every target of LoRA must be multiplied.*embed",
    stale_base: OTHER_BASE,
    base_trained_too: OTHER_BASE,
    merged_twice: OTHER_BASE,
    served_on_the_merged_model: OTHER_BASE,
    factors_swapped: f"must have the shapes of their target; got target='{QUERY}'",
    matrix_turned_around: "two matrices of matching shapes",
    layers_exchanged: re.escape("changed=['arrays']"),
    another_scale: re.escape("changed=['alpha']"),
    another_rank: "two matrices of matching shapes",
    training_diverged: re.escape(f"not_finite=['{QUERY}.b']"),
    file_cut_off: "must have two readable files; got .*adapter_model.safetensors",
    two_targets_in_one_module: "must have a module, or a part of one, of its own",
    other_tokenizer: "the tokenizer must be that of training",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_fault_is_noticed(case, fault):
    with pytest.raises((ValueError, SystemExit), match=FAULTS[fault]):
        fault(case)


@jax.numpy_dtype_promotion("standard")
def test_without_a_fault_there_is_no_error(case):
    save(case, case.adapters, names=llm.huggingface_name)
    loaded = lora.load(case.folder, case.model.params)
    given, expected = (
        lora.apply(case.model.apply, case.model.params)(adapters, jnp.arange(4))
        for adapters in (loaded, case.adapters)
    )
    np.testing.assert_array_equal(given, expected)
    example.generate(case.folder.parent, "the", 2, 0)
