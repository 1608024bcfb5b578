# SPDX-License-Identifier: MIT
"""Tests flash_mla_with_kvcache with indices: sparse attention over plain and FP8 caches, against plain attention over the same keys."""

import math

import numpy

from attention import SPARSE_OUT, Batch, check_decode, conventions, over_lists, that_name, with_sink
from caches import NAMED, Cache
from flash_mla import FlashMLASchedMeta, _operations, flash_mla_with_kvcache, get_mla_metadata
from flash_mla._argument_structs import ARGUMENTS
from kinds import kind

D_V = 512
INFERRED = "FP8_528", "FP4_288"
"""Formats that the bytes of a token imply."""

# ---- Batches --------------------------------------------------------------------------------------------------------


class Sparse:
    """A batch with lists of any keys, with holes; entries past a given length name keys too."""

    def __init__(
        self,
        layout="plain",
        b=2,
        s_q=2,
        h_q=4,
        topk=90,
        pages=5,
        page_size=64,
        extra=None,
        lengths=None,
        seed=0,
        extra_layout=None,
        d=576,
    ):
        random = numpy.random.default_rng(seed)
        self.b, self.s_q, self.h_q, self.layout = b, s_q, h_q, layout
        self.d = 512 if layout == 584 or layout in NAMED else d
        self.layouts = layout, extra_layout or layout
        self.q = numpy.clip(random.normal(0, 1, (b, s_q, h_q, self.d)), -1, 1).astype(numpy.float32)
        self.sink = random.normal(0, 2, h_q).astype(numpy.float32)
        self.caches, self.lists, self.lengths = [], [], []
        for i, (count, of_pages, of_page) in enumerate([(topk, pages, page_size), *([extra] if extra else [])]):
            self.caches.append(Cache(random, self.layouts[i], of_pages, of_page, self.d))
            slots = of_pages * of_page
            self.lists.append(random.integers(-slots // 8, slots + slots // 8, (b, s_q, count)).astype(numpy.int32))
            self.lengths.append(None if lengths is None else numpy.array(lengths[i], numpy.int32))

    def inputs(self):
        """{name: (values, type; None: that of the queries)}."""
        inputs = {"q": (self.q, None)}
        for i, names in enumerate(self.NAMES[: len(self.caches)]):
            dtype = None if self.layouts[i] == "plain" else "uint8"
            values = (self.caches[i].memory, dtype), (self.lists[i], "int32"), (self.lengths[i], "int32")
            inputs.update({name: value for name, value in zip(names, values) if value[0] is not None})
        return inputs

    results = Batch.results
    NAMES = ("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")

    def arguments(self, kind):
        nothing = dict(block_table=None, cache_seqlens=None, tile_scheduler_metadata=None)
        options = dict(nothing, head_dim_v=D_V, is_fp8_kvcache=self.layout != "plain")
        if self.layout in NAMED and self.layout not in INFERRED:
            options["kv_format"] = self.layout
        told = self.layout != "plain" and self.layouts[1] in INFERRED
        if self.layouts[1] in NAMED and self.layouts[1] != self.layout and (not told or self.same_bytes()):
            options["extra_kv_format"] = self.layouts[1]
        if self.layouts[1] == "plain" and self.layout != "plain":
            options["extra_kv_format"] = {"bfloat16": "BF16", "float16": "FP16"}[kind.element]
        return {**{name: kind.array(*given) for name, given in self.inputs().items()}, **options}

    def same_bytes(self):
        return self.caches[0].memory.shape[-1] == self.caches[1].memory.shape[-1]

    def expected(self, kind, scale=None, sink=None, lse_empty=math.inf, log_base=math.e, lengths=None):
        """`lengths`: those of the first cache's lists, instead of the batch's."""
        counts = [self.lengths[0] if lengths is None else lengths, *self.lengths[1:]]

        def keys(r, j):
            found = []
            for cache, lists, count in zip(self.caches, self.lists, counts):
                of_request = None if count is None else count[r]
                found.append(cache.keys(kind, that_name(lists[r, j], of_request, cache.pages * cache.page_size)))
            return numpy.concatenate(found)

        out, _, lse = over_lists(kind.float64(kind.array(self.q)), keys, scale)
        return with_sink(out, lse, sink), conventions(lse, lse_empty, log_base)


def check(kind, got, expected):
    check_decode(kind, got, expected, SPARSE_OUT)


# ---- Values ---------------------------------------------------------------------------------------------------------

SHAPES = [
    dict(),
    dict(layout=656),
    dict(layout=584),
    dict(layout=656, h_q=128, s_q=1, topk=300),
    dict(layout=584, extra=(70, 30, 2), h_q=64),
    dict(extra=(70, 7, 16), page_size=61),
    dict(layout=656, lengths=[[0, 90]]),
    dict(layout=584, lengths=[[-3, 1000], [70, 0]], extra=(70, 30, 2)),
    dict(layout=656, page_size=1, pages=50, topk=1),
    dict(topk=0),
    *[dict(layout=name) for name in NAMED],
    *[dict(layout=name, extra=(70, 30, 2), page_size=61, h_q=64) for name in NAMED],
    dict(layout="FP8_528", extra=(70, 30, 2), extra_layout="FP4_288", lengths=[[90, 3], [70, 9]]),
    dict(layout="FP4_288", extra=(70, 30, 2), extra_layout="FP8_528"),
    dict(layout="FP8_528", extra=(70, 30, 2), extra_layout="FP8_528_F32"),
    dict(layout="FP8_528_SPLIT", extra=(70, 30, 2), extra_layout="FP4_288_SPLIT"),
    dict(layout="FP8_528_F32", extra=(70, 30, 2), extra_layout="FP4_288"),
    dict(layout=584, extra=(70, 30, 2), extra_layout="FP4_288"),
    dict(layout="FP4_288", extra=(70, 30, 2), extra_layout=584),
    dict(layout="FP8_528", extra=(70, 30, 2), extra_layout="plain"),
    dict(d=512, extra=(70, 30, 2), extra_layout="FP4_288_SPLIT"),
    dict(layout=656, extra=(70, 30, 2), extra_layout="plain"),
]


def test_what_dense_attention_reads_is_not_looked_at(kind):
    """vLLM always passes both."""
    batch = Sparse(layout=656)
    arguments = dict(batch.arguments(kind), block_table=kind.int32([[7]]), cache_seqlens=kind.int32([1, 2, 3]))
    check(kind, flash_mla_with_kvcache(**arguments), batch.expected(kind))


# ---- The plan -------------------------------------------------------------------------------------------------------


def test_metadata_is_filled_by_the_first_call(kind):
    meta, nothing = get_mla_metadata()
    assert isinstance(meta, FlashMLASchedMeta) and nothing is None
    batch = Sparse(layout=584, b=3, page_size=32, extra=(70, 30, 2))
    flash_mla_with_kvcache(**dict(batch.arguments(kind), tile_scheduler_metadata=meta))
    assert meta.config == (3, 2, 4, 32, 1, False, True, 90, 2, 70)
    assert tuple(meta.tile_scheduler_metadata.shape)[1:] == (8,) and tuple(meta.num_splits.shape) == (4,)


def test_partitions_are_those_of_any_batch(kind, monkeypatch):
    """Partitions depend on lists and heads, on Hopper too, never on the number of requests: SGLang copies tables of a small batch
    into those of the largest."""
    asked, ask = [], _operations.library.fmla_sparse_plan_partitions

    def recorded(address, count):
        args = ARGUMENTS["sparse_plan"].from_address(address)
        asked.append((args.b, args.topk, args.extra_topk, args.s_q, args.h_q))
        return ask(address, count)

    monkeypatch.setattr(_operations.library, "fmla_sparse_plan_partitions", recorded)
    batch = Sparse(layout=584, b=3, extra=(70, 30, 2))
    flash_mla_with_kvcache(**dict(batch.arguments(kind), tile_scheduler_metadata=get_mla_metadata()[0]))
    get_mla_metadata(kind.int32([0, 0]), 2 * 4, 1, num_heads_q=4, is_fp8_kvcache=True, topk=90)
    assert asked == [(0, 90, 70, 2, 4), (0, 90, 0, 2, 4)]


def test_metadata_of_the_older_generation(kind):
    """Makes vLLM's call for DeepSeek-V3.2."""
    batch = Sparse(layout=656)
    lengths = kind.int32([1000, 2000])
    meta, num_splits = get_mla_metadata(lengths, 2 * 4 // 1, 1, num_heads_q=4, is_fp8_kvcache=True, topk=90)
    arguments = dict(batch.arguments(kind), tile_scheduler_metadata=meta, num_splits=num_splits)
    check(kind, flash_mla_with_kvcache(**arguments), batch.expected(kind))
    if kind.is_torch:  # called as in the newer generation
        arguments["num_splits"] = None
        check(kind, flash_mla_with_kvcache(**arguments), batch.expected(kind))
