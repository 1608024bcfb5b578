# SPDX-License-Identifier: MIT
"""Tests cache_append and cache_gather against the formats of docs/semantics.md, in NumPy; and their arguments."""

import numpy
import pytest

from caches import NAMED, nearest_bf16, nearest_e4m3
from calls import Call
from flash_mla import cache_append, cache_convert, cache_gather
from flash_mla._types import Format
from kinds import each_torch_kind, kind, torch

TOKENS, PAGES, PAGE_SIZE, SCALE = 7, 3, 4, 0.25
SLOTS = [11, 0, -1, 4, 7, 2, 9]
BYTES = {name: int(name.split("_")[1]) for name in Format.__members__ if name.startswith("FP") and "_" in name}
FORMATS = ["BF16", "FP16", *BYTES]
# The number of e4m3 values, and how many share a scale.
GROUPS = {"FP8_656": (512, 128), "FP8_584": (448, 64)}
GROUPS.update({name: (512, share) for name, (_, _, share, _) in NAMED.items() if name.startswith("FP8")})


def d_qk(kv_format):
    return 512 if kv_format == "FP8_584" or "28" in kv_format else 576


def scale_of(kv_format):
    return SCALE if kv_format == "FP8_576" else 0.0


def vectors(kv_format, tokens=TOKENS):
    """Draws small multiples of powers of two, which bf16 and fp16 represent exactly."""
    random = numpy.random.default_rng(5)
    size = 2.0 ** random.integers(-6, 4, (tokens, d_qk(kv_format) // 64)).repeat(64, axis=1)
    return (random.integers(-120, 121, (tokens, d_qk(kv_format))) / 8 * size).astype(numpy.float32)


def new_cache(kind, kv_format, fill=60, size=576):
    if kv_format in BYTES:
        return kind.array(numpy.full((PAGES, PAGE_SIZE, 1, BYTES[kv_format]), fill), "uint8")
    dtype = {"BF16": "bfloat16", "FP16": "float16"}[kv_format]
    if not kind.is_torch and dtype == "bfloat16" and kind.element != dtype:
        pytest.skip("NumPy has no bf16")
    return kind.array(numpy.full((PAGES, PAGE_SIZE, 1, size), 1.0), dtype)


def to_e2m1(x):
    """Returns the values of e2m1 nearest to x, ties to even: steps of 0.5 below 2, of 1 below 4, of 2 above."""
    magnitude = numpy.minimum(numpy.abs(x), 6.0)
    step = numpy.where(magnitude < 2, 0.5, numpy.where(magnitude < 4, 1.0, 2.0))
    return numpy.sign(x) * numpy.round(magnitude / step) * step


def kept(kv_format, values):
    """Returns the values as a cache of the format stores them."""
    values = values.astype(numpy.float64)
    if kv_format in ("BF16", "FP16"):
        return values
    if kv_format == "FP8_576":
        return nearest_e4m3(values / SCALE) * SCALE
    if kv_format.startswith("FP4"):
        groups = values.reshape(len(values), -1, 16)
        scale = nearest_e4m3(numpy.clip(numpy.abs(groups).max(-1, keepdims=True) / 6, 2.0**-9, 448))
        return (to_e2m1(groups / scale) * scale).reshape(values.shape)
    nope, group = GROUPS[kv_format]
    groups = values[:, :nope].reshape(len(values), -1, group)
    amax = numpy.abs(groups).max(-1, keepdims=True)
    scale = 2.0 ** numpy.ceil(numpy.log2(numpy.maximum(amax / 448, 1e-4)))
    return numpy.concatenate(
        [(nearest_e4m3(groups / scale) * scale).reshape(len(values), nope), values[:, nope:]], axis=1
    )


def append(kind, kv_format, cache, apart, values):
    whole = kind.array(values)
    latent, rope = (whole[:, :-64], whole[:, -64:]) if apart else (whole, None)
    cache_append(latent, rope, cache, kind.array(SLOTS, "int64"), kv_format, cache_scale=scale_of(kv_format))


def expected(kv_format, values):
    rows = kept(kv_format, values)
    rows[[slot < 0 for slot in SLOTS]] = 0
    return rows


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("apart", [False, True])
def test_what_was_appended_is_gathered(kind, kv_format, apart):
    cache, values = new_cache(kind, kv_format), vectors(kv_format)
    append(kind, kv_format, cache, apart, values)
    slots = kind.array(SLOTS, "int64")
    out = kind.full((TOKENS, d_qk(kv_format)), 9, "float32")
    options = {"cache_scale": scale_of(kv_format)}
    assert cache_gather(cache, slots, kv_format, out=out, **options) is out
    assert numpy.array_equal(kind.float64(out), expected(kv_format, values))
    made = cache_gather(cache, slots, kv_format, **options)
    assert kind.is_one(made) and tuple(made.shape) == (TOKENS, d_qk(kv_format))
    assert numpy.array_equal(kind.float64(made), expected(kv_format, values))
    wide = "bfloat16" if kind.is_torch else "float32"
    assert kind.dtype_name(made) == (wide if kv_format in BYTES else kind.dtype_name(cache))


def rounded(x, element):
    """Rounds fp32 values to a type."""
    if element in ("bfloat16", "BF16"):
        return nearest_bf16(x)
    return x.astype(numpy.float16).astype(numpy.float32) if element in ("float16", "FP16") else x


def normed(kind, x, weight, eps):
    """Computes the RMS norm of the first 512 values: the mean in double, its factor and two products in fp32."""
    mean = (x[:, :512].astype(numpy.float64) ** 2).mean(axis=1, keepdims=True)
    factor = (1 / numpy.sqrt(mean + numpy.float64(numpy.float32(eps)))).astype(numpy.float32)
    return numpy.concatenate([rounded(x[:, :512] * factor * weight, kind.element), x[:, 512:]], axis=1)


def turned(kind, x, rows, pairs):
    """Applies RoPE to the last 64 values, in fp32."""
    cosine, sine = rows[:, :32], rows[:, 32:]
    last = x[:, -64:]
    a, b = (last[:, ::2], last[:, 1::2]) if pairs == "interleaved" else (last[:, :32], last[:, 32:])
    a, b = rounded(a * cosine - b * sine, kind.element), rounded(b * cosine + a * sine, kind.element)
    order = numpy.stack([a, b], axis=-1).reshape(last.shape) if pairs == "interleaved" else numpy.hstack([a, b])
    return numpy.concatenate([x[:, :-64], order], axis=1)


def rope_table(positions, base=1e4):
    angle = numpy.arange(positions)[:, None] * base ** (-numpy.arange(32) / 32)
    return numpy.hstack([numpy.cos(angle), numpy.sin(angle)]).astype(numpy.float32)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("pairs", [None, "interleaved", "halves"])
def test_norm_and_rope(kind, kv_format, norm, pairs):
    """One pass gives the results of three steps."""
    if not norm and not pairs:
        return
    cache, x = new_cache(kind, kv_format), vectors(kv_format)
    x = rounded(x, kind.element)
    random, table = numpy.random.default_rng(7), rope_table(40)
    weight = rounded(random.normal(1, 0.3, 512).astype(numpy.float32), kind.element)
    positions = [3, 39, 10**6, 0, 3, 17, 8]  # arbitrary for a skipped token
    options = {"cache_scale": scale_of(kv_format)}
    if norm:
        options.update(norm_weight=kind.array(weight), norm_eps=1e-5)
    if pairs:
        dtype = "int64" if d_qk(kv_format) == 576 else "int32"
        options.update(
            positions=kind.array(positions, dtype), rope_table=kind.array(table, "float32"), rope_pairs=pairs
        )
    whole = kind.array(x)
    cache_append(whole[:, :-64], whole[:, -64:], cache, kind.array(SLOTS, "int64"), kv_format, **options)
    x = normed(kind, x, weight, 1e-5) if norm else x
    x = turned(kind, x, table[numpy.minimum(positions, 39)], pairs) if pairs else x
    x = rounded(x, kv_format)  # a cache of values has their type
    got = cache_gather(
        cache,
        kind.array(SLOTS, "int64"),
        kv_format,
        out=kind.full(x.shape, 9, "float32"),
        cache_scale=scale_of(kv_format),
    )
    wanted = expected(kv_format, x)
    if kv_format in GROUPS and d_qk(kv_format) > GROUPS[kv_format][0] or kv_format == "FP8_584":
        wanted[:, -64:] = nearest_bf16(wanted[:, -64:])
    assert numpy.array_equal(kind.float64(got), wanted)


def test_other_slots_stay(kind):
    cache = new_cache(kind, "FP8_656")
    append(kind, "FP8_656", cache, True, vectors("FP8_656"))
    rows = kind.float64(cache).reshape(PAGES * PAGE_SIZE, 656)
    others = [slot for slot in range(PAGES * PAGE_SIZE) if slot not in SLOTS]
    assert (rows[others] == 60).all() and (rows[11] != 60).any()


@pytest.mark.parametrize("kv_format", list(BYTES))
def test_no_slot_is_a_row_of_zeros(kind, kv_format):
    cache = new_cache(kind, kv_format)
    slots = kind.array([-1, 12, -7, 2**40, 3], "int64")
    rows = kind.float64(cache_gather(cache, slots, kv_format, cache_scale=scale_of(kv_format)))
    assert (rows[:4] == 0).all() and (rows[4] != 0).all()


@each_torch_kind
def test_torch_types_of_one_byte(kind):
    values = vectors("FP8_656")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        cache = new_cache(kind, "FP8_656").view(dtype)
        append(kind, "FP8_656", cache, True, values)
        made = cache_gather(cache, kind.array(SLOTS, "int64"), "FP8_656")
        assert numpy.array_equal(kind.float64(made), expected("FP8_656", values))


@pytest.mark.parametrize("step", [1, 3])
def test_slots_of_32_bits(kind, step):
    """Some libraries make only 32-bit slots by default. Unlike int64 slots, they need not be contiguous."""
    values = kind.array(vectors("FP8_656"))
    caches = [new_cache(kind, "FP8_656") for _ in range(2)]
    wide = kind.array(SLOTS, "int64")
    narrow = kind.int32(numpy.repeat(numpy.array(SLOTS), step))[::step]
    cache_append(values[:, :512], values[:, 512:], caches[0], wide, "FP8_656")
    cache_append(values[:, :512], values[:, 512:], caches[1], narrow, "FP8_656")
    assert kind.bits(caches[0]) == kind.bits(caches[1])
    gathered = [cache_gather(caches[0], slots, "FP8_656") for slots in (wide, narrow)]
    assert kind.bits(gathered[0]) == kind.bits(gathered[1])


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_convert(kind, source, target):
    """The gathered values are those of the first format, stored in the second."""
    if d_qk(source) != d_qk(target) and source in BYTES and target in BYTES:
        with pytest.raises(ValueError, match="^cache_convert: dst_format: is FMLA_KV_.* with d_qk"):
            cache_convert(
                *(new_cache(kind, source), kind.array([0], "int64"), source),
                *(new_cache(kind, target), kind.array([0], "int64"), target),
            )
        return
    size = d_qk(source if source in BYTES else target)
    caches = [new_cache(kind, name, size=size) for name in (source, target)]
    scales = {"src_scale": scale_of(source), "dst_scale": scale_of(target)}
    values = vectors("FP8_528" if size == 512 else "FP8_656")
    cache_append(kind.array(values), None, caches[0], kind.array(SLOTS, "int64"), source, cache_scale=scale_of(source))
    to = [3, 5, 1, -1, 0, 8, 10]  # the third token does not exist, and the fourth has no target
    cache_convert(
        *(caches[0], kind.array(SLOTS, "int64"), source, caches[1], kind.array(to, "int64"), target),
        **scales,
    )
    out = kind.full((TOKENS, size), 9, "float32")
    cache_gather(caches[1], kind.array(to, "int64"), target, out=out, cache_scale=scale_of(target))
    wanted = kept(target, rounded(kept(source, rounded(values, source)).astype(numpy.float32), target))
    wanted[3] = 0
    got = kind.float64(out)
    rows = [0, 1, 3, 4, 5, 6]
    assert numpy.array_equal(got[rows], wanted[rows])
    assert (got[2] != wanted[2]).any()  # slot 1 was not written


@pytest.mark.parametrize(
    "argument, entries, words",
    [
        ("positions", [0, 8, 9], r"entry 2 is 9, must be in \[0, 9\), the rows of rope_table"),
        ("slot_mapping", [0, 1, 8], r"entry 2 is 8, must be -1 or in \[0, 8\)"),
    ],
)
def test_entry_that_is_none(kind, argument, entries, words):
    call = Call("cache_append-656", kind)
    call.inputs[argument] = kind.array(entries, "int64")
    if kind.device != "cpu":  # skipped
        call(**call.outputs)
        return
    with pytest.raises(ValueError, match=f"^cache_append: {argument}: {words}"):
        call(**call.outputs)


def test_norm_and_rope_that_do_not_fit(kind):
    """Arguments that belong together must be passed together."""
    call = Call("cache_append-656", kind)
    for argument, value, words in (
        ("norm_weight", None, "norm_eps: is 1e-06, must be 0 without norm_weight"),
        ("positions", None, "positions: is None, must be given with rope_table"),
        ("rope_table", None, "rope_table: is None, must be given with positions"),
        ("rope_pairs", None, "rope_pairs: is None, must be 'interleaved' or 'halves' with rope_table"),
    ):
        with pytest.raises(ValueError, match=f"^cache_append: {words}"):
            call(**call.outputs, **{argument: value})
    with pytest.raises(ValueError, match="^cache_append: rope_pairs: is 'halves', must be None without rope_table"):
        call(**call.outputs, positions=None, rope_table=None)
