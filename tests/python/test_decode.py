# SPDX-License-Identifier: MIT
"""Tests flash_mla_with_kvcache against attention in double precision and against PyTorch's own, on every kind of array."""

import math

import numpy
import pytest

from attention import DECODE_OUT, Batch, check_close, check_decode
from calls import needs_kernel
from flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from kinds import each_torch_kind, kind, torch
from programs import output_of


def call(arrays, head_dim_v=512, meta=None, **options):
    return flash_mla_with_kvcache(
        arrays["q"], arrays["k_cache"], arrays["block_table"], arrays["cache_seqlens"], head_dim_v, meta, **options
    )


# ---- Values ---------------------------------------------------------------------------------------------------------

# Every value of an axis, and lengths from 0 to several pages; unused slots of the caches hold NaN, unused table entries garbage.
SHAPES = [
    dict(lengths=[100], h_q=16),
    dict(lengths=[1, 64, 65, 0, 200], h_q=1),
    dict(lengths=[130, 3], h_q=128),
    dict(lengths=[0, 0], h_q=3),
    dict(lengths=[63, 128, 7], h_q=3, d=512),
    dict(lengths=[300, 1], h_q=16, s_q=2, causal=True),
    dict(lengths=[3, 70, 0], h_q=3, s_q=4, causal=True),
    dict(lengths=[129, 64], h_q=128, s_q=2, d=512, causal=True),
    dict(lengths=[90, 260], h_q=16, s_q=4, d=512),
    dict(lengths=[40, 17, 0, 33], h_q=16, page_size=16),
    dict(lengths=[25, 48], h_q=1, s_q=4, page_size=16, d=512, causal=True),
    dict(lengths=[20, 1, 9], h_q=16, page_size=1),
    dict(lengths=[11, 30], h_q=3, s_q=2, page_size=1, d=512, causal=True),
    dict(lengths=[100, 10], h_q=16, h_kv=2),
    dict(lengths=[66, 0, 5], h_q=3, h_kv=3, s_q=2, causal=True),
    dict(lengths=[70, 31], h_q=128, h_kv=4, d=512, page_size=16),
    dict(lengths=[64, 20, 0], h_q=16, table=False),
    dict(lengths=[50, 7], h_q=3, s_q=2, table=False, page_size=100, causal=True),
    dict(lengths=[80] * 20, h_q=16),
    dict(lengths=[2000, 5], h_q=16, causal=True),
]


# Tested for every FP8 format. With 576 bytes per token they also have a scale; the second scale rounds the values.
SHAPES_OF_BYTES = [shape for shape in SHAPES if not {"d", "h_kv"} & shape.keys()]
SHAPES_OF_BYTES.append(dict(lengths=[20, 1, 9], h_q=16, page_size=1, s_q=2, causal=True))
KV_SCALES = [2.0**-10, 0.8125 * 2.0**-9]


@each_torch_kind
@pytest.mark.parametrize("causal", [False, True])
def test_against_plain_pytorch(kind, causal):
    """Gathers keys page by page; then a matrix product, a softmax and another product."""
    batch = Batch([200, 77, 64], s_q=2, h_q=16)
    arrays = batch.arrays(kind)
    out, lse = call(arrays, causal=causal)
    for request, length in enumerate(batch.lengths):
        pages = arrays["block_table"][request][: -(-length // 64)].long()
        keys = arrays["k_cache"][pages].reshape(-1, 576)[:length].float()
        scores = torch.einsum("qhd,kd->qhk", arrays["q"][request].float(), keys) * 576**-0.5
        if causal:
            hidden = torch.ones(2, length, dtype=torch.bool, device=keys.device).tril(length - 2).logical_not()
            scores = scores.masked_fill(hidden[:, None, :], -math.inf)
        plain = torch.softmax(scores, dim=-1) @ keys[:, :512]
        check_close("out", kind.float64(out[request]), kind.float64(plain), DECODE_OUT)
        torch.testing.assert_close(
            lse[request].cpu(), torch.logsumexp(scores, dim=-1).T.cpu(), atol=1e-5, rtol=8.01 / 65536
        )


# ---- FP8 caches -----------------------------------------------------------------------------------------------------


def test_scale_of_the_cache_is_read_by_each_call(kind):
    """A call reads the scale from memory when it runs; without one it uses 1."""
    needs_kernel("dense_decode", kind, 576)
    ones, meta = Batch([100, 30], s_q=2, layout=576), get_mla_metadata()[0]
    halves = Batch([100, 30], s_q=2, layout=576)
    halves.keys = [keys / 2 for keys in halves.keys]  # also exact in bf16
    arguments = dict(ones.arguments(kind), tile_scheduler_metadata=meta)
    scales = kind.fp32([1]), kind.fp32([0.5])
    for _ in range(4):
        for batch, scale in ((ones, scales[0]), (halves, scales[1]), (ones, None)):
            check_decode(kind, flash_mla_with_kvcache(**arguments, kv_scale=scale), batch.expected(kind))
    scales[0][:] = 0.5
    check_decode(kind, flash_mla_with_kvcache(**arguments, kv_scale=scales[0]), halves.expected(kind))


# ---- Conventions ----------------------------------------------------------------------------------------------------


def test_default_scale_base_and_empty(kind):
    """Passing the defaults gives the same bits."""
    batch = Batch([70, 0], s_q=2)
    options = dict(softmax_scale=576**-0.5, causal=False, lse_empty=math.inf, log_base=math.e, stream=0)
    default, said = call(batch.arrays(kind)), call(batch.arrays(kind), **options)
    assert kind.all_bits(default) == kind.all_bits(said)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "options",
    [
        dict(softmax_scale=numpy.float32(0.25)),
        dict(softmax_scale=numpy.float64(0.25), lse_empty=numpy.float32(-math.inf), log_base=numpy.int64(2)),
        dict(causal=numpy.bool_(True)),
        dict(batch_invariant=numpy.bool_(True)),
    ],
    ids=str,
)
def test_scalars_of_numpy(kind, options):
    """NumPy's scalars come from configurations and comparisons."""
    batch = Batch([70, 0], s_q=2, h_q=7)
    plain = {name: value if name == "log_base" else float(value) for name, value in options.items()}
    got = call(batch.arrays(kind), numpy.int64(512), **options)
    plain.pop("batch_invariant", None)
    scale = plain.pop("softmax_scale", None)
    check_decode(kind, got, batch.expected(kind, scale=scale, **plain))


def test_lengths_are_clamped(kind):
    """Lengths are clamped to the table's room and to 0."""
    batch = Batch([128, 0], spare=0)
    assert batch.table.shape == (2, 2)
    arrays = batch.arrays(kind)
    arrays["cache_seqlens"] = kind.int32([1000000, -5])
    check_decode(kind, call(arrays), batch.expected(kind))


def test_pages_may_be_shared(kind):
    batch = Batch([100, 100])
    batch.table[1, :2] = batch.table[0, :2]
    batch.keys[1] = batch.keys[0]
    check_decode(kind, call(batch.arrays(kind)), batch.expected(kind))


def test_nan_in_a_key_that_is_seen_goes_through(kind):
    """NaN reaches only rows that see the key: a causal mask hides the last key from the first token."""
    batch = Batch([70, 70], s_q=2, h_q=2)
    batch.keys[1][69] = math.nan
    batch.cache[batch.table[1, 1], 5] = math.nan
    out, lse = call(batch.arrays(kind), causal=True)
    expected = batch.expected(kind, causal=True)
    assert numpy.all(numpy.isnan(expected[0][1, 1])) and not numpy.any(numpy.isnan(expected[0][1, 0]))
    check_decode(kind, (out, lse), expected)


# ---- The caller's results --------------------------------------------------------------------------------------------


def test_given_results_transposed(kind):
    """The outer dimensions may have any order, here [h_q, s_q, b, d_v] in memory."""
    batch = Batch([100, 3, 64], s_q=2)
    out = kind.transpose(kind.full((4, 2, 3, 512), math.nan), 2, 1, 0, 3)
    got = call(batch.arrays(kind), out=out)
    check_decode(kind, got, batch.expected(kind))


# ---- Strides of the inputs ------------------------------------------------------------------------------------------


def test_q_of_one_token_with_any_stride(kind):
    """Tests q[:, None], as models pass it, and a q whose dimension of one has an odd stride."""
    batch = Batch([100, 3, 64])
    arrays = batch.arrays(kind)
    arrays["q"] = kind.array(batch.q[:, 0])[:, None]
    check_decode(kind, call(arrays), batch.expected(kind))
    arrays["q"] = kind.array(numpy.repeat(batch.q, 3, axis=1))[:, 1:2]
    check_decode(kind, call(arrays), batch.expected(kind))


# ---- Edges ----------------------------------------------------------------------------------------------------------


def test_no_pages(kind):
    """With a cache without pages and a table without columns, no request has a key."""
    batch = Batch([0, 0], spare=0)
    assert batch.cache.shape[0] == 0 and batch.table.shape == (2, 0)
    check_decode(kind, call(batch.arrays(kind)), batch.expected(kind))


def test_smaller_head_dim_v(kind):
    """No kernel takes this head size: the message lists those taken. The oracle computes it (below)."""
    with pytest.raises(NotImplementedError, match="^flash_mla_with_kvcache: .*d_v is 256"):
        call(Batch([10]).arrays(kind), head_dim_v=256)


def test_smaller_head_dim_v_by_the_oracle():
    """FLASHMLA_KERNEL is read once, so a process of its own asks for the oracle."""
    program = """
from attention import Batch, check_decode
from flash_mla import flash_mla_with_kvcache
from kinds import Kind
kind, batch = Kind("numpy", "float16"), Batch([70, 0], d=40, page_size=16)
for head_dim_v in (1, 24, 40):
    got = flash_mla_with_kvcache(*batch.arrays(kind).values(), head_dim_v, None)
    assert got[0].shape == (2, 1, 4, head_dim_v)
    check_decode(kind, got, batch.expected(kind, d_v=head_dim_v))
"""
    output_of("-c", program, FLASHMLA_KERNEL="dense_decode=ref", FMLA_TEST_LIBRARIES="numpy")


# ---- The scheduler's metadata ---------------------------------------------------------------------------------------


def test_metadata_is_empty_at_first():
    meta, num_splits = get_mla_metadata()
    assert meta == FlashMLASchedMeta(False, None, None, None) and num_splits is None


def test_metadata_is_filled_by_the_first_call_and_used_by_the_next(kind):
    batch = Batch([300, 0, 65], s_q=2, h_q=16, h_kv=4, page_size=32)
    meta, _ = get_mla_metadata()
    first = call(batch.arrays(kind), meta=meta, causal=True)
    config = FlashMLASchedMeta.Config(3, 2, 16, 32, 4, True, False, None, None, None)
    tables = meta.tile_scheduler_metadata, meta.num_splits
    check_tables(kind, tables, 3)
    held = kind.all_bits(tables)
    assert meta.have_initialized and meta.config == config
    second = call(batch.arrays(kind), meta=meta, causal=True)
    assert (meta.tile_scheduler_metadata, meta.num_splits) == tables and meta.config == config
    assert kind.all_bits(tables) == held
    assert kind.all_bits(first) == kind.all_bits(second)
    check_decode(kind, first, batch.expected(kind, causal=True))


def check_tables(kind, tables, b):
    partitions, num_splits = tables
    assert kind.is_one(partitions) and kind.dtype_name(partitions) == "int32" and partitions.shape[1] == 8
    assert kind.is_one(num_splits) and kind.dtype_name(num_splits) == "int32" and tuple(num_splits.shape) == (b + 1,)


def test_metadata_as_two_tables(kind):
    """The older generation: tables of a smaller batch are copied into those of the largest, which a graph would read."""
    kept = get_mla_metadata(kind.int32([1] * 5), 2 * 16, 1)
    check_tables(kind, kept, 5)
    for lengths in ([300, 0, 65], [64, 1000, 2], [5, 4, 3, 2, 1]):
        batch, b = Batch(lengths, s_q=2, h_q=16), len(lengths)
        tables = get_mla_metadata(kind.int32(lengths), 2 * 16, 1)
        check_tables(kind, tables, b)
        assert tables[0].shape == kept[0].shape
        kept[0][:] = tables[0]
        kept[1][: b + 1] = tables[1]
        expected = call(batch.arrays(kind), meta=get_mla_metadata()[0], causal=True)
        for partitions, num_splits in (tables, (kept[0], kept[1][: b + 1])):
            got = flash_mla_with_kvcache(*batch.arrays(kind).values(), 512, partitions, num_splits, causal=True)
            assert kind.all_bits(got) == kind.all_bits(expected)
        check_decode(kind, got, batch.expected(kind, causal=True))


@each_torch_kind
def test_the_first_table_alone_is_filled_by_the_first_call(kind):
    """vLLM passes arguments but keeps only the first table, which may be used under capture after the lengths changed."""
    batch = Batch([300, 0, 65], s_q=2, h_q=16)
    stale, _ = get_mla_metadata(kind.int32([1, 1, 1]), 2 * 16, 1)
    for _ in range(2):
        check_decode(kind, call(batch.arrays(kind), meta=stale, causal=True), batch.expected(kind, causal=True))
        assert stale.sched_meta.have_initialized
    with pytest.raises(TypeError, match="^flash_mla_with_kvcache: tile_scheduler_metadata: .*num_splits"):
        call(batch.arrays(kind), meta=stale.clone(), causal=True)


@each_torch_kind
@pytest.mark.parametrize("arguments", [(), (32, 1)], ids=["meta", "tensor"])
def test_tables_that_others_made_are_refused(arguments, kind):
    """vLLM writes such tables for results that do not depend on the batch."""
    batch = Batch([300, 0, 65], s_q=2, h_q=16)
    meta, _ = get_mla_metadata(*((kind.int32(batch.lengths), *arguments) if arguments else ()))
    meta.tile_scheduler_metadata, meta.num_splits = kind.int32([[0, 0, 2, 5, 0, 0, 0, 0]]), kind.int32([0, 0, 0, 0])
    with pytest.raises(ValueError, match="^flash_mla_with_kvcache: tile_scheduler_metadata: .*batch_invariant=True"):
        call(batch.arrays(kind), meta=meta)
    check_decode(kind, call(batch.arrays(kind), meta=meta, batch_invariant=True), batch.expected(kind))
