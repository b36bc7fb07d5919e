"""Divides the examples of a batch over the devices of a mesh.

Every device clips and sums its own examples, inside `jax.shard_map`, and only sums are
exchanged. Without this, the compiler would send the gradient of every example to all
devices, because a loop that adds up one block of examples after the other reads rows
that lie on one device.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpmp import _meshes, _validate
from dpmp._typing import PyTree
from dpmp.numerics import Arithmetic


class _Division(NamedTuple):
    """How devices divide an array of the sum."""

    number: int  # of the array's axis that devices of the batch divide
    names: tuple[str, ...]  # the mesh axes of these devices; empty for none
    others: jax.P  # the spec for all other mesh axes, which the compiler divides

    @property
    def spec(self) -> jax.P:
        return jax.P(*[None] * self.number, self.names) if self.names else jax.P()


@dataclass(frozen=True)
class Shards:
    """The axes of a mesh over which the examples of a batch are divided.

    Pass it to `clipped_grad` as `spmd_axis_name`, if parameters are sharded over the
    same devices as the batch.

    Attributes:
      axes: the names of these axes; empty for no division.
      sum_specs: the partition specs of the sum, in a tree like that of the parameters.
        If a spec has some of the same axes, a device receives only its own part of that
        array. Over other axes of the mesh, the compiler divides the array from the
        start. The tree is empty for sums that are whole on every device.
      kwarg_specs: for names of keyword arguments of the loss, trees of the partition
        specs of their arrays. Leave it to `DPTrainer`. Of an array that only the same
        axes divide, and not along its first axis, the loss receives a `_meshes.Part`.
    """

    axes: tuple[str, ...] = ()
    sum_specs: PyTree = ()
    kwarg_specs: Mapping[str, PyTree] | None = None

    @classmethod
    def parse(cls, given: "str | Sequence[str] | Shards | None") -> "Shards":
        """Makes shards from the argument `spmd_axis_name` of `clipped_grad`."""
        if isinstance(given, Shards):
            return given
        given = (given,) if isinstance(given, str) else given or ()
        if not isinstance(given, Sequence) or not all(
            isinstance(x, str) for x in given
        ):
            _validate.fail(
                'spmd_axis_name must be names of axes of the mesh. Use "data", or a '
                "tuple of names.",
                spmd_axis_name=given,
            )
        return cls(tuple(given))

    @property
    def size(self) -> int:
        """The number of parts into which the axes divide a batch."""
        mesh = jax.sharding.get_abstract_mesh()
        free = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        if not set(self.axes) <= set(free):
            _validate.fail(
                "spmd_axis_name must name axes of the mesh, outside of shard_map. Set "
                "the mesh: `with jax.set_mesh(mesh):` around the call.",
                spmd_axis_name=self.axes,
                axes_of_the_mesh=free,
            )
        return math.prod(mesh.shape[name] for name in self.axes)

    def sum(
        self,
        sum_part: Callable[[PyTree, dict[str, Any]], tuple[PyTree, PyTree]],
        examples: PyTree,
        kwargs: dict[str, Any],
        arithmetic: Arithmetic,
    ) -> tuple[PyTree, PyTree]:
        """Sums the parts of a batch, each on its own devices, and adds up the sums.

        `sum_part` returns the sum over a part of `examples` (arrays with a leading axis
        of examples), and arrays with one row for each of these examples. It also
        receives `kwargs`, of which devices may have parts.
        """
        if self.size == 1:
            return sum_part(examples, kwargs)
        by_example = jax.P(self.axes)
        specs = jax.tree.leaves(self.sum_specs, is_leaf=lambda x: x is None)
        divisions = [self._division(spec) for spec in specs]
        treedef = []
        divided_kwargs = {name: kwargs[name] for name in self.kwarg_specs or ()}
        arrays, tree = jax.tree.flatten(divided_kwargs)

        def on_one_device(
            examples: PyTree, arrays: list[jax.Array]
        ) -> tuple[list[PyTree], PyTree]:
            parts = map(_as_part, arrays, self._divisions_of_kwargs)
            total, outputs = sum_part(examples, kwargs | tree.unflatten(parts))
            leaves, structure = jax.tree.flatten(total)
            treedef[:] = [structure]
            if len(divisions) not in (0, len(leaves)):
                _validate.fail(
                    "sum_specs must have a partition spec for each of the "
                    f"{len(leaves)} arrays of the sum, or none at all. Use "
                    "jax.tree.map(lambda x: x.sharding.spec, params).",
                    num_specs=len(divisions),
                )
            whole = [self._division(jax.P())] * len(leaves)
            return [
                self._add_over_devices(leaf, division, arithmetic)
                for leaf, division in zip(leaves, divisions or whole, strict=True)
            ], outputs

        leaves, outputs = jax.shard_map(
            on_one_device,
            in_specs=(by_example, [x.spec for x in self._divisions_of_kwargs]),
            out_specs=([x.spec for x in divisions] or jax.P(), by_example),
            axis_names=set(self.axes),
            # The branches of `_fence` are not annotated with the axes they vary over.
            check_vma=False,
        )(jax.tree.map(jnp.asarray, examples), arrays)
        return treedef[0].unflatten(leaves), outputs

    def agree(self, condition: jax.Array) -> jax.Array:
        """Whether a condition holds on all devices that must take the same branch.

        A branch may have collectives: over axes that the compiler divides, or in a loss
        that gathers its arguments. Devices that do not take it would let the others
        wait for ever.
        """
        mesh = jax.sharding.get_abstract_mesh()
        axes = tuple(name for name in self.axes if name in mesh.manual_axes)
        others = set(mesh.axis_names) - set(mesh.manual_axes)
        is_divided = any(mesh.shape[name] > 1 for name in others)
        is_gathered = any(x.names for x in self._divisions_of_kwargs)
        if not axes or not (is_divided or is_gathered):
            return condition
        return jax.lax.pmin(condition.astype(jnp.int32), axes) == 1

    @property
    def _divisions_of_kwargs(self) -> list[_Division]:
        """How devices divide each array that `kwarg_specs` names, or do not."""
        found = [self._division(x) for x in jax.tree.leaves(self.kwarg_specs)]
        # If the compiler divides an array too, it gathers what it divides before it
        # gathers the rest.
        return [
            x if x.number > 0 and not any(x.others) else self._division(jax.P())
            for x in found
        ]

    def _division(self, spec: jax.P) -> _Division:
        """Finds the first axis of an array that devices of the batch divide."""
        sizes = jax.sharding.get_abstract_mesh().shape
        entries = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
        entries = [tuple(name for name in x if sizes[name] > 1) for x in entries]
        of_batch = [bool(x) and set(x) <= set(self.axes) for x in entries]
        number = of_batch.index(True) if any(of_batch) else 0
        names = entries[number] if any(of_batch) else ()
        others = [None if set(x) & set(self.axes) else x or None for x in entries]
        return _Division(number, names, jax.P(*others))

    def _add_over_devices(
        self, total: jax.Array, division: _Division, arithmetic: Arithmetic
    ) -> jax.Array:
        axis, names = division.number, division.names
        if any(division.others):
            total = jax.lax.with_sharding_constraint(total, division.others)
            total = arithmetic.add_over(total, self.axes)
            if not names:
                return total
            # `psum_scatter` would make the compiler gather the array over other axes.
            size = total.shape[axis] // jax.lax.axis_size(names)
            start = size * jax.lax.axis_index(names)
            return jax.lax.dynamic_slice_in_dim(total, start, size, axis)
        if names:
            total = arithmetic.add_and_cut(total, names, axis)
        others = tuple(name for name in self.axes if name not in names)
        return arithmetic.add_over(total, others) if others else total

    def divide(self, microbatch_size: int | None, batch_size: int) -> int | None:
        """Returns the microbatch size on each device, all with equal shares."""
        size = self.size
        sizes = {"the batch size": batch_size, "microbatch_size": microbatch_size or 0}
        for name, number in sizes.items():
            if number % size != 0:
                _validate.fail(
                    f"{name} must be a multiple of the {size} devices over which the "
                    "batch is divided. Use a microbatch_size that is a multiple of "
                    f"{size}, to which DPSGD pads batches; or divide the batch over "
                    "fewer devices.",
                    microbatch_size=microbatch_size,
                )
        return microbatch_size and microbatch_size // size


def _as_part(x: jax.Array, division: _Division) -> Any:
    number, names, _ = division
    return _meshes.Part(x, number, names) if names else x
