"""Costs of a small program for a GPU, as XLA prints it, against a count by hand."""

import pytest

from benchmarks import roofline

# What cuBLAS is told of a product.
_DIMENSIONS = """, backend_config=\
{"gemm_backend_config":{"dot_dimension_numbers":{\
"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"]}}}"""
_TRIPS = """{"known_trip_count":{"n":"3"}}"""

PROGRAM = f"""\
HloModule jit_f, entry_computation_layout={{(bf16[64,32]{{1,0}})->f32[]}}

%fused_slice (param_0: f32[1000,8], param_1: s32[]) -> f32[4,8] {{
  %param_0 = f32[1000,8]{{1,0}} parameter(0)
  %param_1 = s32[] parameter(1)
  ROOT %slice.1 = f32[4,8]{{1,0}} dynamic-slice(%param_0, %param_1, %param_1)
}}

%fused_update (param_2: f32[1000,8]) -> f32[1000,8] {{
  %param_2 = f32[1000,8]{{1,0}} parameter(0)
  %param_3 = s32[4,1]{{1,0}} parameter(1)
  %param_4 = f32[4,8]{{1,0}} parameter(2)
  ROOT %scatter.1 = f32[1000,8]{{1,0}} scatter(%param_2, %param_3, %param_4)
}}

%body (p: (f32[1000,8], s32[])) -> (f32[1000,8], s32[]) {{
  %p = (f32[1000,8]{{1,0}}, s32[]) parameter(0)
  %table = f32[1000,8]{{1,0}} get-tuple-element(%p), index=0
  %i = s32[] get-tuple-element(%p), index=1
  %part = f32[4,8]{{1,0}} fusion(%table, %i), calls=%fused_slice
  ROOT %out = (f32[1000,8]{{1,0}}, s32[]) tuple(%table, %i)
}}

%first (q: f32[]) -> f32[] {{
  %q = f32[] parameter(0)
  ROOT %copy.1 = f32[] copy(%q)
}}

%second (r: f32[]) -> f32[] {{
  ROOT %r = f32[] parameter(0)
}}

ENTRY %main (a: bf16[2,64,32]) -> f32[] {{
  %a = bf16[2,64,32]{{2,1,0}} parameter(0)
  %b = bf16[2,32,16]{{2,1,0}} parameter(1)
  %c = f32[1000,8]{{1,0}} parameter(2)
  %n = s32[] parameter(3)
  %x = f32[] parameter(4)
  %product = (f32[2,64,16]{{2,1,0}}, s8[4194304]{{0}}) custom-call(%a, %b){_DIMENSIONS}
  %start = (f32[1000,8]{{1,0}}, s32[]) tuple(%c, %n)
  %loop = (f32[1000,8]{{1,0}}, s32[]) while(%start), body=%body, backend_config={_TRIPS}
  %rows = s32[4,1]{{1,0}} parameter(5)
  %changes = f32[4,8]{{1,0}} parameter(6)
  %changed = f32[1000,8]{{1,0}} fusion(%c, %rows, %changes), calls=%fused_update
  ROOT %choice = f32[] conditional(%n, %x, %x), branch_computations={{%first, %second}}
}}
"""


def test_costs_are_those_of_a_count_by_hand():
    costs = roofline.costs_of(PROGRAM)
    # One product, three slices in the loop, and the copy in the longer branch.
    # The scatter reads rows and changes, and reads and writes what it changes.
    product = 2 * 64 * 32 * 2 + 2 * 32 * 16 * 2 + 2 * 64 * 16 * 4
    others = [2 * 4 * 8 * 4 + 4] * 3 + [4 + 4] + [4 * 4 + 3 * 4 * 8 * 4]
    assert costs.kernels == 6
    assert costs.operations == 2 * 2 * 64 * 16 * 32
    assert costs.bytes == product + sum(others)
    seconds = sum(x / roofline.BYTES_PER_SECOND for x in [product, *others])
    assert costs.seconds == pytest.approx(seconds)


def test_a_large_product_takes_the_time_of_its_operations():
    large = PROGRAM
    for sizes in ("64,32", "32,16", "64,16"):
        large = large.replace(sizes, "8192,8192")
    seconds = 2 * 2 * 8192**3 / roofline.OPERATIONS_PER_SECOND
    assert roofline.costs_of(large).seconds == pytest.approx(seconds, rel=1e-3)


def test_a_loop_of_unknown_length_has_no_figures():
    unknown = PROGRAM.replace(_TRIPS, "{}")
    assert roofline.costs_of(PROGRAM).figures()["kernels"] == 6
    assert roofline.costs_of(unknown).figures() == {}
