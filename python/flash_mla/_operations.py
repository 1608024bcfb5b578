# SPDX-License-Identifier: MIT
"""The library's operations, for every kind of array.

`arrays` is the module for the caller's kind of arrays: _torch_tensors or _arrays. It writes arrays in C's layout and
allocates scratch memory.
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from typing import Any, Mapping, NoReturn, Optional, Sequence, Tuple

from . import _library, _structs
from ._argument_structs import ARGUMENTS
from ._call import Call, Struct, contiguous, put_tensor
from ._library import library
from ._types import BYTES, FIRST_OF_BYTES, FORMATS, NOT_BYTES, Products, dtype_word, name_of

# Names of the functions, and what they call the library's arguments, if different.
PLAN, DECODE, MERGE = "get_mla_metadata", "flash_mla_with_kvcache", "merge_states"
PLAN_FP8, DECODE_FP8 = "get_mla_metadata_dense_fp8", "flash_mla_with_kvcache_fp8"
PREFILL, MHA = "flash_mla_sparse_fwd", "flash_attn_varlen_func"
APPEND, GATHER, CONVERT = "cache_append", "cache_gather", "cache_convert"
_NAMES: dict[str, Mapping[str, str]] = {
    PLAN: {
        "seqlens": "cache_seqlens",
        "s_q": "num_q_tokens_per_head_k",
        "h_q": "num_q_tokens_per_head_k",
        "h_kv": "num_heads_k",
        "b": "cache_seqlens",  # of a sparse attention plan on a device that has none
    },
    DECODE: {
        "kv_cache": "k_cache",
        "seqlens": "cache_seqlens",
        "q: d_v": "head_dim_v",
        "extra_kv_cache": "extra_k_cache",
        "extra_indices": "extra_indices_in_kvcache",
        # Errors of the plan made for the call:
        "s_q": "q: s_q",
        "h_q": "q: h_q",
        "h_kv": "k_cache: h_k",
        "b": "q: b",
        "topk": "indices: topk",
        "extra_topk": "extra_indices_in_kvcache: extra_topk",
        "partitions": "tile_scheduler_metadata",
    },
    PREFILL: {"q: d_v": "d_v", "softmax_scale": "sm_scale"},
    MERGE: {"out_last": "out_parts[1]", "lse_last": "lse_parts[1]"},  # of a pair
    MHA: {
        "cu_seqlens_q": "cu_seqlens_qo",
        "cu_seqlens_k": "cu_seqlens_kv",
        "max_s_q": "max_seqlen_qo",
        "max_s_k": "max_seqlen_kv",
    },
}
_NAMES[PLAN_FP8] = _NAMES[PLAN]
_NAMES[DECODE_FP8] = {
    **_NAMES[DECODE],
    "kv_format": "k_cache",
    "kv_scale": "descale_k",
    "q_scale": "descale_q",
    "products": "q: FP8 products",
}
# Terms that differ in Python: a flag and the bytes of a token stand for the library's format number; lse is transposed.
_SENTENCES: Mapping[str, _library.Sentences] = {
    DECODE: {
        ("kv_format", "is 0"): "is_fp8_kvcache: is False, must be True where k_cache has bytes",
        ("kv_scale", "is a tensor"): "kv_scale: is given, must be None unless k_cache is bytes and a token of "
        "it has 576 bytes",
    },
    DECODE_FP8: {
        ("kv_scale", "is a tensor"): "descale_k: is given, must be None unless a token of k_cache has 576 bytes",
        ("q_scale", "is a tensor"): "descale_q: is given, must be None where q has bfloat16 values: the call "
        "quantises them, each row with a scale of its own",
        ("q", "has codes of one byte"): "q: has codes of one byte, must be bfloat16 where a token of k_cache has "
        "656 bytes: the last 64 values of its queries are not quantised",
    },
    PREFILL: {("kv_format", "is 0"): "is_fp8_kvcache: is False, must be True where kv has bytes"},
    APPEND: {
        ("positions", "is NULL"): "positions: is None, must be given with rope_table",
        ("rope_table", "is NULL"): "rope_table: is None, must be given with positions",
        ("rope_pairs", "is 0"): "rope_pairs: is None, must be 'interleaved' or 'halves' with rope_table",
        ("rope_pairs", "is 1"): "rope_pairs: is 'interleaved', must be None without rope_table",
        ("rope_pairs", "is 2"): "rope_pairs: is 'halves', must be None without rope_table",
    },
    MERGE: {
        (
            result,
            f"shares memory with {part}_last",
        ): f"{result}: shares memory with {part}_parts[1], must be apart from it"
        + " or exactly that part (the same type, address and strides)" * (result == part)
        for result in ("out", "lse")
        for part in ("out", "lse")
    },
    MHA: {
        ("lse", "stride of the innermost"): "lse: stride of the dimension of tokens must be 1, as in a new "
        "[h_q, tokens] or its transpose"
    },
}
INT32 = dtype_word(0, 32)


def check(status: int, function: str) -> None:
    if status:
        _library.fail(status, function, _NAMES.get(function, {}), _SENTENCES.get(function, {}))


def name_in(function: str, argument: str) -> str:
    """Returns the function's name for an argument of the library's operation."""
    return _library.name_of(_NAMES.get(function, {}), argument)


# ---- Operations -----------------------------------------------------------------------------------------------------

Shape = Tuple[int, ...]
Form = Tuple[Shape, Optional[str]]
"""A shape and the name of a type; None = the type of the operation's first tensor."""
BF16_OR_FP32 = "bfloat16, or float32 of a library that has no bfloat16"


class Operation:
    """An operation of the library, with its idle calls, kept separately for each kind of array. A caller owns the call that it takes
    until it returns it to `idle`, so threads and finalizers that run during a call never share one. After an error the call is
    dropped.

    `function`: the public function, which calls the tensors `names`. `tensors`: in the order of the arguments, "?" after one that may
    be None, "!" after one that is written, "#" after one that may be bytes; results come last. `options`: the numbers after them.
    `results`: returns the forms of new results from the shapes of the first two tensors and a number; for attention the number is d_v,
    and the second shape is not used; otherwise it is the first option. `fixed`: numbers that are equal in every call. `operator`:
    PyTorch's name, if it differs from the library's.
    """

    def __init__(
        self,
        name: str,
        function: str,
        tensors: str,
        options: str,
        results: Any = None,
        fixed: Mapping[str, int] = {},
        operator: Optional[str] = None,
    ):
        self.name, self.function, self.results, self.operator = name, function, results, operator or name
        struct_type = ARGUMENTS[name]
        words = tensors.split()
        self.tensors, self.options = [word.rstrip("?!#") for word in words], options.split()
        self.names = [name_in(function, tensor) for tensor in self.tensors]
        self.may_be_none, self.is_written, self.may_be_bytes = ([mark in word for word in words] for mark in "?!#")
        self.written = [i for i, written in enumerate(self.is_written) if written]
        self._of_bytes = [i for i, may in enumerate(self.may_be_bytes) if may]
        self.is_attention = hasattr(struct_type, "workspace")  # the others need no workspace
        self._struct_type, self._struct_size = struct_type, ctypes.sizeof(struct_type)
        self._struct = Struct(struct_type, ["struct_size", *fixed, *self.tensors, *self.options, "stream"])
        self._first = 0, self._struct_size, *fixed.values()
        self._order, self._pack = self._struct.order, self._struct.pack
        self.idle: defaultdict[Any, list[Call]] = defaultdict(list)
        self.launch = getattr(library, f"fmla_{name}")
        if self.is_attention:
            self._ask_size, self._ask_bound = (
                getattr(library, f"fmla_{name}_workspace_{of}") for of in ("size", "bound")
            )
            self._size_at = self._struct_type.workspace_size.offset  # type: ignore[attr-defined]

    def __call__(
        self, arrays: Any, tensors: Sequence[Any], options: Sequence[Any], stream: int, function: Optional[str] = None
    ) -> None:
        """Runs the operation on `tensors`; entries after its last tensor are ignored. `function`: names the caller in errors, if it is not
        the operation's function."""
        call = self.take(arrays)
        values = (*arrays.put_all(tensors, call), *options, stream)
        for i in self._of_bytes:
            if tensors[i] is not None and arrays.dtype_of(tensors[i], call.places[i]) in NOT_BYTES:
                self._refuse_bytes(function or self.function, i, arrays.dtype_of(tensors[i], call.places[i]))
        if values != call.values:  # most calls repeat the values of the previous one
            self.fill(call, values)
        if self.is_attention:
            status = self._launch_in_memory(arrays, call, tensors[0], stream)
        else:
            status = self.launch(call.address)
        if status:
            check(status, function or self.function)
        self.idle[arrays].append(call)

    def _refuse_bytes(self, function: str, i: int, dtype: int) -> NoReturn:
        code = dtype & 255
        raise ValueError(
            f"{function}: {self.names[i]}: dtype is {name_of(code, 8) or f'type code {code} with 8 bits'}, must be "
            f"{', '.join(BYTES[:-1])} or {BYTES[-1]} where an element has one byte"
        )

    def take(self, kind: Any) -> Call:
        try:
            return self.idle[kind].pop()
        except IndexError:
            return self.new_call()

    def new_call(self) -> Call:
        return Call(self._struct_type, len(self.tensors), not any(self.may_be_none))

    def fill(self, call: Call, values: Tuple[Any, ...]) -> None:
        """`values`: addresses of tensors, options, the stream."""
        ordered = self._order((*self._first, *values))
        try:
            self._pack(call.memory, 0, *ordered)
        except (OverflowError, struct.error):
            self._pack(call.memory, 0, *self._struct.cut_off(ordered))
        call.values, call.sized = values, None

    def _launch_in_memory(self, arrays: Any, call: Call, like: Any, stream: int) -> int:
        """Tries the workspace size of the previous call if values and first shape are equal. If the library reports it too small, or
        they differ, asks for the size first."""
        shape = like.shape
        if shape == call.sized and not self._launch_with(arrays, call, like, stream):
            return 0
        call.sized = None
        status = self.ask_size(call)
        if status:
            return status
        status = self._launch_with(arrays, call, like, stream)
        call.sized = None if status else shape
        return status

    def ask_size(self, call: Call) -> int:
        """Writes the size of the workspace into the call, and returns a status."""
        return self._ask_size(call.address, call.address + self._size_at, None) if self.is_attention else 0

    def launch_sized(self, arrays: Any, call: Call, like: Any, stream: int) -> int:
        """Launches a call that has the size of its workspace, and returns a status."""
        return self._launch_with(arrays, call, like, stream) if self.is_attention else self.launch(call.address)

    def _launch_with(self, arrays: Any, call: Call, like: Any, stream: int) -> int:
        args = call.args
        size = args.workspace_size
        memory, args.workspace = arrays.scratch(call, like, size, stream) if size else (None, None)
        try:
            return self.launch(call.address)
        finally:
            arrays.free_scratch(memory)

    def workspace_bound(
        self, place: Tuple[int, int], tensors: Mapping[str, Tuple[int, Shape]], options: Mapping[str, Any]
    ) -> Tuple[int, int]:
        """Returns the status and bytes of fmla_…_workspace_bound for tensors given by types and shapes."""
        call, size, addresses = self.take(None), ctypes.c_size_t(), []
        for name, at in zip(self.tensors, call.places):
            given = tensors.get(name)
            addresses.append(put_tensor(at, _NOWHERE, *place, *given, contiguous(given[1])) if given else 0)
        self.fill(call, (*addresses, *[options.get(name, 0) for name in self.options], 0))
        return self._ask_bound(call.address, ctypes.addressof(size), None), size.value


_NOWHERE = 1 << 12  # an address that is never read; NULL would be refused


def _of_decode(q: Shape, keys: Shape, d_v: int) -> Tuple[Form, ...]:
    b, s_q, h_q, _ = q
    return ((b, s_q, h_q, d_v), None), ((b, h_q, s_q), "float32")


def _of_decode_fp8(q: Shape, keys: Shape, d_v: int) -> Tuple[Form, ...]:
    """out has values even if q has codes."""
    (out, _), lse = _of_decode(q, keys, d_v)
    return (out, "bfloat16"), lse


def _of_prefill(q: Shape, keys: Shape, d_v: int) -> Tuple[Form, ...]:
    row = q[:2], "float32"
    return ((*q[:2], d_v), None), row, row


def _of_mha(q: Shape, k: Shape, d_v: int) -> Tuple[Form, ...]:
    tokens, h_q = q[0], q[1]
    return ((tokens, h_q, d_v), None), ((h_q, tokens), "float32")


def _of_merge(out_parts: Shape, lse_parts: Shape, _: int) -> Tuple[Form, ...]:
    return (out_parts[1:], None), (lse_parts[1:], "float32")


def _of_gather(kv_cache: Shape, slots: Shape, kv_format: int) -> Tuple[Form, ...]:
    """Works for any shape: the library refuses one that a cache or slots cannot have."""
    tokens = slots[0] if len(slots) else 0
    if kv_format >= FIRST_OF_BYTES:
        return (((tokens, 576 if kv_format in _WIDE else 512), BF16_OR_FP32),)
    return (((tokens, kv_cache[-1] if len(kv_cache) else 0), None),)


_WIDE = FORMATS["FP8_656"], FORMATS["FP8_576"]  # have 576 values, other byte formats 512
DENSE_DECODE = Operation(
    *("dense_decode", DECODE),
    "q kv_cache# block_table? seqlens partitions? num_splits? attn_sink? kv_scale? out! lse!",
    "kv_format softmax_scale causal lse_empty log_base batch_invariant",
    _of_decode,
)
DENSE_DECODE_FP8 = Operation(
    *("dense_decode", DECODE_FP8),
    "q# kv_cache# block_table? seqlens partitions? num_splits? attn_sink? kv_scale? q_scale? out! lse!",
    "kv_format softmax_scale causal lse_empty log_base batch_invariant",
    _of_decode_fp8,
    fixed={"products": Products.FP8.value},
    operator="dense_decode_fp8",
)
SPARSE_DECODE = Operation(
    *("sparse_decode", DECODE),
    "q kv_cache# indices topk_length? attn_sink? extra_kv_cache?# extra_indices? extra_topk_length? partitions? num_splits? "
    "out! lse!",
    "kv_format softmax_scale lse_empty log_base batch_invariant extra_kv_format",
    _of_decode,
)
SPARSE_PREFILL = Operation(
    *("sparse_prefill", PREFILL),
    "q kv# indices topk_length? attn_sink? out! max_logits! lse!",
    "kv_format softmax_scale lse_empty log_base",
    _of_prefill,
)
MHA_FORWARD = Operation(
    *("mha_forward", MHA),
    "q k v cu_seqlens_q cu_seqlens_k attn_sink? seqused_q? seqused_k? out! lse!",
    "max_s_q max_s_k softmax_scale causal lse_empty log_base batch_dependent num_splits",
    _of_mha,
)
MHA_BACKWARD = Operation(
    *("mha_backward", MHA),
    "q k v cu_seqlens_q cu_seqlens_k attn_sink? seqused_q? seqused_k? out lse dout dlse? dq! dk! dv! d_attn_sink?!",
    "max_s_q max_s_k softmax_scale causal deterministic log_base",
)
MERGE_STATES = Operation(
    *("merge", MERGE),
    "out_parts lse_parts out_last? lse_last? attn_sink? out! lse!",
    "lse_empty log_base part",
    _of_merge,
)
CACHE_APPEND = Operation(
    *("cache_append", APPEND),
    "latent rope? kv_cache!# slot_mapping norm_weight? positions? rope_table?",
    "kv_format cache_scale norm_eps rope_pairs",
)
CACHE_GATHER = Operation(*("cache_gather", GATHER), "kv_cache# slots out!", "kv_format cache_scale", _of_gather)
CACHE_CONVERT = Operation(
    *("cache_convert", CONVERT),
    "src_cache# src_slots dst_cache!# dst_slots",
    "src_format dst_format src_scale dst_scale",
)
OPERATIONS = [DENSE_DECODE, DENSE_DECODE_FP8, SPARSE_DECODE, SPARSE_PREFILL, MHA_FORWARD, MHA_BACKWARD, MERGE_STATES]
OPERATIONS += CACHE_APPEND, CACHE_GATHER, CACHE_CONVERT  # all but the plans
DENSE_PLAN = Operation(*("decode_plan", PLAN), "seqlens partitions! num_splits!", "s_q h_q h_kv")
SPARSE_PLAN = Operation(
    *("sparse_plan", PLAN),
    "topk_length? extra_topk_length? partitions! num_splits!",
    "b topk extra_topk s_q h_q device_type id",
)

# ---- The plan -------------------------------------------------------------------------------------------------------

# `sizes` in dense decode: s_q, h_q, h_kv; in sparse decode: b, topk, extra_topk, s_q, h_q.


def _plan_options(plan: Operation, sizes: Tuple[int, ...], place: Tuple[int, int]) -> Tuple[int, ...]:
    return sizes if plan is DENSE_PLAN else (*sizes, *place)


def plan_shapes(
    plan: Operation,
    function: str,
    place: Tuple[int, int],
    lengths: Optional[Shape],
    sizes: Tuple[int, ...],
) -> Tuple[Shape, Shape]:
    """Returns the shapes of the two tables of a plan on a device. `lengths`: the shape of the lengths; None is allowed in sparse decode.
    The number of partitions does not depend on b, which may be a symbol: one compiled graph serves every b."""
    if plan is DENSE_PLAN and len(lengths or ()) != 1:
        raise ValueError(f"{function}: cache_seqlens: has {len(lengths or ())} dimensions, must have 1")
    b = lengths[0] if lengths and plan is DENSE_PLAN else sizes[0]
    call, count = plan.take(None), ctypes.c_int32()
    addresses = [0] * len(plan.tensors)
    if plan is DENSE_PLAN:  # lengths do not affect the number of partitions
        addresses[0] = put_tensor(call.places[0], 0, *place, INT32, (0,), (1,))
    of_any = sizes if plan is DENSE_PLAN else (0, *sizes[1:])
    plan.fill(call, (*addresses, *_plan_options(plan, of_any, place), 0))
    partitions = getattr(library, f"fmla_{plan.name}_partitions")
    check(partitions(call.address, ctypes.addressof(count)), function)
    plan.idle[None].append(call)
    return (count.value, _library.PARTITION_FIELDS), (b + 1,)


def fill_plan(
    plan: Operation,
    function: str,
    arrays: Any,
    place: Tuple[int, int],
    lengths: Sequence[Optional[Any]],
    tables: Sequence[Any],
    sizes: Tuple[int, ...],
    stream: int,
) -> None:
    """Writes the plan into the two tables on device `place`."""
    if plan is SPARSE_PLAN:
        _check_lengths(function, arrays, place, lengths, sizes[0])
    plan(arrays, (*lengths, *tables), _plan_options(plan, sizes, place), stream, function)


def _check_lengths(
    function: str, arrays: Any, place: Tuple[int, int], lengths: Sequence[Optional[Any]], b: int
) -> None:
    """Checks the device and size of the lengths: the library would plan on their device and blame the tables."""
    for name, array in zip(SPARSE_PLAN.names, lengths):
        if array is None:
            continue
        if arrays.device_of(array) != place:
            theirs, ours = (
                f"cuda:{number}" if kind == _library.CUDA else "cpu"
                for kind, number in (arrays.device_of(array), place)
            )
            raise ValueError(f"{function}: {name}: device is {theirs}, must be {ours} as in q")
        shape = arrays.shape_of(function, name, array)
        if len(shape) == 1 and shape[0] != b:
            raise ValueError(f"{function}: {name}: b (dimension 0) is {shape[0]}, must be {b} as in q")


# ---- Available kernels ----------------------------------------------------------------------------------------------


def place_of(function: str, device: Any) -> tuple[int, int]:
    """Returns the type and number of a device from its name."""
    kind, colon, index = str(device).partition(":")
    places = {"cpu": _library.CPU, "cuda": _library.CUDA}
    if kind not in places or not (index.isdigit() or not colon):
        raise ValueError(f"{function}: device: is {device!r}, must be 'cpu', 'cuda' or 'cuda:1'")
    return places[kind], int(index or 0)


_TYPES = ("bfloat16", "float16", "float32")  # the bits of FMLA_TAKES_…


def capabilities(device_type: int, device_id: int) -> list[dict[str, Any]]:
    """Returns the rows of fmla_capabilities for one device."""
    rows: list[dict[str, Any]] = []
    row = _structs.Capability(struct_size=ctypes.sizeof(_structs.Capability))
    while not library.fmla_capabilities(_structs.Device(device_type, device_id), len(rows), row):
        words = {name: getattr(row, name) for name in ("operation", "kernel", "reason", "part_of")}
        rows.append(
            {
                **{name: None if word is None else word.decode() for name, word in words.items()},
                "available": bool(row.available),
                "forced_only": bool(row.forced_only),
                "types": tuple(name for bit, name in enumerate(_TYPES) if row.types >> bit & 1),
                "kv_formats": tuple(name for name, format in FORMATS.items() if row.kv_formats >> format & 1),
                "d_qk": tuple(filter(None, row.d_qk)),
                "d_v": tuple(filter(None, row.d_v)),
                "products": tuple(mode.name.lower() for mode in Products if row.products >> mode & 1),
            }
        )
    return rows
