# SPDX-License-Identifier: MIT
"""Tests JAX arrays: passed by DLPack, made by JAX's array API, never written visibly to JAX."""

import os
import warnings

import numpy
import pytest

from attention import Batch, check_decode
from calls import NAMES, Call
from flash_mla import cache_append, cache_gather, flash_mla_with_kvcache
from kinds import Kind
from test_cache import SLOTS, new_cache, vectors
from test_dlpack import Wrapped, check_family, each_way
from test_families import FAMILIES

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the NumPy arrays in these calls are there too
jax = pytest.importorskip("jax")
jnp = jax.numpy
KIND = Kind("numpy", "bfloat16")
BATCH = Batch([100, 0, 65, 7], s_q=2, h_q=4)


def arrays():
    return {name: jnp.asarray(array) for name, array in BATCH.arrays(KIND).items()}


def decode(given, meta=None, **options):
    return flash_mla_with_kvcache(*given.values(), 512, meta, **options)


@each_way
@pytest.mark.parametrize("name", FAMILIES)
def test_family(name, way):
    check_family(FAMILIES[name], Wrapped(jnp.asarray, numpy.asarray, "bfloat16"), way)


def test_inputs_that_are_still_computed():
    """JAX returns arrays before they are computed."""
    given = arrays()
    slow = jnp.ones((1500, 1500))
    for _ in range(5):
        slow = slow @ slow / 1500
    given["q"] = given["q"] * slow[0, 0].astype(given["q"].dtype)
    check_decode(KIND, tuple(map(numpy.asarray, decode(given))), BATCH.expected(KIND))


@pytest.mark.parametrize("name", NAMES)
def test_array_that_never_changes(name):
    call = Call(name, Wrapped(jnp.asarray, numpy.asarray, "bfloat16"))
    for argument, array in call.outputs.items():
        with pytest.raises(ValueError, match=f"^{call.name}: {argument}: is a jax.Array, which is immutable"):
            call(**{**call.given(), argument: array})


@pytest.mark.parametrize("argument", ["q", "k_cache", "cache_seqlens"])
@pytest.mark.parametrize("transform", ["jit", "vmap", "grad", "eval_shape"])
def test_tracers(transform, argument):
    given = arrays()

    def step(array):
        return decode(dict(given, **{argument: array}))[0].sum()

    array = given[argument]
    run = {
        "jit": lambda: jax.jit(step)(array),
        "vmap": lambda: jax.vmap(step)(array[None]),
        "grad": lambda: jax.grad(step)(array),
        "eval_shape": lambda: jax.eval_shape(step, array),
    }[transform]
    if transform == "grad" and argument == "cache_seqlens":
        pytest.skip("JAX itself refuses integers")
    with pytest.raises(TypeError, match=f"^flash_mla_with_kvcache: {argument}: is .*outside of jax.jit.*pure_callback"):
        run()


def test_pure_callback_inside_of_jit():
    """Tests what the message proposes."""
    given = arrays()
    shapes = jax.ShapeDtypeStruct((4, 2, 4, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4, 4, 2), jnp.float32)

    def attend(*arrays):
        return flash_mla_with_kvcache(*map(numpy.asarray, arrays), 512, None)

    results = jax.jit(lambda *arrays: jax.pure_callback(attend, shapes, *arrays))(*given.values())
    check_decode(KIND, tuple(map(numpy.asarray, results)), BATCH.expected(KIND))


def test_slots():
    """JAX makes slots of 32 bits, and does not warn that it made fewer bits than requested."""
    cache, values = new_cache(KIND, "FP8_656"), KIND.array(vectors("FP8_656"))
    expected = new_cache(KIND, "FP8_656")
    cache_append(values[:, :512], values[:, 512:], expected, KIND.array(SLOTS, "int64"), "FP8_656")
    slots = jnp.asarray(numpy.array(SLOTS, numpy.int32))
    assert slots.dtype == jnp.int32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache_append(jnp.asarray(values[:, :512]), jnp.asarray(values[:, 512:]), cache, slots, "FP8_656")
        assert KIND.bits(cache) == KIND.bits(expected)
        rows = cache_gather(jnp.asarray(cache), slots, "FP8_656")
        none = cache_gather(jnp.asarray(cache), slots[:0], "FP8_656")
    assert isinstance(rows, jax.Array) and none.shape == (0, 576)
    assert numpy.array_equal(rows, cache_gather(expected, KIND.array(SLOTS, "int64"), "FP8_656"))


def test_float8_is_called_by_its_name():
    with pytest.raises(
        ValueError, match="^flash_mla_with_kvcache: q: dtype is float8_e4m3fn, must be bfloat16 or float16"
    ):
        decode(dict(arrays(), q=jnp.zeros((4, 2, 4, 576), jnp.float8_e4m3fn)))
