"""The parts of a training step, by what they take and when they are there."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dpmp import _validate
from dpmp._typing import PyTree
from dpmp.clipping._clipped_sum import largest_divisor
from dpmp.engines import _signature, book_keeping
from dpmp.mechanism import DPSGD
from dpmp.numerics import _arithmetic
from dpmp.precision import Policy
from dpmp.tools.memory import _gradients
from dpmp.tools.memory._gradients import tree_bytes
from dpmp.training import DPTrainer

_Lines = list[tuple[str, int, str]]


@dataclass(frozen=True)
class Step:
    """Shapes of all that goes into a step."""

    loss_fn: Callable[..., jax.Array]
    params: PyTree
    batch: PyTree
    policy: Policy
    optimizer: optax.GradientTransformation
    method: str | None
    arithmetic: str
    batch_size: int
    size: int

    @classmethod
    def from_arguments(
        cls,
        loss_fn: Callable[..., jax.Array],
        params: PyTree,
        batch: PyTree,
        policy: Policy | str,
        optimizer: optax.GradientTransformation,
        method: str | None,
        microbatch_size: int | None,
        arithmetic: str | None,
    ) -> "Step":
        """Checks everything before anything is traced."""
        policy = Policy.from_name(policy) if isinstance(policy, str) else policy
        if arithmetic is None:
            is_plain = method is None
            arithmetic = (
                "float32" if is_plain else _arithmetic.default_arithmetic(method)
            )
        if method is not None:
            _arithmetic.check_method(method, arithmetic)
        params, batch = jax.tree.map(_shape, (params, batch))
        params = jax.eval_shape(policy.cast_to_param, params)
        batch_size = _batch_size(batch)
        if microbatch_size is not None:
            microbatch_size = _validate.positive_integer(
                microbatch_size=microbatch_size,
                fix="Use a divisor of the batch size, or None for the whole batch.",
            )
        _validate.require(
            batch_size % (microbatch_size or batch_size) == 0,
            "microbatch_size must divide the batch size",
            microbatch_size=microbatch_size,
            batch_size=batch_size,
            fix="Pad the batch, or use a divisor.",
        )
        step = cls(
            loss_fn,
            params,
            batch,
            policy,
            optimizer,
            method,
            arithmetic,
            batch_size,
            microbatch_size or batch_size,
        )
        step._check_loss()
        if microbatch_size is None and arithmetic == "bounded":
            return dataclasses.replace(step, size=step._size_of_bounded_parts())
        return step

    def _size_of_bounded_parts(self) -> int:
        """The microbatch size that "bounded" sums choose."""
        engine = book_keeping.engine(
            _signature.of_one_example((1,), True)(
                lambda *args: (self.loss_fn(*args), None)
            ),
            argnums=0,
            batch_argnums=(1,),
            prng_argnum=None,
            spmd_axis_name=None,
            is_bounded=True,
        )
        found = []
        jax.eval_shape(
            lambda *args: found.append(engine.largest_microbatch(*args)),
            *self._loss_args(self.batch_size),
        )
        return largest_divisor(self.batch_size, found[0])

    def _check_loss(self) -> None:
        shape = jax.eval_shape(self.loss_fn, *self._loss_args(1))
        is_array = isinstance(shape, jax.ShapeDtypeStruct)
        _validate.require(
            is_array and shape.shape == (),
            "the loss must be a scalar",
            loss=shape,
            fix="Take the mean over whatever axes are left.",
        )

    def _loss_args(self, num_examples: int) -> tuple[PyTree, PyTree]:
        def cast(params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            policy = self.policy
            return policy.cast_to_compute(params), policy.cast_inputs(batch)

        some = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_examples, *x.shape[1:]), x.dtype),
            self.batch,
        )
        return jax.eval_shape(cast, self.params, some)

    @property
    def num_parameters(self) -> int:
        """How many entries the parameters have."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))

    @functools.cached_property
    def opt_state(self) -> PyTree:
        """Shapes of the optimizer's state."""
        params = jax.eval_shape(self.policy.cast_to_update, self.params)
        return jax.eval_shape(self.optimizer.init, params)

    @property
    def is_in_parts(self) -> bool:
        """Whether there is a loop over microbatches."""
        return self.size < self.batch_size

    @property
    def bytes_of_sum(self) -> int:
        """Of one sum of gradients."""
        words = 2 if self.arithmetic.endswith(("float32x2", "float64")) else 1
        return 4 * words * self.num_parameters

    @functools.cached_property
    def mechanism(self) -> DPSGD:
        """Of the same sizes and arithmetic; its privacy does not matter here."""
        return self._mechanism(self.batch_size, self.size)

    def _mechanism(self, batch_size: int, microbatch_size: int) -> DPSGD:
        return DPSGD(
            num_examples=1000 * batch_size,
            expected_batch_size=batch_size,
            truncated_batch_size=batch_size,
            iterations=1,
            l2_clip_norm=1.0,
            noise_multiplier=1.0,
            microbatch_size=microbatch_size,
            method=self.method or "per_example",
            arithmetic=self.arithmetic,
            num_parameters=self.num_parameters,
        )

    def argument_lines(self) -> _Lines:
        """What is there before the step and after it."""
        batch = tree_bytes(self.batch) + self.batch_size * (self.method is not None)
        return [
            (
                "master parameters",
                tree_bytes(self.params),
                f"parameters x {self.policy.param_dtype.itemsize} B",
            ),
            ("optimizer state", tree_bytes(self.opt_state), "optimizer.init(params)"),
            ("batch", batch, "examples, and which are padding"),
        ]

    def _copy_lines(self) -> _Lines:
        params, batch = self._loss_args(self.batch_size)
        copied = sum(
            tree_bytes(x)
            for x, old in zip(
                jax.tree.leaves((params, batch)),
                jax.tree.leaves((self.params, self.batch)),
                strict=True,
            )
            if x.dtype != old.dtype
        )
        name = self.policy.compute_dtype.name
        return [("compute copy", copied, f"parameters and inputs in {name}")]

    def _sum_lines(self) -> _Lines:
        name = "int32" if self.arithmetic in ("exact", "bounded") else self.arithmetic
        size = self.bytes_of_sum
        return [("sum of gradients", size, f"running sum in {name}")]

    def gradient_lines(self) -> tuple[str, _Lines]:
        """While gradients are computed (with book-keeping, until they are summed)."""
        args = self._loss_args(self.size)
        loss_fn = self.policy.in_product_precision(self.loss_fn)
        if self.method == "book_keeping":
            grad_fn = self._mechanism(self.size, self.size).clipped_grad(
                loss_fn, return_values=True, return_grad_norms=True
            )
            parts = _gradients.of_book_keeping(grad_fn, *args)
        else:
            of_examples = self.method == "per_example"
            parts = _gradients.of_gradients(loss_fn, *args, of_examples=of_examples)
        lines = self._copy_lines()
        if self.is_in_parts:
            lines += self._sum_lines()
        return "while gradients are computed", _add_up([*lines, *parts])

    def clipping_lines(self) -> tuple[str, _Lines]:
        """While per-example gradients are clipped and added up."""
        params, _ = self._loss_args(1)
        stack = self.size * tree_bytes(params)
        partial_norms = 4 * self.size * self.num_parameters // 32
        leaves = [math.prod(x.shape) for x in jax.tree.leaves(params)]
        part = self.bytes_of_sum
        lines = [
            (
                "per-example gradients",
                stack,
                f"{self.size} examples x parameters in the compute dtype",
            )
        ]
        if self.is_in_parts:
            lines += [*self._copy_lines(), *self._sum_lines()]
            part = part * max(leaves) // sum(leaves)
        clipping = max(part, partial_norms)
        lines.append(("clipping", clipping, "partial sums of norms, or of one part"))
        return "while gradients are clipped", lines

    def noise_lines(self) -> tuple[str, _Lines]:
        """While noise is drawn; the update is computed in place, entry by entry."""
        return "while noise is added", [*self._sum_lines(), self._random_line("noise")]

    def rounding_lines(self) -> tuple[str, _Lines]:
        """While parameters are rounded at random."""
        line = self._random_line("random bits")
        return "while parameters are rounded", [*self._sum_lines(), line]

    def _random_line(self, name: str) -> tuple[str, int, str]:
        leaves = [math.prod(x.shape) for x in jax.tree.leaves(self.params)]
        # XLA stores two words of the cipher, for all leaves, and what a leaf becomes.
        drawn = 8 * sum(leaves) + 4 * max(leaves)
        return name, drawn, "8 B per parameter, and the largest array with them"

    def lower(self) -> Any:
        """The step, ready to be compiled."""
        if self.method is None:
            plain_step = jax.jit(self._plain_step, donate_argnums=(0, 1))
            return plain_step.lower(self.params, self.opt_state, self.batch)
        trainer = DPTrainer(
            mechanism=self.mechanism,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            policy=self.policy,
            loss_scale=1.0 if self.policy.compute_dtype == jnp.float16 else None,
        )
        state = jax.eval_shape(
            lambda params: trainer.init(params, prng_key=jax.random.key(0)), self.params
        )
        return trainer.lower(state, self.batch)

    def _plain_step(
        self, params: PyTree, opt_state: PyTree, batch: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array]:
        """Training without privacy, as one would write it."""
        loss_fn = self.policy.in_product_precision(self.loss_fn)
        grad_fn = jax.value_and_grad(loss_fn)
        copy = self.policy.cast_to_compute(params)
        wide = self.policy.cast_to_update(params)
        batch = self.policy.cast_inputs(batch)
        if self.is_in_parts:
            num_parts = self.batch_size // self.size
            parts = jax.tree.map(
                lambda x: x.reshape(num_parts, self.size, *x.shape[1:]), batch
            )

            def add(total: PyTree, part: PyTree) -> tuple[PyTree, jax.Array]:
                value, grads = grad_fn(copy, part)
                grads = self.policy.cast_to_update(grads)
                return jax.tree.map(jnp.add, total, grads), value

            grads, value = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, wide), parts)
            grads = jax.tree.map(lambda x: x / num_parts, grads)
        else:
            value, grads = grad_fn(copy, batch)
            grads = self.policy.cast_to_update(grads)
        updates, opt_state = self.optimizer.update(grads, opt_state, wide)
        params = self.policy.apply_updates(params, updates, jax.random.key(0))
        return params, opt_state, jnp.mean(value)


def _add_up(lines: _Lines) -> _Lines:
    """Lines of one name as one."""
    found: dict[str, tuple[str, int, str]] = {}
    for name, num_bytes, formula in lines:
        _, before, first = found.get(name, (name, 0, formula))
        found[name] = (name, before + num_bytes, first)
    return list(found.values())


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype)


def _batch_size(batch: PyTree) -> int:
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch)}
    _validate.require(
        len(sizes) == 1 and all(size and size[0] > 0 for size in sizes),
        "the arrays of a batch must have one leading axis of at least one example",
        shapes=[x.shape for x in jax.tree.leaves(batch)],
        fix="Give every array the same number of examples.",
    )
    ((size,),) = sizes
    return size
