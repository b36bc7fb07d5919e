"""That saved adapters are those that are loaded, and that no mistake goes unnoticed."""

import dataclasses
import json
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
    ("targets", "parts"),
    [("key|out", [1]), ("value|query|out", [0, 2])],
)
def test_files_have_the_layout_of_peft(targets, parts, tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, targets, alpha=6))
    more = {"task_type": "CAUSAL_LM"}
    lora.save(tmp_path, adapters, params, initial=None, names=fused_names, config=more)
    assert_same(lora.load(tmp_path, params), adapters)

    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6}
    assert expected.items() <= config.items()
    # The targets of one module are blocks of it.
    rank, is_shared = 3 * len(parts), len(parts) > 1
    shared = {f"h.{i}.attn" for i in range(2)}
    assert config["rank_pattern"] == (dict.fromkeys(shared, rank) if is_shared else {})
    alphas = dict.fromkeys(shared, 2 * rank) if is_shared else {}
    assert config["alpha_pattern"] == alphas
    plain = {f"h.{i}.out" for i in range(2) if "out" in targets}
    assert {*config["target_modules"]} == plain | shared

    arrays = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    assert len(arrays) == 2 * len(plain | shared)
    for module in plain | shared:
        layer = int(module.split(".")[1])
        a, b = (arrays[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        factors = {
            path.split("/")[1]: (x.a[layer], x.b[layer])
            for path, x in adapters.factors.items()
        }
        if module in plain:
            np.testing.assert_array_equal(a, factors["out"][0].T)
            np.testing.assert_array_equal(b, factors["out"][1].T)
            continue
        assert (a.shape, b.shape) == ((rank, 12), (60, rank))
        none = np.zeros((12, 3)), np.zeros((3, 20))
        changes = [np.matmul(*factors.get(name, none)) for name in FUSED]
        np.testing.assert_allclose((b @ a).T, np.hstack(changes), atol=1e-6)


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


@pytest.mark.parametrize("wrong", [("h.0.attn", 0, 3), "h.0.attn", ("h.0.attn", 3, 3)])
def test_two_targets_in_one_place_are_refused(wrong, tmp_path):
    params = fused_model()
    adapters = trained(lora.init(KEY, params, 3, "query|key"))
    with pytest.raises(ValueError, match=r"a part of one.*module=\('h.0.attn'"):
        lora.save(
            tmp_path / "new", adapters, params, initial=None, names=lambda *_: wrong
        )
    assert not (tmp_path / "new").exists()


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
    with pytest.raises(ValueError, match="for each module of a target, and no others"):
        lora.load(tmp_path, {"blocks": {"q": params["blocks"]["q"]}}, names=names)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def edit(**changes):
    """Changes entries of the configuration."""

    def damage(directory):
        file = directory / CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def edit_arrays(change):
    """Changes the arrays of the weights, and not their metadata."""

    def damage(directory):
        file = directory / WEIGHTS
        with safetensors.safe_open(file, framework="numpy") as opened:
            metadata = opened.metadata()
        arrays = safetensors.numpy.load_file(file)
        change(arrays)
        safetensors.numpy.save_file(arrays, file, metadata)

    return damage


def with_two_exchanged(arrays):
    first, second, _ = (name for name in arrays if re.search(r"up.*lora_A", name))
    arrays[first], arrays[second] = arrays[second], arrays[first]


def cut(file):
    def damage(directory):
        content = (directory / file).read_bytes()
        (directory / file).write_bytes(content[: len(content) // 2])

    return damage


MATRICES = "two matrices of matching shapes.*"
OTHER = {"base_model.model.other.lora_A.weight": np.ones((2, 2), np.float32)}
DAMAGES = [
    (lambda directory: (directory / WEIGHTS).unlink(), f"two readable.*{WEIGHTS}"),
    (lambda directory: (directory / CONFIG).unlink(), f"two readable.*{CONFIG}"),
    (cut(WEIGHTS), f"two readable files.*{WEIGHTS}"),
    (cut(CONFIG), f"two readable files.*{CONFIG}"),
    (edit(r=3), MATRICES),
    (edit(peft_type="IA3"), "peft_type='LORA'"),
    (edit(use_rslora=True), "use_rslora=False"),
    (edit(rank_pattern={"up": 5}), "adapters of dpmp have rank_pattern="),
    (edit(alpha_pattern={"up": 5}), "adapters of dpmp have alpha_pattern="),
    (edit(init_lora_weights="pissa"), "init_lora_weights=True"),
    (edit(layer_replication=[[0, 2]]), "layer_replication=None"),
    (edit(lora_alpha=16), r"changed=\['alpha'\]"),
    (edit(lora_alpha=None), "lora_alpha must be"),
    (edit_arrays(with_two_exchanged), r"changed=\['arrays'\]"),
    (edit_arrays(lambda arrays: arrays.pop(min(arrays))), f"{MATRICES}: None"),
    (edit_arrays(lambda arrays: arrays.update(OTHER)), f"{MATRICES}{min(OTHER)}"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_adapters_are_refused(damage, message, tmp_path):
    saved(tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        lora.load(tmp_path, DECODER.params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bias": "all"}, "adapters of dpmp have bias='none'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=True"),
        ({"task_type": object()}, "values that JSON has"),
        ({"r": 3}, "entries that dpmp does not write itself"),
    ],
)
def test_a_refused_configuration_leaves_what_was_saved(config, message, tmp_path):
    adapters = saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        lora.save(tmp_path, adapters, DECODER.params, initial=None, config=config)
    restored = lora.load(tmp_path, DECODER.params)
    jax.tree.map(np.testing.assert_array_equal, restored, adapters)


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
        (still, initial, r"not_moved='layers/key\.a'"),
        (initial, None, "every adapter must change its target"),
        (infinite, initial, r"not_finite=\['layers/up\.b'\]"),
        (infinite, None, r"not_finite=\['layers/up\.b'\]"),
        (adapters, other, "same targets, rank and alpha"),
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
    for refused in (
        lambda: lora.load(tmp_path, stale),
        lambda: lora.merge(stale, adapters),
        lambda: lora.apply(DECODER.loss_fn, stale)(adapters, DECODER.batch),
        lambda: lora.save(tmp_path, adapters, stale, initial=None),
        # Adapters cannot be merged twice.
        lambda: lora.merge(lora.merge(DECODER.params, adapters), adapters),
    ):
        with pytest.raises(ValueError, match=OTHER_BASE):
            refused()
    half = jax.tree.map(lambda x: x.astype("bfloat16"), DECODER.params)
    with pytest.raises(ValueError, match=r"trained_on='float32', given='bfloat16'"):
        lora.load(tmp_path, half)
    assert adapters.for_base(stale).base != adapters.base
    lora.merge(stale, adapters.for_base(stale))


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
    params = DECODER.params | {"activation": None}
    trainable, frozen = lora.partition(params, "layers/(up|down)")
    assert len(jax.tree.leaves(trainable)) == 2
    assert len(jax.tree.leaves(frozen)) == 5
    combined = lora.combine(trainable, frozen)
    assert jax.tree.structure(combined) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, combined, params)
    with pytest.raises(ValueError, match="in_both='layers/down'"):
        lora.combine(trainable, trainable)
    with pytest.raises(ValueError, match="in_both='embed'"):
        lora.combine(params, frozen)
    with pytest.raises(ValueError, match="got trainable='bias'"):
        lora.partition(params, "bias")
    with pytest.raises(
        ValueError, match=r"a name of its own; got same_names=\['a/b'\]"
    ):
        lora.partition({"a/b": params["embed"], "a": {"b": params["embed"]}}, "a/b")
