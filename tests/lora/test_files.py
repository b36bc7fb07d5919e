"""That saved adapters are those that are loaded, and that no mistake goes unnoticed."""

import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest
import safetensors.numpy
from lora.subjects import KEY, SUBJECTS, adapters_of, new_adapters, normal, trained

from dpmp import lora

DECODER = SUBJECTS["decoder"]()


def saved(directory, name="decoder"):
    adapters, initial = adapters_of(name), new_adapters(name)
    lora.save(directory, adapters, SUBJECTS[name]().params, initial=initial)
    return adapters


def assert_same(loaded, adapters):
    assert jax.tree.structure(loaded) == jax.tree.structure(adapters)
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


# Stacked and plain, many axes and two, as (inputs, outputs) and turned around.
@pytest.mark.parametrize("name", ["decoder", "turned"])
def test_loaded_adapters_are_the_saved_ones(name, tmp_path):
    folder = tmp_path / "new" / "adapter"
    adapters = saved(folder, name)
    assert_same(lora.load(folder, SUBJECTS[name]().params), adapters)


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_have_the_mode_that_the_umask_gives(tmp_path, umask):
    before = os.umask(umask)
    try:
        saved(tmp_path / "adapter")
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in (tmp_path / "adapter").iterdir()
    }
    expected = 0o666 & ~umask
    files = ("adapter_config.json", "adapter_model.safetensors")
    assert modes == dict.fromkeys(files, expected)


def test_files_have_the_layout_of_peft(tmp_path):
    params = {"layers": {"query": normal(0, 2, 12, 20)}}
    adapters = trained(lora.init(KEY, params, 3, "query", alpha=6))
    lora.save(
        tmp_path,
        adapters,
        params,
        initial=None,
        names=lambda path, layer: f"model.layers.{layer}.self_attn.q_proj",
        config={"task_type": "CAUSAL_LM"},
    )
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert (config["r"], config["lora_alpha"]) == (3, 6)
    assert config["target_modules"] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    a, b = adapters.factors["layers/query"]
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        np.testing.assert_array_equal(arrays[f"{prefix}.lora_A.weight"], a[layer].T)
        np.testing.assert_array_equal(arrays[f"{prefix}.lora_B.weight"], b[layer].T)
    assert len(arrays) == 4


FUSED = {"query": 0, "key": 1, "value": 2}


def fused_names(path, layer):
    """The modules of a model that computes queries, keys and values in one."""
    name = path.split("/")[1]
    return (f"h.{layer}.attn", FUSED[name], 3) if name in FUSED else f"h.{layer}.{name}"


def fused_model():
    shapes = {"query": (12, 20), "key": (12, 20), "value": (12, 20), "out": (20, 12)}
    arrays = {name: normal(i, 2, *x) for i, (name, x) in enumerate(shapes.items())}
    return {"layers": arrays}


@pytest.mark.parametrize(
    ("targets", "present"),
    [("query|key|value|out", [0, 1, 2]), ("key|out", [1]), ("value|query", [0, 2])],
)
def test_targets_of_one_module_are_blocks_of_it(targets, present, tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, targets, alpha=6))
    lora.save(tmp_path, adapters, params, initial=None, names=fused_names)
    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks = {f"h.{i}.attn": 3 * len(present) for i in range(2)}
    is_fused = len(present) > 1
    assert config["rank_pattern"] == (ranks if is_fused else {})
    alphas = {name: 2 * rank for name, rank in ranks.items()}
    assert config["alpha_pattern"] == (alphas if is_fused else {})
    modules = {f"h.{i}.{name}" for i in range(2) for name in ("attn", "out")}
    is_of_out = "out" in targets
    assert {*config["target_modules"]} == {
        x for x in modules if is_of_out or "attn" in x
    }
    for layer in range(2):
        prefix = f"base_model.model.h.{layer}.attn"
        a, b = (arrays[f"{prefix}.lora_{x}.weight"] for x in "AB")
        assert (a.shape, b.shape) == ((ranks["h.0.attn"], 12), (60, ranks["h.0.attn"]))
        change = np.zeros((12, 60))
        for name, part in FUSED.items():
            if f"layers/{name}" in adapters.factors:
                factors = adapters.factors[f"layers/{name}"]
                own = np.asarray(factors.a)[layer] @ np.asarray(factors.b)[layer]
                change[:, 20 * part : 20 * (part + 1)] = own
        np.testing.assert_allclose((b @ a).T, change, atol=1e-6)
    loaded = lora.load(tmp_path, params)
    assert_same(loaded, adapters)


def test_a_shared_factor_of_another_library_is_that_of_every_part(tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, "out"))
    lora.save(tmp_path, adapters, params, initial=None, names=fused_names)
    a, b = np.asarray(normal(8, 3, 12)), np.asarray(normal(9, 60, 3))
    arrays = {
        f"base_model.model.h.{layer}.attn.lora_{name}.weight": x
        for layer in range(2)
        for name, x in (("A", a), ("B", b))
    }
    safetensors.numpy.save_file(arrays, tmp_path / "adapter_model.safetensors")
    loaded = lora.load(tmp_path, params, names=fused_names)
    assert {*loaded.factors} == {f"layers/{name}" for name in FUSED}
    for name, part in FUSED.items():
        factors = loaded.factors[f"layers/{name}"]
        np.testing.assert_array_equal(factors.a[1], a.T)
        np.testing.assert_array_equal(factors.b[1], b[20 * part : 20 * (part + 1)].T)


def test_two_targets_in_one_place_are_refused(tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, "query|key"))

    def same_part(path, layer):
        return f"h.{layer}.attn", 0, 3

    def same_module(path, layer):
        return f"h.{layer}.attn"

    for wrong in (same_part, same_module):
        with pytest.raises(ValueError, match=r"a part of one.*shared='h.0.attn'"):
            lora.save(tmp_path / "new", adapters, params, initial=None, names=wrong)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_another_size_of_a_shared_module_is_refused(pattern, tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, "query|key"))
    lora.save(tmp_path, adapters, params, initial=None, names=fused_names)
    edit(tmp_path, **{pattern: {"h.0.attn": 5}})
    with pytest.raises(ValueError, match=f"only adapters with {pattern}="):
        lora.load(tmp_path, params)


def names(path, layer):
    return (
        f"blocks.{layer}.{path.split('/')[1]}" if path.startswith("blocks/") else None
    )


def test_files_of_other_libraries_are_loaded(tmp_path):
    params = {"blocks": {"q": normal(0, 2, 12, 20), "v": normal(1, 2, 12, 20)}}
    params["head"] = normal(2, 12, 5)
    adapters = trained(lora.init(KEY, params, 3, "q|v"))
    lora.save(tmp_path, adapters, params, initial=None, names=names)
    file = tmp_path / "adapter_model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file(arrays, file)  # without what dpmp notes in the file
    with pytest.raises(ValueError, match="Pass `names`"):
        lora.load(tmp_path, params)
    loaded = lora.load(tmp_path, params, names=names)
    assert_same(loaded, adapters)
    with pytest.raises(ValueError, match="every array of the file must belong"):
        lora.load(tmp_path, {"blocks": {"q": params["blocks"]["q"]}}, names=names)


def edit(directory, **changes):
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_arrays(directory, change):
    file = directory / "adapter_model.safetensors"
    with safetensors.safe_open(file, framework="numpy") as opened:
        metadata = opened.metadata()
    arrays = safetensors.numpy.load_file(file)
    change(arrays)
    safetensors.numpy.save_file(arrays, file, metadata)


def without_one(arrays):
    del arrays[min(arrays)]


def with_one_turned(arrays):
    arrays[min(arrays)] = np.ascontiguousarray(arrays[min(arrays)].T)


def with_two_exchanged(arrays):
    first, second, _ = (name for name in arrays if re.search(r"up.*lora_A", name))
    arrays[first], arrays[second] = arrays[second], arrays[first]


def with_another(arrays):
    arrays["base_model.model.other.lora_A.weight"] = np.ones((2, 2), np.float32)


def damaged(file):
    def change(directory):
        content = (directory / file).read_bytes()
        (directory / file).write_bytes(content[: len(content) // 2])

    return change


DAMAGES = {
    "no weights": (
        lambda d: (d / "adapter_model.safetensors").unlink(),
        "two readable files.*adapter_model.safetensors",
    ),
    "no configuration": (
        lambda d: (d / "adapter_config.json").unlink(),
        "two readable files.*adapter_config.json",
    ),
    "cut weights": (damaged("adapter_model.safetensors"), "two readable files"),
    "cut configuration": (damaged("adapter_config.json"), "two readable files"),
    "another rank": (lambda d: edit(d, r=3), "two matrices of matching shapes"),
    "another kind": (lambda d: edit(d, peft_type="IA3"), "peft_type='LORA'"),
    "another scale": (lambda d: edit(d, use_rslora=True), "use_rslora=False"),
    "another alpha": (lambda d: edit(d, lora_alpha=16), r"changed=\['alpha'\]"),
    "two matrices are exchanged": (
        lambda d: edit_arrays(d, with_two_exchanged),
        r"changed=\['arrays'\]",
    ),
    "no alpha": (lambda d: edit(d, lora_alpha=None), "lora_alpha must be"),
    "a matrix is missing": (
        lambda d: edit_arrays(d, without_one),
        "two matrices of matching shapes.*shape=None",
    ),
    "a matrix is turned around": (
        lambda d: edit_arrays(d, with_one_turned),
        "two matrices of matching shapes",
    ),
    "a matrix too many": (
        lambda d: edit_arrays(d, with_another),
        r"every array of the file must belong.*unknown=\['base_model.model.other",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_adapters_are_refused(damage, message, tmp_path):
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path, DECODER.params)


def with_factors(adapters, path, **changed):
    factors = adapters.factors[path]._replace(**changed)
    return dataclasses.replace(adapters, factors={**adapters.factors, path: factors})


def test_adapters_that_were_not_trained_well_are_not_saved(tmp_path):
    initial, adapters = new_adapters("decoder"), adapters_of("decoder")
    still = with_factors(adapters, "layers/key", a=initial.factors["layers/key"].a)
    b = np.array(adapters.factors["layers/up"].b)
    b[0, 0, 0] = np.inf
    infinite = with_factors(adapters, "layers/up", b=b)
    other = lora.init(KEY, DECODER.params, 2, "up|down")
    for given, before, message in (
        (still, initial, r"not_moved=\['layers/key\.a'\]"),
        (initial, None, "every adapter must change its target"),
        (infinite, initial, r"not_finite=\['layers/up\.b'\]"),
        (infinite, None, r"not_finite=\['layers/up\.b'\]"),
        (adapters, other, "same targets, rank and base"),
    ):
        with pytest.raises(ValueError, match=message):
            lora.save(tmp_path, given, DECODER.params, initial=before)
        assert not any(tmp_path.iterdir())


OTHER_BASE = "must be used with the frozen arrays that they were made for"


def test_another_base_is_refused_everywhere(tmp_path):
    adapters = saved(tmp_path)
    up = np.array(DECODER.params["layers"]["up"])
    up[0, 0, 0] += 1e-6
    stale = DECODER.params | {"layers": DECODER.params["layers"] | {"up": up}}
    with pytest.raises(ValueError, match=OTHER_BASE):
        lora.load(tmp_path, stale)
    with pytest.raises(ValueError, match=OTHER_BASE):
        lora.merge(stale, adapters)
    with pytest.raises(ValueError, match=OTHER_BASE):
        lora.apply(DECODER.loss_fn, stale)(adapters, DECODER.batch)
    with pytest.raises(ValueError, match=OTHER_BASE):
        lora.save(tmp_path, adapters, stale, initial=None)
    assert adapters.for_base(stale).base != adapters.base
    lora.merge(stale, adapters.for_base(stale))


def test_merging_twice_is_refused():
    adapters = adapters_of("decoder")
    with pytest.raises(ValueError, match=OTHER_BASE):
        lora.merge(lora.merge(DECODER.params, adapters), adapters)


def test_a_model_of_other_shapes_is_refused():
    adapters = adapters_of("decoder")
    layers = DECODER.params["layers"]
    other = DECODER.params | {"layers": layers | {"up": layers["down"]}}
    with pytest.raises(ValueError, match="must have the shapes of their target"):
        adapters.for_base(other)
    a, b = adapters.factors["layers/up"]
    with pytest.raises(ValueError, match="shapes of their target; got target='layers"):
        lora.merge(DECODER.params, with_factors(adapters, "layers/up", a=b, b=a))
    with pytest.raises(ValueError, match=r"missing=.*'layers/down'"):
        adapters.for_base({"layers": {}})


def test_partition_and_combine():
    trainable, frozen = lora.partition(DECODER.params, "layers/(up|down)")
    assert len(jax.tree.leaves(trainable)) == 2
    assert len(jax.tree.leaves(frozen)) == 5
    combined = lora.combine(trainable, frozen)
    assert jax.tree.structure(combined) == jax.tree.structure(DECODER.params)
    jax.tree.map(np.testing.assert_array_equal, combined, DECODER.params)
    with pytest.raises(ValueError, match="in_both='layers/down'"):
        lora.combine(trainable, trainable)
    with pytest.raises(ValueError, match="in_both='embed'"):
        lora.combine(DECODER.params, frozen)
    with pytest.raises(ValueError, match="got trainable='bias'"):
        lora.partition(DECODER.params, "bias")


def test_what_is_none_stays_none():
    params = {"a": np.ones(2), "b": np.ones(3), "activation": None}
    combined = lora.combine(*lora.partition(params, "a"))
    assert jax.tree.structure(combined) == jax.tree.structure(params)
