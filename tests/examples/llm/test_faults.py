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


def on_merged(case):
    return lora.merge(case.model.params, case.adapters)


def apply(case, adapters=None, params=None):
    params = case.model.params if params is None else params
    adapters = case.adapters if adapters is None else adapters
    return jax.jit(lora.apply(case.model.apply, params))(adapters, jnp.arange(4))


def load(case, params=None):
    return lora.load(case.folder, case.model.params if params is None else params)


def init(case, targets):
    return lora.init(jax.random.key(0), case.model.params, 2, targets)


def matrix_turned_around(case):
    def turn(arrays):
        key = name(0, "q_proj", "A")
        arrays[key] = np.ascontiguousarray(arrays[key].T)

    edit_arrays(case, turn)
    load(case)


def layers_exchanged(case):
    def exchange(arrays):
        first, second = name(0, "q_proj", "B"), name(1, "q_proj", "B")
        arrays[first], arrays[second] = arrays[second], arrays[first]

    edit_arrays(case, exchange)
    load(case)


def factors_swapped(case):
    query = case.adapters.factors[QUERY]
    apply(case, with_query(case.adapters, a=query.b, b=query.a))


def another_config(case, **changes):
    edit_config(case, **changes)
    load(case)


def training_diverged(case):
    b = case.adapters.factors[QUERY].b
    save(case, with_query(case.adapters, b=b.at[0, 0, 0].set(jnp.nan)))


def file_cut_off(case):
    file = case.folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    load(case)


def other_tokenizer(case):
    file = case.folder.parents[1] / "llama" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(tokenizer))
    example.generate(case.folder.parent, "the", 4, 0)


OTHER_BASE = "must be used with the frozen arrays that they were made for"
FAULTS = {
    "adapter not moved": (
        lambda x: save(x, with_query(x.adapters, a=x.initial.factors[QUERY].a)),
        re.escape(f"not_moved=['{QUERY}.a']"),
    ),
    "saved before training": (
        lambda x: lora.save(x.folder, x.initial, x.model.params, initial=None),
        "every adapter must change its target",
    ),
    "wrong pattern": (
        lambda x: init(x, "attn/q_proj"),
        "at least one array must be selected; got targets='attn/q_proj'",
    ),
    "target that is looked up": (
        lambda x: apply(x, init(x, "query|embed")),
        "every target of LoRA must be multiplied.*embed",
    ),
    "stale base": (lambda x: load(x, changed_base(x)), OTHER_BASE),
    "base trained too": (lambda x: save(x, x.adapters, changed_base(x)), OTHER_BASE),
    "merged twice": (lambda x: lora.merge(on_merged(x), x.adapters), OTHER_BASE),
    "served on the merged model": (
        lambda x: apply(x, params=on_merged(x)),
        OTHER_BASE,
    ),
    "factors swapped": (
        factors_swapped,
        f"must have the shapes of their target; got target='{QUERY}'",
    ),
    "matrix turned around": (
        matrix_turned_around,
        "two matrices of matching shapes",
    ),
    "layers exchanged": (layers_exchanged, re.escape("changed=['arrays']")),
    "another scale": (
        lambda x: another_config(x, lora_alpha=16),
        re.escape("changed=['alpha']"),
    ),
    "another rank": (
        lambda x: another_config(x, r=4),
        "two matrices of matching shapes",
    ),
    "training diverged": (
        training_diverged,
        re.escape(f"not_finite=['{QUERY}.b']"),
    ),
    "file cut off": (
        file_cut_off,
        "must have two readable files; got .*adapter_model.safetensors",
    ),
    "two targets in one module": (
        lambda x: save(x, x.adapters, names=lambda path, layer: f"layers.{layer}.attn"),
        "must have a module, or a part of one, of its own",
    ),
    "other tokenizer": (other_tokenizer, "the tokenizer must be that of training"),
}


@pytest.mark.parametrize("name", FAULTS)
@jax.numpy_dtype_promotion("standard")  # flax needs it
def test_a_fault_is_noticed(case, name):
    make, message = FAULTS[name]
    with pytest.raises((ValueError, SystemExit), match=message):
        make(case)


@jax.numpy_dtype_promotion("standard")
def test_without_a_fault_there_is_no_error(case):
    save(case, case.adapters, names=llm.huggingface_name)
    np.testing.assert_array_equal(apply(case, load(case)), apply(case))
    example.generate(case.folder.parent, "the", 2, 0)
