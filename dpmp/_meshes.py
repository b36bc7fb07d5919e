"""Devices of arrays: the three kinds of axes of a mesh, and how dpmp treats them.

- "Manual" axes (`jax.shard_map`, `jax.pmap`): a function sees one shard and no other.
- "Auto" axes (`jax.jit`): the compiler divides the work.
- "Explicit" axes (`jax.jit` with the default of `jax.make_mesh`): every operation must
  say how its result is sharded. dpmp turns these axes into auto axes while it computes.

The arrays of a training state get their final types and devices before the first step.
Otherwise jax compiles a step again, because an array of the state returns with another
dtype, with a weak type, or on other devices.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from dpmp import _validate
from dpmp._typing import PyTree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array"],
    meta_fields=["axis", "names"],
)
@dataclasses.dataclass(frozen=True)
class Part:
    """The part of an array that a device has, inside of `jax.shard_map`."""

    array: jax.Array
    axis: int  # the number of the axis that devices divide
    names: tuple[str, ...]  # the mesh axes of these devices

    def whole(self) -> jax.Array:
        """Gathers the array from all devices, which must call this together."""
        return jax.lax.all_gather(self.array, self.names, axis=self.axis, tiled=True)

    def to_be_sliced(self) -> "Part":
        """The part, with the number that the axis has in slices along the first one."""
        return dataclasses.replace(self, axis=self.axis - 1)


def memory_of_device() -> int:
    """The bytes of a device's memory, a power of two so that equal devices agree."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return 2 ** math.floor(math.log2(stats.get("bytes_limit", 2**34)))


def check_not_mapped(what: str, reason: str, *, fix: str) -> None:
    """Raises ValueError inside `shard_map` or `pmap` over more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name: mesh.shape[name] for name in mesh.manual_axes if mesh.shape[name] > 1}
    if axes:
        _validate.fail(
            f"{what} must be outside of shard_map and pmap, because {reason}",
            mapped_axes=axes,
            fix=fix,
        )


def check_types_without_axes(tree: PyTree) -> None:
    """Raises ValueError for types that `jax.shard_map` makes with `check_vma=True`."""
    types = [jax.typeof(x).manual_axis_type for x in jax.tree.leaves(tree)]
    if axes := set[str]().union(*(x.varying for x in types)):
        _validate.fail(
            "clipped_grad must be in a shard_map with check_vma=False: otherwise jax "
            "adds up gradients over devices before they are clipped",
            axes=sorted(axes),
            fix="Set check_vma=False, or use jax.jit with sharded arrays.",
        )


def on_automatic_axes(
    fun: Callable[..., Any], out_specs: Callable[[Any, Any], Sequence[jax.P]]
) -> Callable[..., Any]:
    """Makes a function that computes the same as `fun` on a mesh of any kind.

    `out_specs` returns the partition specs of the arrays of the output, from the specs
    of the positional arguments, and the output.
    """

    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        mesh = _explicit_mesh(leaves)
        if mesh is None:
            return fun(*args, **kwargs)
        is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
        specs, _ = treedef.unflatten(
            jax.typeof(x).sharding.spec if array else jax.P()
            for x, array in zip(leaves, is_array, strict=True)
        )

        def run(arrays: list[jax.Array]) -> Any:
            with jax.sharding.use_abstract_mesh(_automatic(mesh)):
                free = iter([_unsharded(x) for x in arrays])
                given = treedef.unflatten(
                    next(free) if array else x
                    for x, array in zip(leaves, is_array, strict=True)
                )
                output = fun(*given[0], **given[1])
            found, out_treedef = jax.tree.flatten(output)
            shardings = (jax.NamedSharding(mesh, s) for s in out_specs(specs, output))
            return out_treedef.unflatten(map(jax.sharding.reshard, found, shardings))

        arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
        if not any(isinstance(x, jax.core.Tracer) for x in arrays):
            run = jax.jit(run)  # outside of jit, jax would not know the devices
        return run(arrays)

    return wrapper


def resharded(x: Any) -> Any:
    """Reshards an array to this mesh; jax does that with arguments alone."""
    here = jax.sharding.get_abstract_mesh()
    if not isinstance(x, jax.Array) or here.explicit_axes:
        return x
    mesh = jax.typeof(x).sharding.mesh
    is_foreign = mesh.explicit_axes or here.manual_axes != mesh.manual_axes
    return _unsharded(x) if is_foreign else x


def _unsharded(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, jax.P(*[None] * x.ndim))


def is_explicit(x: Any) -> bool:
    """Whether `x` is an array on a mesh with explicit axes."""
    is_array = isinstance(x, jax.Array)
    return is_array and bool(jax.typeof(x).sharding.mesh.explicit_axes)


def automatic(x: Any) -> Any:
    """The same array, unless it is traced, with auto axes in place of explicit ones."""
    if not is_explicit(x) or isinstance(x, jax.core.Tracer):
        return x
    mesh = x.sharding.mesh
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    return jax.device_put(x, jax.NamedSharding(mesh, x.sharding.spec))


def spec_of(x: Any) -> jax.P:
    """The partition spec of an array, or `P()` if it is not known, as in traces."""
    is_traced = isinstance(x, jax.core.Tracer)
    sharding = jax.typeof(x).sharding if is_traced else getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, jax.NamedSharding) else jax.P()


def axes_of_rows(x: Any) -> tuple[str, ...]:
    """The mesh axes that divide the first axis of an array, as far as is known."""
    axes = (*spec_of(x), None)[0]
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def mesh_of(tree: Any) -> Any:
    """The abstract mesh of the arrays of a tree, or None."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    meshes = [x.mesh for x in shardings if isinstance(x, jax.NamedSharding)]
    return meshes[0].abstract_mesh if meshes else None


def within(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets the mesh of a traced function, unless a mesh is set or `mesh` is None."""
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def traced_outside(trace: Callable[[], Any]) -> Any:
    """Calls a function that traces a program, without the mesh that is set if it can.

    Devices could not run a program that holds the mesh on their parts of a batch.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        none = jax.sharding.AbstractMesh((), ())
        # Sharding constraints that name axes need the mesh.
        with contextlib.suppress(Exception), jax.sharding.use_abstract_mesh(none):
            return trace()
    return trace()


def on_every_device(x: jax.Array) -> jax.Array:
    """Makes every device hold the whole array, if the mesh is known."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, jax.P(*[None] * x.ndim))


def shapes(tree: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, without their shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
        )

    return jax.tree.map(shape, tree)


def _explicit_mesh(leaves: list[Any]) -> Any:
    """The first mesh with explicit axes, of the context or of an array, or None."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in leaves if isinstance(x, jax.Array)]
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _automatic(mesh: Any) -> Any:
    auto = jax.sharding.AxisType.Auto
    return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, auto))


def strongly_typed(tree: PyTree) -> PyTree:
    """Makes the dtypes of all arrays strong, as those that a step returns may be."""

    def make_strong(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.extended)
        return x if is_key else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(make_strong, tree)


def colocated(tree: PyTree, others: PyTree = ()) -> PyTree:
    """Copies arrays to the devices of the committed ones, also those of `others`.

    An array that is committed to one device is copied, if others are on a mesh of
    several.
    """
    placed = [x.sharding for x in jax.tree.leaves((tree, others)) if _is_committed(x)]
    if not placed:
        return tree
    meshes = [x.mesh for x in placed if isinstance(x, jax.NamedSharding)]
    home = jax.NamedSharding(meshes[0], jax.P()) if meshes else placed[0]

    def stays(x: Any) -> bool:
        return _is_committed(x) and len(x.sharding.device_set) >= min(
            2, len(home.device_set)
        )

    return jax.tree.map(lambda x: x if stays(x) else _put(x, home), tree)


def _put(x: Any, home: jax.sharding.Sharding) -> jax.Array:
    """Copies an array, which every process of a job holds, to the devices of all."""
    if home.is_fully_addressable:
        return jax.device_put(x, home)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _put(jax.random.key_data(x), home)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    values = np.asarray(x)
    return jax.make_array_from_callback(x.shape, home, lambda part: values[part])


def places(tree: PyTree) -> PyTree:
    """The sharding of each committed array or shape, and None for others."""

    def place(x: Any) -> Any:
        has_sharding = _is_committed(x) or isinstance(x, jax.ShapeDtypeStruct)
        return x.sharding if has_sharding else None

    return jax.tree.map(place, tree)


def place_of_stack(x: Any) -> jax.sharding.Sharding | None:
    """`places` of an array with one more axis, of which each part is sharded as `x`."""
    place = places(x)
    if isinstance(place, jax.NamedSharding):
        return jax.NamedSharding(place.mesh, jax.P(None, *place.spec))
    return place


def placement(tree: PyTree) -> tuple[Any, ...]:
    """The sharding of each committed array and None for others, as a hashable tuple."""
    return tuple(
        x.sharding if _is_committed(x) else None for x in jax.tree.leaves(tree)
    )


def _is_committed(x: Any) -> bool:
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.committed
