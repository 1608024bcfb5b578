# SPDX-License-Identifier: MIT
"""Runs the package flash_mla on the model's inputs, over caches that it wrote itself."""

import numpy

import flash_mla

from .model import D_V, ROWS, e4m3, fp32, scale_576

PAGE = 64


class OnCpu:
    """NumPy's arrays."""

    device = "cpu"

    def __init__(self):
        try:
            from ml_dtypes import bfloat16, float8_e4m3fn

            self.types = {"bfloat16": bfloat16, "float8_e4m3fn": float8_e4m3fn}
        except ImportError:
            self.types = {}
        self.of_q = "bfloat16" if self.types else "float16"

    def array(self, values, dtype):
        return numpy.asarray(values).astype(self.types.get(dtype, dtype))

    def double(self, array):
        return numpy.asarray(array, numpy.float64)


class OnGpu:
    """PyTorch's tensors."""

    of_q = "bfloat16"

    def __init__(self, torch):
        self.torch = torch
        self.device = torch.cuda.get_device_name()

    def array(self, values, dtype):
        values = self.torch.from_numpy(numpy.ascontiguousarray(values))
        return values.cuda().to(getattr(self.torch, dtype))

    def double(self, array):
        return array.double().cpu().numpy()


def where_arrays_are():
    try:
        import torch
    except ImportError:
        return OnCpu()
    return OnGpu(torch) if torch.cuda.is_available() else OnCpu()


def call_bf16(x, arrays, cache, scale):
    """Computes mode bf16: products in bf16 of dequantised values."""
    q = arrays.array(x.q[None, None], arrays.of_q)
    kv_scale = None if scale is None else arrays.array([scale], "float32")
    options = dict(softmax_scale=x.scale, is_fp8_kvcache=True, kv_scale=kv_scale)
    return flash_mla.flash_mla_with_kvcache(q, cache, *tables(x, arrays), D_V, None, **options)


def call_fp8(x, arrays, cache, scale):
    """Computes mode fp8: e4m3 products of queries that the caller quantised, all rows with one scale."""
    of_q = float(fp32(numpy.abs(x.q).max() / 448))
    q = arrays.array(e4m3(fp32(x.q / of_q))[None, None].astype(numpy.float32), "float8_e4m3fn")
    scales = [arrays.array([of], "float32") for of in (of_q, scale)]
    more = D_V, None, None, x.scale, False, *scales
    return flash_mla.flash_mla_with_kvcache_fp8(q, cache, *tables(x, arrays), *more)


def tables(x, arrays):
    """Returns table and lengths of one request, whose pages are in order."""
    return arrays.array(numpy.arange(len(x.k) // PAGE)[None], "int32"), arrays.array([len(x.k)], "int32")


def calls_of(arrays):
    """Returns (mode, cache, call) for all modes that the package and these arrays support."""
    found = [("bf16", "FP8_576", call_bf16), ("bf16", "FP8_656", call_bf16)]
    if hasattr(flash_mla, "flash_mla_with_kvcache_fp8") and arrays.of_q == "bfloat16":
        found.append(("fp8", "FP8_576", call_fp8))
    return found


def measured(x, arrays):
    """Yields (name, results) of the package's calls."""
    slots, k = arrays.array(numpy.arange(len(x.k)), "int64"), arrays.array(x.k, "float32")
    for mode, kv_format, call in calls_of(arrays):
        scale = scale_576(x.k) if kv_format == "FP8_576" else None
        shape = len(x.k) // PAGE, PAGE, 1, int(kv_format[len("FP8_") :])
        cache = arrays.array(numpy.zeros(shape, numpy.uint8), "uint8")
        flash_mla.cache_append(k, None, cache, slots, kv_format, cache_scale=scale or 0.0)
        out, lse = (arrays.double(result) for result in call(x, arrays, cache, scale))
        yield f"{mode} {kv_format}", (out.reshape(ROWS, D_V), x.out, lse.reshape(ROWS, 1), x.lse)


def of_library():
    """Returns the kinds of lines with their functions, and the other fields of the lines."""
    arrays = where_arrays_are()
    return {"measured": lambda x: measured(x, arrays)}, dict(device=arrays.device, q=arrays.of_q)
