# SPDX-License-Identifier: MIT
"""flash_mla_with_kvcache_fp8 against attention in double precision over the same quantised inputs, on every kind of array.

Shapes on a GPU are those that Hopper's kernel takes.
"""

import pytest

from attention import BatchFp8, check_fp8
from calls import is_there
from flash_mla import flash_mla_with_kvcache_fp8, get_mla_metadata, get_mla_metadata_dense_fp8
from kinds import BF16_KINDS

SHAPES = [
    dict(lengths=[100], h_q=16),
    dict(lengths=[130, 3], h_q=128),
    dict(lengths=[300, 0, 1], h_q=16, s_q=2, causal=True),
    dict(lengths=[65, 200], h_q=128, s_q=2, causal=True),
    dict(lengths=[80] * 20, h_q=16),
    dict(lengths=[2000, 5], h_q=16, causal=True),
    dict(lengths=[2000, 700, 64], h_q=128),
]
SHAPES_OF_CPUS = [
    dict(lengths=[1, 64, 65, 0, 200], h_q=1),
    dict(lengths=[3, 70, 0], h_q=3, s_q=4, causal=True),
    dict(lengths=[0, 0], h_q=3),
    dict(lengths=[40, 17, 0, 33], h_q=16, page_size=16),
    dict(lengths=[20, 1, 9], h_q=16, page_size=1, s_q=2, causal=True),
    dict(lengths=[50, 7], h_q=3, s_q=2, table=False, page_size=100, causal=True),
]
# Scales that are powers of two, that are none, one of the two, and neither; queries with values, over either cache.
WAYS = [
    dict(q_scale=2.0**-10, kv_scale=2.0**-10),
    dict(q_scale=0.8125 * 2.0**-9, kv_scale=0.7 * 2.0**-9),
    dict(q_scale=2.0**-10),
    dict(kv_scale=0.8125 * 2.0**-9),
    dict(),
    dict(codes=False, kv_scale=0.8125 * 2.0**-9),
    dict(codes=False),
    dict(codes=False, layout=656),
]


def batch_for(kind, **shape):
    """A batch that a kernel on the kind's device takes."""
    if not is_there("dense_decode_fp8", kind.device, kind.element, shape.get("layout", 576)):
        pytest.skip(f"no kernel on {kind.device}")
    return BatchFp8(**shape)


def call(kind, arguments, **options):
    """Results are given to those that cannot make them."""
    if not kind.makes:
        b, s_q, h_q, *_ = *arguments["q"].shape, 1, 1, 1
        new = {"out": kind.full((b, s_q, h_q, 512), 7), "lse": kind.full((b, h_q, s_q), 7, "float32")}
        arguments = {**new, **arguments}
    return flash_mla_with_kvcache_fp8(**{**arguments, **options})


each_kind = pytest.mark.parametrize("kind", BF16_KINDS, ids=repr)


@each_kind
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_OF_CPUS, ids=str)
def test_values(kind, shape, way):
    """Planned in the call, in tables, and by metadata of either function; with a sink, and without."""
    if kind.device != "cpu" and shape in SHAPES_OF_CPUS:
        pytest.skip("of CPUs")
    shape = dict(shape)
    causal = shape.pop("causal", False)
    batch = batch_for(kind, **shape, **way)
    arguments, lengths = batch.arguments(kind), kind.int32(batch.lengths)
    expected = batch.expected(kind, causal=causal)
    tables = get_mla_metadata_dense_fp8(lengths, batch.s_q * batch.h_q, 1)
    for plan in ((None, None), tables, get_mla_metadata(), get_mla_metadata(lengths, batch.s_q * batch.h_q, 1)):
        planned = dict(zip(("tile_scheduler_metadata", "num_splits"), plan))
        check_fp8(kind, call(kind, arguments, causal=causal, **planned), expected)
    got = call(kind, arguments, causal=causal, attn_sink=kind.fp32(batch.sink))
    check_fp8(kind, got, batch.expected(kind, causal=causal, sink=batch.sink))
