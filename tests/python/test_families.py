# SPDX-License-Identifier: MIT
"""Tests common to every kind of attention: dense decode, sparse decode and sparse prefill, over keys of every format."""

import ctypes
import math
import re

import numpy
import pytest

import flash_mla
from attention import Batch, BatchFp8, check_decode, check_fp8, strided
from caches import D_QK
from calls import kinds_for
from flash_mla import _library, _operations, flash_mla_with_kvcache, get_mla_metadata, merge_states
from flash_mla._operations import DECODE, DECODE_FP8, MHA
import test_decode
import test_decode_fp8
import test_mha
import test_sparse
import test_sparse_prefill
from kinds import BF16_KINDS, KINDS, WORDS, Capsuled, Kind, ml_dtypes, torch
from test_errors import refused
from test_mha import MHA_KINDS, Sequences
from test_merge import Parts
from test_merge import check as check_merge
from test_sparse import Sparse
from test_sparse import check as check_sparse
from test_sparse_prefill import Prefill
from test_sparse_prefill import call as call_prefill
from test_sparse_prefill import check as check_prefill


class Family:
    """Problems of one kind; `shape`: that of the default problem. Each has a sink or None; those over bytes have a layout."""

    def __init__(self, make, shape, call, check, kinds):
        self.of, self.shape, self.call, self.check, self.kinds = make, shape, call, check, kinds
        self.function = FUNCTIONS[make]
        self.is_decode = self.function in (DECODE, DECODE_FP8)
        self.is_dense_decode = issubclass(make, Batch)

    def make(self, **changed):
        return self.of(**{**self.shape, **changed})

    def arguments(self, kind, problem):
        return {**problem.arguments(kind), **with_sink(kind, problem)}

    def inputs(self, problem):
        return {**problem.inputs(), **({} if problem.sink is None else {"attn_sink": (problem.sink, "float32")})}

    def check_call(self, kind, problem, arguments, **options):
        return self.check_call_of(kind, kind, problem, {**arguments, **options})

    def check_call_of(self, kind, given, problem, arguments):
        """`kind`: that of the results, if it differs from that of `given`."""
        got = self.call(given, arguments)
        self.check(kind, got, problem.expected(kind, sink=problem.sink))
        return got


FUNCTIONS = {Batch: DECODE, BatchFp8: DECODE_FP8, Sparse: DECODE}
FUNCTIONS.update({Prefill: "flash_mla_sparse_fwd", Sequences: MHA, Parts: "merge_states"})


def with_sink(kind, problem):
    return {} if problem.sink is None else {"attn_sink": kind.fp32(problem.sink)}


def new_results(kind, problem, value):
    return {name: kind.full(shape, value, *form) for name, (shape, *form) in problem.results().items()}


def call_plainly(function):
    return lambda kind, arguments: function(**arguments)


call_decode = call_plainly(flash_mla_with_kvcache)
CPU_BF16_KINDS = [kind for kind in BF16_KINDS if kind.device == "cpu"]  # Hopper's kernel refuses some of the following
OF_SPARSE = call_decode, check_sparse, KINDS
OF_PREFILL = call_prefill, check_prefill, BF16_KINDS
TWICE = dict(extra=(70, 30, 2), lengths=[[90, 60], [70, 3]])
FAMILIES = {
    "dense": Family(Batch, dict(lengths=[100, 3, 64], s_q=2), call_decode, check_decode, KINDS),
    **{
        f"dense-{layout}": Family(
            Batch,
            dict(lengths=[100, 3, 64], s_q=2, layout=layout, **more),
            *(call_decode, check_decode, kinds_for("dense_decode", KINDS, layout)),
        )
        for layout, more in ((656, {}), (584, {}), (576, dict(kv_scale=test_decode.KV_SCALES[1])))
    },
    **{
        f"dense-fp8{name}": Family(
            BatchFp8, dict(lengths=[100, 3, 64], s_q=2, **way), test_decode_fp8.call, check_fp8, CPU_BF16_KINDS
        )
        for name, way in (("", test_decode_fp8.WAYS[1]), ("-656", dict(codes=False, layout=656)))
    },
    "sparse": Family(Sparse, dict(layout="plain", lengths=[[90, 60]]), *OF_SPARSE),
    "sparse-656": Family(Sparse, dict(layout=656, lengths=[[90, 60]]), *OF_SPARSE),
    "sparse-584-twice": Family(Sparse, dict(layout=584, **TWICE), *OF_SPARSE),
    "prefill": Family(Prefill, dict(h_q=6, h_kv=2), *OF_PREFILL),
    "prefill-pages": Family(Prefill, dict(pages=(5, 64), lengths=[0, 90, 3, 64, 65]), *OF_PREFILL),
    "prefill-656": Family(Prefill, dict(layout=656, pages=(5, 64)), *OF_PREFILL),
    "mha": Family(Sequences, dict(lengths=[(5, 7), (4, 3), (3, 70)]), test_mha.call, test_mha.check, MHA_KINDS),
    "merge": Family(Parts, dict(), call_plainly(merge_states), check_merge, KINDS),
}


def of(where=lambda kind: True, **tests):
    """Parametrises by family and kind of array, `where` the test applies; `tests`: an argument's name, and a function from a
    family to its values."""
    ((argument, values),) = tests.items()
    parameters = [
        pytest.param(family, kind, value, id=f"{name}-{kind}" + ("" if value is None else f"-{value}"))
        for name, family in FAMILIES.items()
        for kind in filter(where, family.kinds)
        for value in values(family)
    ]
    return pytest.mark.parametrize(f"family,kind,{argument}", parameters)


def decodes(*values):
    return lambda family: values if family.is_decode else []


def all_results(family):
    return list(family.make().results())


def all_arrays(family):
    return [*family.inputs(family.make()), *all_results(family), "all"]


# ---- Values -----------------------------------------------------------------------------------------------------------

SHAPES = {"dense": test_decode.SHAPES, "sparse": test_sparse.SHAPES, "prefill": test_sparse_prefill.SHAPES}
SHAPES["mha"] = test_mha.SHAPES
for layout in D_QK:
    SHAPES[f"dense-{layout}"] = [dict(shape, layout=layout) for shape in test_decode.SHAPES_OF_BYTES]
SHAPES["dense-576"] += [
    dict(shape, layout=576, kv_scale=scale) for shape in test_decode.SHAPES_OF_BYTES for scale in test_decode.KV_SCALES
]


@pytest.mark.parametrize(
    "family,kind,shape",
    [
        pytest.param(FAMILIES[name], kind, shape, id=f"{name}-{kind}-{str(shape)[:80]}")
        for name, shapes in SHAPES.items()
        for kind in FAMILIES[name].kinds
        for shape in shapes
    ],
)
def test_values(family, kind, shape):
    """Tests a plan made in the call and before it, with and without a sink."""
    causal = dict(causal=True) if "causal" in shape else {}
    problem = family.of(**{name: value for name, value in shape.items() if name != "causal"})
    for meta in (None, get_mla_metadata()[0]) if family.is_decode else (None,):
        arguments = {**problem.arguments(kind), **causal, **({"tile_scheduler_metadata": meta} if meta else {})}
        family.check(kind, family.call(kind, arguments), problem.expected(kind, **causal))
    arguments.update(with_sink(kind, problem))
    family.check(kind, family.call(kind, arguments), problem.expected(kind, sink=problem.sink, **causal))


# ---- What stays ---------------------------------------------------------------------------------------------------------


def large(family):
    """Returns a shape that needs several threads or splits."""
    if family.is_dense_decode:
        return dict(lengths=[500, 64, 0, 70], h_q=16)
    if family.of is Sequences:
        return dict(lengths=[(300, 300), (1, 500), (0, 5), (70, 9)], h_q=16)
    if family.check is check_sparse:
        return dict(h_q=16, topk=700, lengths=[[700, 65], [70, 0]])
    return dict(n=17, d_v=512) if family.check is check_merge else dict(h_q=64, s_q=20, topk=200, lengths=None)


@of(size=lambda family: ["small", "large"])
def test_the_same_call_gives_the_same_bits_and_writes_only_its_results(family, kind, size):
    problem = family.make(**large(family) if size == "large" else {})
    arguments = family.arguments(kind, problem)

    def held():
        return {name: kind.bits(array) for name, array in arguments.items() if kind.is_one(array)}

    before, first = held(), kind.all_bits(family.check_call(kind, problem, arguments))
    for _ in range(3):
        assert kind.all_bits(family.call(kind, arguments)) == first
    assert held() == before and before.keys() == family.inputs(problem).keys()


SCALES = {
    **dict.fromkeys((DECODE, DECODE_FP8), [0.02, 1.0, -0.1, 3]),
    "flash_mla_sparse_fwd": [0.02, -0.1],
    MHA: [0.02, 1.0, -0.1],
}


@of(scale=lambda family: SCALES.get(family.function, []))
def test_scale(family, kind, scale):
    problem = family.make()
    name = "sm_scale" if family.of is Prefill else "softmax_scale"
    got = family.call(kind, {**problem.arguments(kind), name: scale})
    family.check(kind, got, problem.expected(kind, scale=scale))


# Rows that see no key, for every possible reason.
EMPTY = {
    **dict.fromkeys((Batch, BatchFp8), dict(lengths=[70, 0, 2], s_q=4)),
    Sparse: dict(lengths=[[0, 60], [0, 3]]),
    Prefill: dict(lengths=[0, 90, -3, 64, 65]),
    Sequences: dict(lengths=[(5, 7), (4, 0), (70, 3)]),
    Parts: {},
}


@of(lse_empty=lambda family: [math.inf, -math.inf])
@pytest.mark.parametrize("log_base", [math.e, 2])
@pytest.mark.parametrize("more", [False, True], ids=["plain", "more"])
def test_conventions(family, kind, lse_empty, log_base, more):
    """`more`: a sink, a negative scale, a mask, and passed results."""
    problem = family.make(**EMPTY[family.of])
    options, arguments, given = dict(lse_empty=lse_empty, log_base=log_base), problem.arguments(kind), {}
    if more:
        given = new_results(kind, problem, 7)
        if problem.sink is not None:
            problem.sink[1], problem.sink[3] = math.inf, -math.inf
        arguments.update(given, **with_sink(kind, problem))
        options["sink"] = problem.sink
        if family.function in SCALES:
            arguments["sm_scale" if family.of is Prefill else "softmax_scale"] = options["scale"] = -0.3
        if family.is_decode:
            arguments["batch_invariant"] = True
        if family.is_dense_decode or family.of is Sequences:
            arguments["causal"] = options["causal"] = True
    got, expected = family.call(kind, {**arguments, "lse_empty": lse_empty, "log_base": log_base}), problem.expected(
        kind, **options
    )
    assert numpy.any(expected[-1] == lse_empty)
    family.check(kind, got, expected)
    assert all(array is mine for array, mine in zip(got, given.values()))


@of(nothing=decodes(None))
def test_metadata_serves_every_layer(family, kind, nothing):
    """Metadata depends only on lengths and shapes, not on values, the cache or the head size."""
    meta, _ = get_mla_metadata()
    for seed in range(3):
        problem = family.make(
            h_q=16, seed=seed, **(dict(d=[576, 576, 512][seed]) if family is FAMILIES["dense"] else {})
        )
        family.check_call(kind, problem, family.arguments(kind, problem), tile_scheduler_metadata=meta)


@of(nothing=decodes(None))
def test_first_call_with_metadata_has_the_bits_of_later_ones(family, kind, nothing):
    """Dense decode also has them without metadata (docs/semantics.md, "The same bits")."""
    meta, _ = get_mla_metadata()
    arguments = family.arguments(kind, family.make())
    first, later, without = (
        kind.all_bits(family.call(kind, {**arguments, "tile_scheduler_metadata": given}))
        for given in (meta, meta, None)
    )
    assert first == later
    assert not family.is_dense_decode or without == first


def of_decode(family):
    return [None] if family.function == DECODE else []


@of(nothing=of_decode)
def test_is_fp8_kvcache_is_what_the_cache_has(family, kind, nothing):
    """Omits the argument, whose default FlashMLA changed from False to True in September 2026."""
    problem, (meta, _), (other, _) = family.make(), get_mla_metadata(), get_mla_metadata()
    arguments = family.arguments(kind, problem)
    said = arguments.pop("is_fp8_kvcache")
    got = family.check_call(kind, problem, arguments, tile_scheduler_metadata=meta)
    expected = family.call(kind, dict(arguments, is_fp8_kvcache=said, tile_scheduler_metadata=other))
    assert kind.all_bits(got) == kind.all_bits(expected)
    assert meta.config == other.config and meta.config.is_fp8_kvcache is said
    with pytest.raises(ValueError, match="k_cache: " if not said else "is_fp8_kvcache: is False"):
        family.call(kind, dict(arguments, is_fp8_kvcache=not said))
    with pytest.raises(ValueError, match="k_cache: "):  # a named format does not apply to another cache
        family.call(kind, dict(arguments, kv_format=NAMES[kind.element] if said else "FP8_656"))


NAMES = {"bfloat16": "BF16", "float16": "FP16"}


@of(type_=lambda family: ["int8", "float8_e4m3fn"] if getattr(family.make(), "layout", "plain") != "plain" else [])
def test_cache_of_every_type_of_bytes(family, kind, type_):
    library = torch if kind.is_torch else numpy if type_ == "int8" else ml_dtypes
    if library is None:
        pytest.skip("no library has this type")
    arguments = family.arguments(kind, family.make())
    expected = kind.all_bits(family.call(kind, arguments))
    of_bytes = [name for name, array in arguments.items() if str(getattr(array, "dtype", "")).endswith("uint8")]
    if family.function == DECODE:
        del arguments["is_fp8_kvcache"]
    for changed in (*[[name] for name in of_bytes], of_bytes):
        views = {name: arguments[name].view(getattr(library, type_)) for name in changed}
        assert kind.all_bits(family.call(kind, {**arguments, **views})) == expected


FIELDS = {
    "b": "q.shape[0]",
    "s_q": "q.shape[1]",
    "h_q": "q.shape[2]",
    "page_block_size": "k_cache.shape[1]",
    "h_k": "k_cache.shape[2]",
    "causal": "causal",
    "is_fp8_kvcache": "is_fp8_kvcache",
    "topk": "indices.shape[-1]",
    "extra_page_block_size": "extra_k_cache.shape[1]",
    "extra_topk": "extra_indices_in_kvcache.shape[-1]",
}


@of(field=decodes(*FIELDS))
def test_metadata_of_another_call_is_refused(family, kind, field):
    problem, (meta, _) = family.make(), get_mla_metadata()
    arguments = dict(family.arguments(kind, problem), tile_scheduler_metadata=meta)
    family.call(kind, arguments)
    filled = meta.config
    meta.config = filled._replace(**{field: not getattr(filled, field) if field in ("causal", "is_fp8_kvcache") else 9})
    with pytest.raises(ValueError) as caught:
        family.call(kind, arguments)
    assert re.match(
        rf"{family.function}: tile_scheduler_metadata: .* {re.escape(FIELDS[field])} is ", str(caught.value)
    )
    meta.config = filled
    family.check_call(kind, problem, arguments)  # the metadata still serves the calls it was filled for


@of(nothing=decodes(None))
def test_batch_invariant(family, kind, nothing):
    """A request has the same bits alone, anywhere in a batch, and beside longer and shorter requests."""
    if family.of is Sparse:
        lengths = [[700, 64, 0, 129], [70, 3, 0, -1]]
        problem = family.make(b=4, h_q=16, topk=700, extra=(70, 30, 2), lengths=lengths)
    else:
        problem = family.make(lengths=[1500, 64, 0, 700, 129], h_q=16, seed=1)
    arguments = dict(family.arguments(kind, problem), batch_invariant=True)
    of_requests = {name for name, (values, _) in problem.inputs().items() if len(values) == problem.b} - {"k_cache"}
    whole = family.check_call(kind, problem, arguments)
    for chosen in [*([r] for r in range(problem.b)), [3, 0], list(range(problem.b))[::-1]]:
        some = {name: kind.array(problem.inputs()[name][0][chosen], problem.inputs()[name][1]) for name in of_requests}
        got = family.call(kind, {**arguments, **some})
        for place, request in enumerate(chosen):
            for array, of_whole in zip(got, whole):
                assert kind.bits(array[place]) == kind.bits(of_whole[request]), f"request {request} of {chosen}"


@of(nothing=decodes(None))
def test_lengths_that_change_in_place_after_metadata_was_filled(family, kind, nothing):
    """On the CPU results stay right; on a GPU new lengths need a new plan (docs/semantics.md)."""
    lengths = [300, 20, 65, 140]
    problem, name = family.make(lengths=lengths, h_q=16) if family.is_dense_decode else None, "cache_seqlens"
    if problem is None:
        extra = [[70, 3, 0, -1]] if "extra" in family.shape else []
        problem, name = family.make(b=4, h_q=16, topk=300, lengths=[lengths, *extra]), "topk_length"
    arguments, (meta, _) = problem.arguments(kind), get_mla_metadata()
    for now in (lengths, [1, 20, 0, 64], [300, 0, 65, 139], [0, 0, 0, 0], lengths):
        arguments[name][:] = kind.int32(now)
        got = family.call(kind, dict(arguments, tile_scheduler_metadata=meta))
        family.check(kind, got, problem.expected(kind, lengths=now))
        if kind.device != "cpu":
            meta, _ = get_mla_metadata()


@of(planned=decodes(False, True))
def test_no_requests(family, kind, planned):
    nothing = dict(lengths=[]) if family.is_dense_decode else dict(b=0, lengths=None)
    meta = get_mla_metadata()[0] if planned else None
    out, lse = family.call(kind, dict(family.make(**nothing).arguments(kind), tile_scheduler_metadata=meta))
    assert tuple(out.shape) == (0, 2, 4, 512) and tuple(lse.shape) == (0, 4, 2)
    assert (kind.dtype_name(out), kind.dtype_name(lse)) == (kind.element, "float32")


# ---- What arrays cannot be ----------------------------------------------------------------------------------------------

UNFIT = {
    "in the other byte order": (ValueError, lambda array: array.astype(array.dtype.newbyteorder("S"))),
    "backwards": (ValueError, lambda array: array[::-1]),
    "of strides that are no elements": (ValueError, lambda array: field_of_records(array)),
    "masked": (TypeError, lambda array: numpy.ma.masked_array(array, mask=False)),
    "without DLPack": (TypeError, lambda array: memoryview(b"bytes")),
    "on a GPU": (ValueError, lambda array: on_gpu(array)),
    "on a GPU, planned before": (ValueError, lambda array: on_gpu(array)),
}
SAID = {"masked": "whose mask no kernel reads", "without DLPack": "is memoryview"}
CODES = {"uint8": (1, 8), "int32": (0, 32), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16)}


def field_of_records(array):
    """Returns a field whose elements are an odd number of bytes apart."""
    return numpy.zeros(array.shape, [("value", array.dtype), ("bytes", "u1", 3)])["value"]


def on_gpu(array):
    """An array that claims to be on the first GPU. It has no memory, so nothing may read it."""
    memory = getattr(array, "words", array)
    strides = [stride // memory.itemsize for stride in memory.strides]
    return Capsuled(4096, array.shape, *CODES[str(array.dtype)], device=(2, 0), strides=strides)


def all_given(family, kind, problem):
    return {**family.arguments(kind, problem), **new_results(kind, problem, 7)}


@of(lambda kind: not kind.is_torch, which=lambda family: all_arrays(family)[:-1])
@pytest.mark.parametrize("how", UNFIT)
def test_array_that_is_unfit(family, kind, which, how):
    """An unsuitable NumPy array among valid ones is refused by its name."""
    if which in ("q", "out_parts") and "GPU" in how:
        pytest.skip("it says where the others have to be")
    problem = family.make()
    arguments = all_given(family, kind, problem)
    exception, change = UNFIT[how]
    if not isinstance(arguments[which], numpy.ndarray) and how != "on a GPU":
        pytest.skip("NumPy has no such type")
    if "byte order" in how and (arguments[which].itemsize == 1 or str(arguments[which].dtype) == "bfloat16"):
        pytest.skip("of one order")
    if "planned" in how:
        if family.check is not check_sparse:
            pytest.skip("of sparse decode, which plans beside q")
        arguments["tile_scheduler_metadata"] = get_mla_metadata()[0]
    arguments[which] = change(arguments[which])
    if how == "backwards" and len(arguments[which]) == 1:
        pytest.skip("one element has no order")
    if how == "of strides that are no elements" and problem.inputs().get(which, (0, 0))[1] == "uint8":
        pytest.skip("every byte is an element")
    with refused(exception, family.function, which) as caught:
        family.call(kind, arguments)
    said = "device is cuda:0, must be cpu" + " as in q" * (family.check in (check_sparse, check_prefill))
    assert (said if "GPU" in how else SAID.get(how, "")) in str(caught.value)


@of(lambda kind: kind.is_torch, which=lambda family: all_arrays(family)[1:-1])
def test_arrays_that_are_not_of_q_s_kind(family, kind, which):
    """Mixes NumPy arrays with tensors, and tensors of the CPU with those of a GPU."""
    problem = family.make()
    arguments, others, metas = all_given(family, kind, problem), [], [None]
    if family.check is check_sparse:
        metas.append(get_mla_metadata()[0])  # makes a plan on q's device before anything else is checked
    if kind.element == "float16" and kind.device == "cpu":
        others.append((TypeError, all_given(family, Kind("numpy", "float16"), problem)[which]))
    if torch.cuda.is_available():
        others.append((ValueError, arguments[which].to("cuda" if kind.device == "cpu" else "cpu")))
    for exception, other in others:
        for meta in metas:
            planned = {} if meta is None else {"tile_scheduler_metadata": meta}
            with refused(exception, family.function, which) as caught:
                family.call(kind, {**arguments, **planned, which: other})
            assert exception is TypeError or re.search(
                "device is (cpu|cuda:0), must be (cuda:0|cpu)", str(caught.value)
            )


# ---- Where arrays lie ---------------------------------------------------------------------------------------------------


@of(which=lambda family: [*all_results(family), "all"])
def test_given_results(family, kind, which):
    if kind is WORDS and which != "all":
        pytest.skip("it makes no results")
    problem = family.make()
    given = new_results(kind, problem, math.nan)
    given = given if which == "all" else {which: given[which]}
    got = family.check_call(kind, problem, family.arguments(kind, problem), **given)
    for name, array in zip(all_results(family), got):
        assert given.get(name, array) is array


@of(which=all_arrays)
def test_strides(family, kind, which):
    """Arrays are parts of larger ones, whose rest is neither read nor changed. Pages of bytes stay contiguous."""
    problem = family.make()
    arguments = {**family.arguments(kind, problem), **new_results(kind, problem, math.nan)}
    parts, large = {}, {}
    for name, (values, dtype) in family.inputs(problem).items():
        if dtype == "uint8":
            spaced = numpy.full((2 * len(values) + 1, *values.shape[1:]), 255, numpy.uint8)
            spaced[1::2] = values
            parts[name] = kind.array(spaced, dtype)[1::2]
        else:
            parts[name] = strided(kind, values, dtype)
    for name, (shape, dtype, *order) in problem.results().items():
        turn = -1 if order else 1  # the first dimension is the innermost
        *outer, inner = shape[::turn]
        large[name] = kind.full([*(2 * size + 1 for size in outer), inner + 24][::turn], 7, dtype, *order)
        parts[name] = large[name][(*[slice(1, None, 2)] * len(outer), slice(8, inner + 8))[::turn]]
    used = parts if which == "all" else {which: parts[which]}
    got = family.check_call(kind, problem, {**arguments, **used})
    for (name, array), result in zip(large.items(), got):
        assert result is {**arguments, **used}[name]
        size = kind.float64(parts[name]).size
        assert numpy.sum(kind.float64(array) != 7) == (size if name in used else 0)


@of(which=lambda family: [name for name, (_, dtype) in family.make().inputs().items() if dtype is None])
def test_inputs_that_start_anywhere(family, kind, which):
    """Alignment to an element is enough: no address here is a multiple of 16 bytes."""
    problem = family.make()
    values = problem.inputs()[which][0]
    large = numpy.full((*values.shape[:-1], values.shape[-1] + 5), math.nan)
    large[..., 3:-2] = values
    family.check_call(kind, problem, family.arguments(kind, problem), **{which: kind.array(large)[..., 3:-2]})


# ---- The kernel -----------------------------------------------------------------------------------------------------


def kernels_asked(operation, monkeypatch):
    """Returns a list to which each later call adds the name of the kernel that the library chooses."""
    names, launch = [], operation.launch
    which = getattr(_library.library, f"fmla_{operation.name}_kernel")

    def ask(address):
        name = ctypes.c_char_p()
        assert not which(ctypes.c_void_p(address), ctypes.byref(name))
        names.append(name.value.decode())
        return launch(address)

    monkeypatch.setattr(operation, "launch", ask)
    return names


KERNELS = {  # changes of a shape, and whether Hopper's own kernel supports it
    "sparse": [({}, True), (dict(layout=584, page_size=1, pages=50), False)],  # 584 is not a multiple of 16
    "sparse-656": [({}, True), (dict(h_q=128, topk=300, extra=(70, 30, 2)), True)],
    "sparse-584-twice": [(dict(extra=None), True)],
    "prefill": [({}, None)],
    "prefill-656": [({}, None), (dict(layout=584, pages=(5, 1)), None)],
}


@of(case=lambda family: KERNELS.get(next(name for name, f in FAMILIES.items() if f is family), []))
def test_kernel(family, kind, case, monkeypatch):
    """The kernel is among the device's capabilities; it is Hopper's own if that takes the call."""
    (changed, hopper), operation = case, _operations.SPARSE_DECODE if family.is_decode else _operations.SPARSE_PREFILL
    rows = [row for row in flash_mla.capabilities(kind.device) if row["operation"] == operation.name]
    available = {row["kernel"] for row in rows if row["available"] and not row["forced_only"]}
    problem, names = family.make(**changed, lengths=None), kernels_asked(operation, monkeypatch)
    family.check(kind, family.call(kind, problem.arguments(kind)), problem.expected(kind))
    name = names[-1]  # the library was queried twice if a previous call had these addresses and a smaller workspace
    assert set(names) == {name} <= available
    if kind.device != "cpu" and family.is_decode:
        assert {"cuda"} <= available <= {"cuda", "cuda-sm80", "cuda-sm90"}
        takes = kind.element == "bfloat16" or problem.layout == "plain"  # caches of codes need bfloat16 queries
        fast = hopper and takes and "cuda-sm90" in available
        assert name == ("cuda-sm90" if fast else "cuda-sm80" if takes else "cuda")
        assert "cuda-sm90" not in available or torch.cuda.get_device_capability() == (9, 0)
