"""The axes of a device mesh: which are mapped by hand, and which are explicit.

Under `jax.shard_map` and `jax.pmap` ("manual" axes), a function sees one shard and
knows nothing of the others. Under `jax.jit`, the compiler divides the work ("auto"
axes), or jax requires every operation to say how its result is sharded ("explicit"
axes, the default of `jax.make_mesh`). This library leaves that to the compiler.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from dpmp import _validate


def check_not_mapped(what: str) -> None:
    """Raises ValueError where other devices hold other parts of a sum."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = {name: mesh.shape[name] for name in mesh.manual_axes if mesh.shape[name] > 1}
    _validate.require(
        not axes,
        f"{what} have no sensitivity that covers what other devices add to them",
        mapped_axes=axes,
        fix='Use "exact" sums (with book-keeping "bounded"), integers which psum adds '
        "without rounding, or jax.jit with sharded arrays in place of shard_map.",
    )


def on_automatic_axes(
    fun: Callable[..., Any],
    out_specs: Callable[[Any, Any], Sequence[jax.P]],
) -> Callable[..., Any]:
    """A function whose operations need not say how their results are sharded.

    Args:
      fun: any function of pytrees.
      out_specs: from the positional arguments, with partition specs in the place of
        arrays, and the output, to a spec for each array of the output.

    Returns:
      A function that does the same, also with arrays on meshes with explicit axes.
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
                free = iter([_reshard(x, jax.P(*[None] * x.ndim)) for x in arrays])
                given = treedef.unflatten(
                    next(free) if array else x
                    for x, array in zip(leaves, is_array, strict=True)
                )
                output = fun(*given[0], **given[1])
            found, out_treedef = jax.tree.flatten(output)
            shardings = (jax.NamedSharding(mesh, s) for s in out_specs(specs, output))
            return out_treedef.unflatten(map(_reshard, found, shardings))

        arrays = [x for x, array in zip(leaves, is_array, strict=True) if array]
        if not any(isinstance(x, jax.core.Tracer) for x in arrays):
            run = jax.jit(run)  # else jax does not know on which devices
        return run(arrays)

    return wrapper


def shapes(tree: Any) -> Any:
    """Shapes and dtypes of arrays, without their shardings."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
        )

    return jax.tree.map(shape, tree)


def _explicit_mesh(leaves: list[Any]) -> Any:
    """The abstract mesh of the context, or of an array, if it has explicit axes."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(x).sharding.mesh for x in leaves if isinstance(x, jax.Array)]
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)


def _automatic(mesh: Any) -> Any:
    auto = jax.sharding.AxisType.Auto
    return mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, auto))


def _reshard(x: jax.Array, sharding: Any) -> jax.Array:
    return jax.sharding.reshard(x, sharding)
