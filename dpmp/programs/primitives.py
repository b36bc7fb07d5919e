"""The names of jax's primitives, and the classes of primitives that other files use.

jax renames its primitives from time to time. No other file spells such a name: rules
for single operations are listed by these constants, and a class of operations is a
tuple of their names.
"""

# Products. XLA sums in float32 within these, and only rounds the result.
DOT_GENERAL = "dot_general"
CONVOLUTION = "conv_general_dilated"
RAGGED_DOT = "ragged_dot_general"
RAGGED_DOTS = (RAGGED_DOT, "ragged_dot")
PRODUCTS = (DOT_GENERAL, CONVOLUTION)
ALL_PRODUCTS = (*PRODUCTS, *RAGGED_DOTS)

# Operations that have rules of their own in other files.
ADD, SUB, MUL, DIV = "add", "sub", "mul", "div"
BITCAST = "bitcast_convert_type"
BROADCAST = "broadcast_in_dim"
CAST = "convert_element_type"
COMPLEX = "complex"
CONCATENATE = "concatenate"
COPY = "copy"
CUMSUM = "cumsum"
DYNAMIC_SLICE = "dynamic_slice"
DYNAMIC_UPDATE_SLICE = "dynamic_update_slice"
GATHER = "gather"
IMAG, REAL = "imag", "real"
OPTIMIZATION_BARRIER = "optimization_barrier"
REDUCE_PRECISION = "reduce_precision"
REDUCE_SUM = "reduce_sum"
RESHAPE = "reshape"
REV = "rev"
SCATTER = "scatter"  # other scatters begin with this name
SELECT = "select_n"
SLICE = "slice"
SPLIT = "split"
SQUEEZE = "squeeze"
STOP_GRADIENT = "stop_gradient"
TRANSPOSE = "transpose"
UNSTACK = "unstack"
WINDOW_SUM = "reduce_window_sum"

# Operations that run other programs: calls, and the parameters that hold the programs.
CALLS = ("jit", "pjit", "closed_call")
CUSTOM_VJP = "custom_vjp_call"
CUSTOM_JVP = "custom_jvp_call"
CUSTOM = (CUSTOM_VJP, CUSTOM_JVP)
REMATERIALISED = ("remat2", "checkpoint", "remat")
SCAN, WHILE, COND = "scan", "while", "cond"
LOOPS_AND_CHECKPOINTS = (SCAN, WHILE, *REMATERIALISED)
BODIES = {
    SCAN: ("jaxpr",),
    WHILE: ("cond_jaxpr", "body_jaxpr"),
    COND: ("branches",),
    **dict.fromkeys(REMATERIALISED, ("jaxpr",)),
}
WITH_BODIES = (*CALLS, *BODIES)

# Operations that draw random numbers, and parts of the names of calls of the host.
RANDOM = ("random_bits", "rng_bit_generator", "rng_uniform", "threefry2x32")
ON_HOST = ("callback", "debug", "ffi_call", "infeed", "outfeed")
CHECK = "check"  # of checkify, on the host too
REFERENCE = "new_ref"

# Arithmetic on indices, which tracing evaluates where the numbers are known.
OF_INDICES = (ADD, SUB, MUL, "lt", "ge", SELECT, CAST)

# Operations that return their operands, and those that change the dtype at most.
IDENTITIES = ("copy_p", "device_put", "name", OPTIMIZATION_BARRIER, "reshard")
SHARDING_CONSTRAINT = "sharding_constraint"
IDENTITIES += (SHARDING_CONSTRAINT,)
SAME_ENTRIES = (CAST, COPY, REDUCE_PRECISION, *IDENTITIES)

# Operations that move entries without changing them.
MOVES = (BROADCAST, CONCATENATE, COPY, "copy_p", DYNAMIC_SLICE, "expand_dims", GATHER)
MOVES += (OPTIMIZATION_BARRIER, "pad", RESHAPE, REV, SELECT, SLICE, SPLIT, SQUEEZE)
MOVES += (STOP_GRADIENT, TRANSPOSE, UNSTACK)

# Operations that are as good in the dtype of their operands as in a wider one: they
# move entries, compare them, or add an error the size of one rounding.
FOLLOWING = (*MOVES, DYNAMIC_UPDATE_SLICE, ADD, SUB, MUL)
FOLLOWING += ("eq", "ge", "gt", "is_finite", "le", "lt", "ne", "sign")
FOLLOWING += ("abs", "add_any", "ceil", "clamp", "cos", "erf", "floor", "logistic")
FOLLOWING += ("max", "min", "neg", "reduce_max", "reduce_min", "round", "sin", "tanh")

_EXPONENTIALS = ("exp", "exp2", "expm1", "log", "log1p", "pow")
_EXPONENTIALS += ("cumlogsumexp", "lgamma", "digamma")

# Operations by their effect on 16-bit values. An operation that is not listed only adds
# a rounding error of its own size.
_KINDS = {
    "moves": MOVES,
    "casts": (CAST,),
    # A sum remains a sum if something is added to it, or if it is scaled.
    "adds": (ADD, "add_any", SUB),
    "scales": (MUL, DIV, "neg", "max"),
    "products": ALL_PRODUCTS,
    # The derivative of a maximum divides by the number of entries that equal it.
    "ties": ("eq",),
    # The kinds from here on have the names of findings of the precision report.
    # The compiler chooses the order and the dtype. XLA on CPUs sums 4096 ones in
    # bfloat16 to 4096 along one axis, and to 1024 along two (jax 0.10 to 0.12).
    "sum": (REDUCE_SUM, WINDOW_SUM, CUMSUM),
    # The result is rounded after every addition.
    "running sum": ("scatter-add", "scatter_add"),
    # The absolute error of one side is the relative error of the other.
    "exponential": _EXPONENTIALS,
    # Applied to a variance or a norm. `div` counts if it divides by a sum.
    "normalisation": ("rsqrt", "sqrt"),
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
