/* SPDX-License-Identifier: MIT
 *
 * flashmla.h - attention kernels for multi-head latent attention (MLA), as a C library.
 *
 * This header is the whole contract and compiles alone as C11 and as C++17. It gives shapes, types, errors
 * and threading; docs/semantics.md, installed as share/doc/flashmla/semantics.md, defines the result of
 * every operation, with its edge cases.
 *
 * WORDS
 *   b                batch: requests             s_q, s_k   query tokens, keys of a request
 *   h_q, h_kv        query heads, key heads      d_qk, d_v  head sizes of Q·K and of V
 *   slot             the place of one token in a cache
 *   page             page_size consecutive slots
 *   row              one (query token, query head)
 *   split            a range of one request's keys that one worker processes; a request's splits are merged
 *   partition        the list of splits that is assigned to one worker
 *   part             an input of fmla_merge: a result over some of the keys
 *
 * CONVENTIONS
 *   Tensors          A fmla_tensor has the layout of DLPack's DLTensor; a DLTensor * may be cast to it. The
 *                    device of the tensors selects the back end: host memory runs on the CPU, device memory
 *                    on that GPU. Sizes and strides count elements and are 64-bit. Strides are not negative;
 *                    only the innermost dimension must be contiguous. Element alignment is required; bases
 *                    and strides that are multiples of 16 bytes are fastest.
 *   Arguments        Each operation has one argument struct, made by FMLA_INIT(type); a member that is zero
 *                    has its default.
 *   Memory           The caller owns all memory. No function keeps a pointer after it returned (GPU
 *                    operations: after the stream has passed them). No operation allocates, except that the
 *                    built-in loop starts its threads at first use. Outputs overlap nothing else, except that
 *                    results of fmla_merge may replace a part. A workspace may hold anything on entry and
 *                    serves one call in flight: two calls on a GPU that share one at the same time may wait
 *                    for each other forever. A plan is read-only, may serve many calls at once, and may be
 *                    copied to other memory that is 16-byte aligned.
 *   Errors           Every function that can fail returns a fmla_status. On failure fmla_last_error() names
 *                    the argument, its value and the allowed values. Nothing prints, exits, aborts or throws.
 *                    All arguments are checked before any work starts, so a refused call wrote nothing. Only
 *                    FMLA_DEVICE_ERROR, which only GPU operations return, can come later: the driver may
 *                    refuse a step after others of the call are already on the stream. Once the stream has
 *                    passed those steps, outputs and workspace may hold anything, inputs and all other
 *                    memory are unchanged, and the call may be repeated. A GPU fault after a call returned is
 *                    reported by a later driver call in that context, possibly inside another operation.
 *   Threads          Every function may be called from any thread at any time. CPU operations return when the
 *                    result is complete; they run on the threads that fmla_set_num_threads and
 *                    fmla_set_parallel_for configure. After a fork, the child may make CPU calls, whatever
 *                    other threads were doing: it starts its own threads and computes the same bits.
 *                    The built-in loop's threads sleep until the process ends. The shared library therefore
 *                    stays loaded after dlclose, and a module that contains the static library must not be
 *                    unloaded after CPU calls. The threads run on the processors of the process's first
 *                    thread, and keep the process alive after all its own threads left by pthread_exit.
 *                    No thread may be cancelled (pthread_cancel) inside a call.
 *                    On processors with AMX the first call asks Linux for permission to use it (arch_prctl,
 *                    ARCH_REQ_XCOMP_PERM) for the whole process. From then on signal frames are larger, and
 *                    sigaltstack refuses a stack below sysconf(_SC_MINSIGSTKSZ), about 11 KiB. If the process
 *                    already has such a stack, Linux refuses the request, and the other kernels run.
 *   GPUs             The driver is loaded at the first use of a GPU. An operation runs in the calling
 *                    thread's current context, which must be of the tensors' device (else
 *                    FMLA_INVALID_ARGUMENT); a thread without a context borrows the device's primary
 *                    context for the call. Between calls that context may be reset
 *                    (cuDevicePrimaryCtxReset), and others may be destroyed.
 *   Graphs           On a GPU, operations are asynchronous on args->stream, never synchronise, never read
 *                    device memory on the host, and can be captured into a CUDA graph. On the CPU, stream is
 *                    ignored.
 *   Determinism      The same inputs on the same device with the same build give the same bits; on the CPU
 *                    also the number of threads must be the same, because it sets the default number of
 *                    partitions.
 */
#ifndef FLASHMLA_FLASHMLA_H
#define FLASHMLA_FLASHMLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define FMLA_API __attribute__((visibility("default")))
#else
#define FMLA_API
#endif

/* Makes the enumeration constants int32_t where the language allows it: in C++, in C23, and with clang in any
 * C (binding generators such as bindgen read headers with clang). Elsewhere they are int, with the same
 * values. */
#if defined(__cplusplus) || (defined(__STDC_VERSION__) && __STDC_VERSION__ >= 202311L)
#define FMLA_INT32 : int32_t
#elif defined(__clang__)
#define FMLA_INT32                                                                                           \
    _Pragma("clang diagnostic push") _Pragma("clang diagnostic ignored \"-Wpedantic\"")                      \
        : int32_t _Pragma("clang diagnostic pop")
#else
#define FMLA_INT32
#endif

/* ---- Version -------------------------------------------------------------------------------- */

#define FMLA_VERSION_MAJOR 0
#define FMLA_VERSION_MINOR 2
#define FMLA_VERSION_PATCH 0

/* The version as one number, for #if: major * 10000 + minor * 100 + patch. */
#define FMLA_VERSION (FMLA_VERSION_MAJOR * 10000 + FMLA_VERSION_MINOR * 100 + FMLA_VERSION_PATCH)

/* Returns the FMLA_VERSION of the linked library. Compare it with the header's to find a mismatch. Never
 * fails. */
FMLA_API int32_t fmla_version(void);

/* Returns the version as text, "0.2.0". The storage is static. */
FMLA_API const char *fmla_version_string(void);

/* ---- Status and errors ---------------------------------------------------------------------- */

/* The values are stable; programs may store them. */
typedef int32_t fmla_status;
enum FMLA_INT32 {
    FMLA_OK = 0,
    FMLA_INVALID_ARGUMENT = 1, /* no library or machine could run the call as written */
    FMLA_UNSUPPORTED = 2,      /* the call is valid, but no kernel of this build or machine can run it */
    FMLA_BUFFER_TOO_SMALL = 3, /* workspace or plan buffer; the message gives the bytes needed */
    FMLA_DEVICE_ERROR = 4      /* the GPU driver returned an error; the message quotes it; see Errors */
};

/* Returns the name of a status, "FMLA_OK". The storage is static; never NULL. */
FMLA_API const char *fmla_status_name(fmla_status status);

/* Returns the message of this thread's last failed call, for example
 * "dense_decode: block_table: dtype is int64, must be int32"; "" if no call has failed.
 * The text stays valid until the next failing call of this thread. */
FMLA_API const char *fmla_last_error(void);

/* That message in parts, for callers that have names of their own for operations and arguments. The whole
 * message is "operation: argument: actual, allowed"; a part that it lacks is "". No part is NULL. */
typedef struct fmla_error {
    size_t struct_size;
    const char *operation; /* "dense_decode" */
    const char *argument;  /* "block_table"; of FMLA_DEVICE_ERROR: the device, "cuda:0" */
    const char *actual;    /* "dtype is int64" */
    const char *allowed;   /* "must be int32" */
    const char *other;     /* the argument at the end of `allowed`: "q" of "must be 2 as in q" */
} fmla_error;

/* Describes the message of this thread's last failed call; every part is "" if no call has failed. The texts
 * stay valid until the next failing call of this thread. Errors: FMLA_INVALID_ARGUMENT for `error`, which
 * becomes the last error. */
FMLA_API fmla_status fmla_last_error_describe(fmla_error *error);

/* ---- Tensors (the layout of DLPack's DLTensor, field for field) ----------------------------- */

enum FMLA_INT32 {
    FMLA_DEVICE_CPU = 1,
    FMLA_DEVICE_CUDA = 2,
    FMLA_DEVICE_CUDA_HOST = 3 /* pinned; treated as host memory */
};

typedef struct fmla_device {
    int32_t device_type; /* FMLA_DEVICE_… (DLPack's DLDeviceType) */
    int32_t id;          /* index among devices of that type, from 0 */
} fmla_device;

/* Tensors of bytes (caches in a format of bytes, codes of queries) are int8 or uint8, which stand for raw
 * bytes, or float8_e4m3fn. Every other type of one byte is refused. */
enum FMLA_INT32 {
    FMLA_TYPE_INT = 0,
    FMLA_TYPE_UINT = 1,
    FMLA_TYPE_FLOAT = 2,
    FMLA_TYPE_BFLOAT = 4,
    FMLA_TYPE_FLOAT8_E4M3FN = 10
};

typedef struct fmla_dtype {
    uint8_t code;   /* FMLA_TYPE_… (DLPack's DLDataTypeCode) */
    uint8_t bits;   /* per element: 16 */
    uint16_t lanes; /* 1 */
} fmla_dtype;

typedef struct fmla_tensor {
    void *data;             /* on `device`; may be NULL if the tensor has no element */
    fmla_device device;     /* where data is */
    int32_t ndim;           /* dimensions; each operation names those of each tensor */
    fmla_dtype dtype;       /* of an element */
    const int64_t *shape;   /* [ndim], each ≥ 0 */
    const int64_t *strides; /* [ndim], in elements; NULL = contiguous, row-major */
    uint64_t byte_offset;   /* added to data */
} fmla_tensor;

/* ---- Argument structs ----------------------------------------------------------------------- */

/* FMLA_INIT(type) is a value of that struct type with struct_size set and everything else zero:
 *     fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
 * struct_size tells the library which version of the struct the caller was compiled with. Every published
 * size is accepted. A size larger than the library's by up to 4096 bytes is accepted if the bytes unknown to
 * the library are zero; otherwise the call returns FMLA_UNSUPPORTED. Any other size is FMLA_INVALID_ARGUMENT.
 * Structs have no padding: they grow by whole members, and reserved members fill them to a multiple of 8
 * bytes. */
#ifdef __cplusplus
} /* extern "C": templates have C++ linkage */
template <typename Args> static inline Args fmla_init_args()
{
    Args args = Args();
    args.struct_size = sizeof(Args);
    return args;
}
extern "C" {
#define FMLA_INIT(type) (fmla_init_args<type>())
#else
#define FMLA_INIT(type) ((type){.struct_size = sizeof(type)})
#endif

/* ---- Threads of the CPU back end ------------------------------------------------------------ */

/* Runs one work item. `index` is in [0, count). `worker` in [0, workers) selects the scratch memory, so two
 * items that run at the same time must have different workers. */
typedef void (*fmla_task)(void *task_data, int64_t index, int32_t worker);

/* Runs task(task_data, i, worker) exactly once for every i in [0, count), in any order, and returns after all
 * have returned. Several host threads may call it at once. It must not fail. */
typedef void (*fmla_parallel_for)(void *pool, int64_t count, fmla_task task, void *task_data);

/* Makes CPU operations run on the caller's threads: they call run(pool, …) with worker numbers in [0,
 * workers). run = NULL restores the built-in loop and ignores workers. The setting is global and applies to
 * calls that start afterwards; run and pool must stay valid while such calls are in flight.
 * Errors: FMLA_INVALID_ARGUMENT if run is given and workers is not in [1, 4096]. */
FMLA_API fmla_status fmla_set_parallel_for(fmla_parallel_for run, void *pool, int32_t workers);

/* Sets the maximum number of threads of the built-in loop: n in [1, 4096], or 0 (the default) for
 * OMP_NUM_THREADS (an environment variable, read once) or, if that is no number from 1 on, for all processors
 * that the process may run on, but no more than cover the CPU quota of its control group (of a container, for
 * example). fmla_device_describe says which of these it was. Each call wakes only as many threads as its work
 * justifies; a short call on a busy machine wakes none. The bits of a result depend on n alone. A workspace
 * sized before a change may be too small afterwards; the call then returns FMLA_BUFFER_TOO_SMALL.
 * Errors: FMLA_INVALID_ARGUMENT for other n. */
FMLA_API fmla_status fmla_set_num_threads(int32_t n);

/* Returns the maximum number of workers of the next CPU call. Never fails. */
FMLA_API int32_t fmla_num_threads(void);

/* ---- Devices and kernels -------------------------------------------------------------------- */

/* The element types that a kernel accepts, as bits. */
enum FMLA_INT32 { FMLA_TAKES_BF16 = 1 << 0, FMLA_TAKES_FP16 = 1 << 1, FMLA_TAKES_FP32 = 1 << 2 };

/* One kernel of the library on one device. All strings are static. */
typedef struct fmla_capability {
    size_t struct_size;    /* set by FMLA_INIT */
    const char *operation; /* "dense_decode" */
    const char *kernel;    /* "cpu-generic"; NULL: the operation has no kernel on this device */
    const char *reason;    /* why the kernel does not run here; "" if it does */
    const char *part_of;   /* the kernel that runs this one for calls that suit it; "" for all others */
    int32_t available;     /* 1: this kernel runs on this device */
    int32_t forced_only;   /* 1: the oracle or a part; runs only if named, never counts as support */
    int32_t types;         /* of vectors outside caches: bits FMLA_TAKES_…; 0 if not applicable */
    int32_t kv_formats;    /* bits 1 << FMLA_KV_… that a call may name; 0: names none, or any */
    int32_t d_qk[8];       /* accepted sizes, then zeros; all zero: any size */
    int32_t d_v[8];        /* the same */
    int32_t products;      /* bits 1 << FMLA_PRODUCTS_… that a call may name; 0: names none */
    int32_t reserved;      /* 0 */
} fmla_capability;

/* Fills row `index` of a device's table. Rows are in order of operation, then of preference: the first
 * available kernel whose features cover a call runs it. Call it with index = 0, 1, … until
 * FMLA_INVALID_ARGUMENT. A kernel can be forced by name: by args.kernel or, for calls that name none, by the
 * environment variable FLASHMLA_KERNEL="cpu-generic" or "dense_decode=ref,merge=cpu-generic" (read once, at
 * first use).
 * FLASHMLA_GPU_CAPABILITY=86 makes each GPU stand for one of that compute capability, with no more shared
 * memory than such a GPU has; kernels are chosen accordingly. It exists to test the behaviour of other GPUs;
 * it accepts 80, 86, 87, 89, 100, 103, 120 and 121.
 * Errors: FMLA_INVALID_ARGUMENT (NULL, struct_size, index past the end, unknown device type). */
FMLA_API fmla_status fmla_capabilities(fmla_device device, int64_t index, fmla_capability *capability);

/* One device as the library sees it. All strings are static. */
typedef struct fmla_device_info {
    size_t struct_size;    /* set by FMLA_INIT */
    const char *name;      /* "NVIDIA H200"; "" for the CPU */
    const char *reason;    /* why no kernel of this build runs there; "" if one does */
    const char *built_for; /* GPUs with machine code in this build, "80 90a"; "" without CUDA kernels */
    const char *needs;     /* the oldest driver, "CUDA 13.0 (driver 580)"; "" without CUDA kernels */
    int32_t count;         /* devices of this type; 0 without a driver or without a build for it */
    int32_t workers;       /* threads, or SMs */
    /* The rest is for GPUs, else 0. Versions are CUDA's: 13000 for 13.0. */
    int32_t compute_capability; /* 90 for 9.0 */
    int32_t shared_bytes;       /* the most shared memory of a CTA */
    int32_t driver;             /* the CUDA version that the driver supports; 0 if not queried */
    int32_t driver_needed;      /* the oldest one that this build needs */
    int32_t built_with;         /* the version of the kernels' compiler; 0: no CUDA kernels */
    int32_t ptx;                /* GPUs from this compute capability on run PTX; 0: no PTX */
    /* On the CPU, how `workers` was chosen: "OMP_NUM_THREADS", "CPU quota of the control group", …, followed
     * by what was ignored and why. "" for GPUs. */
    const char *workers_from;
} fmla_device_info;

/* Describes a device. A device that is absent is described too: `reason` says so.
 * Errors: FMLA_INVALID_ARGUMENT (NULL, struct_size, unknown device type). */
FMLA_API fmla_status fmla_device_describe(fmla_device device, fmla_device_info *info);

/* Does the one-time work of the first call on a device: detects it and loads kernels; on the CPU starts
 * threads.
 * Errors: FMLA_INVALID_ARGUMENT; FMLA_UNSUPPORTED if no kernel of this build runs on the device;
 * FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_prepare(fmla_device device);

/* ---- The split plan ------------------------------------------------------------------------- */

/* A plan splits a batch of requests of different lengths into equal loads (docs/semantics.md, "The split
 * plan"; the method is FlashMLA's, of February 2025). It depends only on the lengths, the heads, s_q and the
 * target, so one plan serves every layer of a model for one step. Dense decode and sparse decode need
 * different plans, made by different functions; both are described and used alike. */
typedef struct fmla_decode_plan_args {
    size_t struct_size;         /* set by FMLA_INIT */
    const fmla_tensor *seqlens; /* [b] int32: keys per request; clamped to [0, capacity]; b < 2^31 - 65537 */
    int64_t s_q;                /* query tokens per request, ≥ 1 */
    int64_t h_q;                /* query heads, ≥ 1 */
    int64_t h_kv;               /* key heads; divides h_q */
    int64_t capacity;           /* max_pages * page_size of the cache; 0 = 2^31 - 1 */
    /* The device that will use the plan; {0, 0} = that of seqlens. A plan is position-independent bytes: a
     * plan made on the host may be copied to the device. */
    fmla_device target;
    int32_t num_workers;    /* SMs or threads to plan for, in [0, 65536]; 0 = all of the target's */
    int32_t num_partitions; /* in [1, 65536]; 0 = from num_workers, h_q, h_kv and s_q */
    void *plan;             /* output; 16-byte aligned, on the device of seqlens */
    size_t plan_size;       /* in bytes; at least the result of fmla_decode_plan_size */
    void *stream;           /* CUDA stream, if seqlens is in device memory */
    /* Give both to receive the plan's tables (fmla_plan_view) instead of `plan`, each in its own memory on
     * the device of seqlens; written. The rows of `partitions` then set the number of partitions:
     * num_partitions must be 0 or that number, and num_workers is ignored. */
    const fmla_tensor *partitions; /* [num_partitions, 8] int32, rows contiguous, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
} fmla_decode_plan_args;

/* Returns the bytes of a plan, which depend only on b and the number of partitions. Ignores args->plan,
 * plan_size, partitions, num_splits, stream and the data of seqlens.
 * Errors: FMLA_INVALID_ARGUMENT; FMLA_UNSUPPORTED for a device without a kernel. */
FMLA_API fmla_status fmla_decode_plan_size(const fmla_decode_plan_args *args, size_t *bytes);

/* Returns the number of partitions of a plan, which is also the number of rows of a `partitions` table. Reads
 * the same arguments as fmla_decode_plan_size; the lengths do not matter.
 * Errors: as fmla_decode_plan_size. */
FMLA_API fmla_status fmla_decode_plan_partitions(const fmla_decode_plan_args *args, int32_t *count);

/* Writes the plan, or its tables. On a GPU it can be captured, and replayed after the lengths changed in
 * place.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_decode_plan(const fmla_decode_plan_args *args);

/* Arguments of a plan for fmla_sparse_decode, which splits requests by the lengths of their lists. The rules
 * for seqlens in fmla_decode_plan_args apply to whichever of topk_length and extra_topk_length are given. If
 * neither is given, the plan is in memory of `target`, where {0, 0} is host memory. */
typedef struct fmla_sparse_plan_args {
    size_t struct_size;                   /* set by FMLA_INIT */
    const fmla_tensor *topk_length;       /* [b] int32, clamped to [0, topk]; NULL = topk */
    const fmla_tensor *extra_topk_length; /* [b] int32, clamped to [0, extra_topk]; NULL = extra_topk */
    int64_t b;           /* requests, < 2^31 - 65537; 0 or the same if a length tensor is given */
    int64_t s_q;         /* query tokens per request, ≥ 1 */
    int64_t h_q;         /* query heads, ≥ 1 */
    int64_t topk;        /* indices per query token, in [0, 2^31) */
    int64_t extra_topk;  /* the same of the extra cache; 0 without one */
    fmla_device target;  /* the device that will use the plan; {0, 0} = that of the length tensors */
    int32_t num_workers; /* SMs or threads to plan for, in [0, 65536]; 0 = all of the target's */
    /* In [1, 65536]; 0 = from num_workers, h_q, s_q, topk and extra_topk, never from b: the plan of one batch
     * may then be copied over that of another, and partitions that it does not need are idle. */
    int32_t num_partitions;
    void *plan;       /* output; 16-byte aligned, on the device of the length tensors */
    size_t plan_size; /* in bytes; at least the result of fmla_sparse_plan_size */
    void *stream;     /* CUDA stream, if the plan is in device memory */
    /* The plan's tables instead of `plan`, as in fmla_decode_plan_args. */
    const fmla_tensor *partitions; /* [num_partitions, 8] int32, rows contiguous, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
} fmla_sparse_plan_args;

/* Work like fmla_decode_plan_size, fmla_decode_plan_partitions and fmla_decode_plan. */
FMLA_API fmla_status fmla_sparse_plan_size(const fmla_sparse_plan_args *args, size_t *bytes);
FMLA_API fmla_status fmla_sparse_plan_partitions(const fmla_sparse_plan_args *args, int32_t *count);
FMLA_API fmla_status fmla_sparse_plan(const fmla_sparse_plan_args *args);

enum FMLA_INT32 { FMLA_PARTITION_FIELDS = 8 };

/* The contents of a plan. The pointers point into the plan. */
typedef struct fmla_plan_view {
    size_t struct_size;     /* set by FMLA_INIT */
    int64_t batch;          /* requests */
    int64_t num_partitions; /* rows of `partitions` */
    /* Upper bound of a partition's load, in blocks of 64 keys, with an overhead of 5 per request. */
    int64_t payload;
    /* [num_partitions, 8]: begin request, end request (inclusive), begin block, end block (exclusive), begin
     * split index, first request is split, last request is split, 0. An idle partition has begin request =
     * batch and end request = batch - 1. */
    const int32_t *partitions;
    const int32_t *num_splits; /* [batch + 1]: prefix sum of the splits per request */
} fmla_plan_view;

/* Describes a plan in host memory.
 * Errors: FMLA_INVALID_ARGUMENT if it is not a plan or is damaged; FMLA_BUFFER_TOO_SMALL if it is
 * truncated. */
FMLA_API fmla_status fmla_plan_describe(const void *plan, size_t plan_size, fmla_plan_view *view);

/* ---- Dense decode --------------------------------------------------------------------------- */

/* The value of `lse`, and of nothing else, for a row that sees no key. */
enum FMLA_INT32 {
    FMLA_LSE_EMPTY_POSITIVE_INFINITY = 0 /* as in FlashMLA */,
    FMLA_LSE_EMPTY_NEGATIVE_INFINITY = 1
};

/* The base of the logarithm in `lse`. */
enum FMLA_INT32 { FMLA_LOG_NATURAL = 0, FMLA_LOG_BASE_2 = 2 };

/* How queries are multiplied with the keys of a byte cache (docs/semantics.md, "FP8 products"). BF16: queries
 * are used as given, and each key is converted to bf16. FP8: each query row is also quantised to e4m3, so a
 * kernel may multiply codes by codes. */
enum FMLA_INT32 { FMLA_PRODUCTS_BF16 = 0, FMLA_PRODUCTS_FP8 = 1 };

/* Attention of a few new tokens of each request over its cached keys (docs/semantics.md, "Dense decode"):
 *     S = softmax_scale · Q Kᵀ,  lse = ln Σ exp(S),  out = softmax(S) V,  V = the first d_v values of K.
 * Query head h reads key head h / (h_q / h_kv). */
typedef struct fmla_dense_decode_args {
    size_t struct_size; /* set by FMLA_INIT */
    /* [b, s_q, h_q, d_qk] bf16 or fp16. With FMLA_PRODUCTS_FP8 it is bf16 or, over FMLA_KV_FP8_576 only, e4m3
     * codes (int8, uint8, float8_e4m3fn); FMLA_KV_FP8_656 accepts no codes because the last 64 values of its
     * queries stay bf16. */
    const fmla_tensor *q;
    /* [pages, page_size, h_kv, d_qk] in the type of q; or bytes as in fmla_sparse_decode_args, for
     * FMLA_KV_FP8_576 [pages, page_size, 1, 576]. Bytes decode to bf16 values, which are multiplied; those of
     * FMLA_KV_FP8_576 to codes, whose scale multiplies scores and out in fp32 (docs/semantics.md, "Cache
     * formats"). On a GPU q must then not be fp16. */
    const fmla_tensor *kv_cache;
    /* [b, max_pages] int32: entry i is the page of keys i · page_size to (i + 1) · page_size - 1. Entries
     * past ceil(length / page_size) are never used and may hold anything. NULL: page r holds the keys of
     * request r, pages ≥ b. */
    const fmla_tensor *block_table;
    const fmla_tensor *seqlens;   /* [b] int32: keys per request; clamped to [0, max_pages · page_size] */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    const fmla_tensor *out;       /* [b, s_q, h_q, d_v] in the type of q, bf16 if q has codes; written */
    const fmla_tensor *lse;       /* [b, h_q, s_q] fp32, written; NULL = not wanted */
    /* From fmla_decode_plan for this b; NULL = planned inside the call. A plan made for other lengths is
     * safe; one made for other heads is safe but unbalanced. */
    const void *plan;
    size_t plan_size;      /* in bytes */
    void *workspace;       /* fmla_dense_decode_workspace_size bytes on the device of q */
    size_t workspace_size; /* in bytes */
    void *stream;          /* CUDA stream; not used on the CPU */
    const char *kernel;    /* name of a kernel to force (see fmla_capabilities); NULL = the best */
    int32_t kv_format;     /* FMLA_KV_…; may be 0 if kv_cache has the type of q */
    int32_t products;      /* FMLA_PRODUCTS_…; FP8 only over FMLA_KV_FP8_576 and FMLA_KV_FP8_656 */
    float softmax_scale;   /* 0 = 1/sqrt(d_qk); finite */
    int32_t causal;        /* 1: token j of s_q sees keys t ≤ s_k - s_q + j; 0: all keys */
    int32_t lse_empty;     /* FMLA_LSE_EMPTY_… */
    int32_t log_base;      /* FMLA_LOG_… */
    /* 1: a request's result has the same bits for any batch around it and any position in the batch; `plan`
     * is then ignored. Needs workspace in proportion to the capacity of the table. */
    int32_t batch_invariant;
    /* Partitions of the plan made inside the call, in [0, 65536]; 0 = chosen by device. With a plan in host
     * memory: 0 or the plan's own number. With a plan in device memory, which the host cannot read: the
     * plan's own number. With tables: 0 or their rows. */
    int32_t num_partitions;
    /* Give both to pass the tables of a plan for this b (from fmla_decode_plan, or copies of those in a
     * fmla_plan_view) instead of `plan`, each in its own memory on the device of q. Tables do not record
     * their batch. The CPU refuses tables of another batch; on a GPU they cause no invalid access, but
     * results may be wrong, and requests that they omit are not written. Ignored if batch_invariant is set.
     * FlashMLA's own tables have other fields. */
    const fmla_tensor *partitions; /* [partitions of the plan, 8] int32, rows contiguous, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
    const fmla_tensor *kv_scale;   /* [1] fp32: the scale of an FMLA_KV_FP8_576 cache; NULL = 1 */
    const fmla_tensor *q_scale;    /* [1] fp32: the scale of q if it has codes; NULL = 1 */
} fmla_dense_decode_args;

/* Returns the workspace of fmla_dense_decode for these arguments, in bytes, and its alignment; either may be
 * NULL. Both follow from shapes, types, options and device: workspace, stream and the data of tensors are
 * ignored and may be NULL, but a plan in host memory is read. The size is the same for all kernels of a GPU,
 * because the choice of kernel depends on addresses, which a query does not have. On the CPU it grows with
 * fmla_num_threads().
 * Errors: as fmla_dense_decode, except those of the workspace. */
FMLA_API fmla_status fmla_dense_decode_workspace_size(const fmla_dense_decode_args *args, size_t *bytes,
                                                      size_t *alignment);

/* Returns an upper bound of the workspace, for a workspace that is made once and serves calls of many sizes.
 * It covers every call of fmla_dense_decode whose b, s_q, h_q, pages and max_pages are at most those of these
 * arguments and whose types, d_qk, d_v, h_kv, page_size, options, device and kernel are the same, with or
 * without attn_sink and lse, and for any data and strides. The calls may plan inside or receive a plan or
 * tables, provided that these have as many partitions as these arguments name (by num_partitions, the rows of
 * partitions, or a plan in host memory) or, if they name none, as many as fmla_decode_plan and the call
 * itself choose for their sizes. On the CPU fmla_num_threads() must be the same.
 * The bound never falls as sizes grow, and is at most about twice the largest workspace of a covered call.
 * The result of fmla_dense_decode_workspace_size also grows with b, pages and max_pages, but with s_q and h_q
 * only if batch_invariant is set or the partitions are named; otherwise it may fall.
 * Errors: as fmla_dense_decode_workspace_size. */
FMLA_API fmla_status fmla_dense_decode_workspace_bound(const fmla_dense_decode_args *args, size_t *bytes,
                                                       size_t *alignment);

/* Returns the kernel that fmla_dense_decode would run with these arguments, by its name in fmla_capabilities
 * (static). Reads the same arguments as fmla_dense_decode_workspace_size.
 * Errors: as fmla_dense_decode_workspace_size. */
FMLA_API fmla_status fmla_dense_decode_kernel(const fmla_dense_decode_args *args, const char **name);

/* Runs dense decode.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace, plan), FMLA_UNSUPPORTED,
 * FMLA_DEVICE_ERROR. A block_table entry that is used but is not a page of the cache is FMLA_INVALID_ARGUMENT
 * on the CPU and undefined on a GPU. */
FMLA_API fmla_status fmla_dense_decode(const fmla_dense_decode_args *args);

/* ---- Cache formats -------------------------------------------------------------------------- */

/* The byte layout of a token in a cache (docs/semantics.md, "Cache formats"). The caller always names it; it
 * is never guessed. The values are stable. */
typedef int32_t fmla_kv_format;
enum FMLA_INT32 {
    FMLA_KV_NONE = 0,    /* not given */
    FMLA_KV_BF16 = 1,    /* d_qk bf16 */
    FMLA_KV_FP16 = 2,    /* d_qk fp16 */
    FMLA_KV_FP8_656 = 3, /* d_qk 576: 512 e4m3, 4 f32 scales, 64 bf16 */
    FMLA_KV_FP8_584 = 4, /* d_qk 512: 448 e4m3, 64 bf16; 8 scale bytes per token after the page's tokens */
    FMLA_KV_FP8_576 = 5, /* d_qk 576: 576 e4m3; one scale for the whole cache, which multiplies exactly */
    FMLA_KV_FP8_528 = 6, /* d_qk 512: 512 e4m3, 16 ue8m0 scales */
    FMLA_KV_FP8_528_SPLIT = 7, /* as FMLA_KV_FP8_528, with all scales after the page's tokens */
    FMLA_KV_FP4_288 = 8,       /* d_qk 512: 512 e2m1 in 256 bytes, 32 e4m3 scales */
    FMLA_KV_FP4_288_SPLIT = 9, /* as FMLA_KV_FP4_288, with all scales after the page's tokens */
    FMLA_KV_FP8_528_F32 = 10   /* d_qk 512: 512 e4m3, 4 f32 scales */
};

/* ---- Sparse decode -------------------------------------------------------------------------- */

/* Attention of a few new tokens of each request over a list of cached keys per token (docs/semantics.md,
 * "Sparse decode"). It is dense decode with a key list for every query token instead of a request's keys, and
 * with one key head. */
typedef struct fmla_sparse_decode_args {
    size_t struct_size;   /* set by FMLA_INIT */
    const fmla_tensor *q; /* [b, s_q, h_q, d_qk] bf16 or fp16 */
    /* [pages, page_size, 1, d_qk] in the type of q; or [pages, page_size, 1, bytes of a token], int8,
     * uint8 or float8_e4m3fn. Strides and addresses of pages and tokens are multiples of 4 (FMLA_KV_FP8_656,
     * FMLA_KV_FP8_528_F32), 2 (FMLA_KV_FP8_584) or 1. A page of FMLA_KV_FP8_584, FMLA_KV_FP8_528_SPLIT or
     * FMLA_KV_FP4_288_SPLIT is contiguous: the stride of dimension 1 must be the bytes of a token, although
     * tokens do not lie at that stride. */
    const fmla_tensor *kv_cache;
    /* [b, s_q, topk] int32: page · page_size + slot. An entry outside [0, pages · page_size) names no key,
     * anywhere in the list. A slot listed twice counts twice. */
    const fmla_tensor *indices;
    /* [b] int32: tokens of request r use their first topk_length[r] indices; clamped to [0, topk].
     * NULL = topk. */
    const fmla_tensor *topk_length;
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    /* A second cache with its own format (extra_kv_format), page size, indices and lengths: a token sees the
     * keys that it lists in either cache. Give both of the first two or neither; the third only with them. */
    const fmla_tensor *extra_kv_cache;    /* as kv_cache */
    const fmla_tensor *extra_indices;     /* [b, s_q, extra_topk] int32 */
    const fmla_tensor *extra_topk_length; /* [b] int32 or NULL = extra_topk; clamped to [0, extra_topk] */
    const fmla_tensor *out;               /* [b, s_q, h_q, d_v] in the type of q; written */
    const fmla_tensor *lse;               /* [b, h_q, s_q] fp32, written; NULL = not wanted */
    /* From fmla_sparse_plan for this b; NULL = planned inside the call. A plan made for other lengths is
     * safe; one made for other heads is safe but unbalanced. Ignored by a GPU kernel that splits few keys
     * evenly by itself (docs/semantics.md). */
    const void *plan;
    size_t plan_size; /* in bytes */
    /* Give both to pass the plan's tables instead of `plan`, as in fmla_dense_decode_args. */
    const fmla_tensor *partitions; /* [partitions of the plan, 8] int32, rows contiguous, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
    void *workspace;               /* fmla_sparse_decode_workspace_size bytes on the device of q */
    size_t workspace_size;         /* in bytes */
    void *stream;                  /* CUDA stream; not used on the CPU */
    const char *kernel;            /* name of a kernel to force (see fmla_capabilities); NULL = the best */
    int32_t kv_format;             /* FMLA_KV_…; may be 0 if kv_cache has the type of q */
    float softmax_scale;           /* 0 = 1/sqrt(d_qk); finite */
    int32_t lse_empty;             /* FMLA_LSE_EMPTY_… */
    int32_t log_base;              /* FMLA_LOG_… */
    /* 1: a request's result has the same bits for any batch around it and any position in the batch; `plan`
     * is then ignored. Needs workspace in proportion to topk and extra_topk. */
    int32_t batch_invariant;
    int32_t num_partitions;  /* as in fmla_dense_decode_args */
    int32_t extra_kv_format; /* of extra_kv_cache: FMLA_KV_… with the same d_qk; 0 = kv_format */
    int32_t reserved;        /* 0 */
} fmla_sparse_decode_args;

/* Returns the workspace of fmla_sparse_decode for these arguments, in bytes, and its alignment; either may be
 * NULL. Reads the same kinds of arguments as fmla_dense_decode_workspace_size.
 * Errors: as fmla_sparse_decode, except those of the workspace. */
FMLA_API fmla_status fmla_sparse_decode_workspace_size(const fmla_sparse_decode_args *args, size_t *bytes,
                                                       size_t *alignment);

/* Returns an upper bound of the workspace, as fmla_dense_decode_workspace_bound does. It covers every call of
 * fmla_sparse_decode whose b, s_q, h_q, topk and extra_topk are at most these (extra_topk is 0 without
 * extra_indices) and whose types, formats, d_qk, d_v, options, device and kernel are the same, with or
 * without lengths, for caches of any pages. Plans are covered under the same conditions as there, and so are
 * plans made with b = 0.
 * The result of fmla_sparse_decode_workspace_size grows with every size if batch_invariant is set or the
 * partitions are named. Otherwise it may fall with s_q and h_q, and on GPUs of compute capability 9.0 with
 * every size: smaller batches may need more.
 * Errors: as fmla_sparse_decode_workspace_size. */
FMLA_API fmla_status fmla_sparse_decode_workspace_bound(const fmla_sparse_decode_args *args, size_t *bytes,
                                                        size_t *alignment);

/* Returns the kernel that fmla_sparse_decode would run with these arguments, by its name in fmla_capabilities
 * (static).
 * Errors: as fmla_sparse_decode_workspace_size. */
FMLA_API fmla_status fmla_sparse_decode_kernel(const fmla_sparse_decode_args *args, const char **name);

/* Runs sparse decode.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace, plan), FMLA_UNSUPPORTED,
 * FMLA_DEVICE_ERROR. No value of an index is an error. */
FMLA_API fmla_status fmla_sparse_decode(const fmla_sparse_decode_args *args);

/* ---- Sparse prefill ------------------------------------------------------------------------- */

/* Attention of prefill tokens over a list of keys per token (docs/semantics.md, "Sparse prefill"),
 * as in sparse decode but without a batch. Query head h reads key head h / (h_q / h_kv). */
typedef struct fmla_sparse_prefill_args {
    size_t struct_size;   /* set by FMLA_INIT */
    const fmla_tensor *q; /* [s_q, h_q, d_qk] bf16 */
    /* [s_kv, h_kv, d_qk] bf16; or pages, [pages, page_size, 1, d_qk] bf16 or bytes as in
     * fmla_sparse_decode_args, for which s_kv = pages · page_size and h_kv = 1. */
    const fmla_tensor *kv;
    /* [s_q, h_kv, topk] int32: a token of kv; for pages, page · page_size + slot. An entry outside [0, s_kv)
     * names no key, anywhere in the list. A token listed twice counts twice. */
    const fmla_tensor *indices;
    /* [s_q] int32: token i uses its first topk_length[i] indices; clamped to [0, topk]. NULL = topk */
    const fmla_tensor *topk_length;
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    const fmla_tensor *out;       /* [s_q, h_q, d_v] bf16; written */
    /* [s_q, h_q] fp32, written: the largest score after softmax_scale, in the base of lse; -inf if the row
     * sees no key. NULL = not wanted. */
    const fmla_tensor *max_logits;
    const fmla_tensor *lse; /* [s_q, h_q] fp32, written; NULL = not wanted */
    void *workspace;        /* fmla_sparse_prefill_workspace_size bytes on the device of q */
    size_t workspace_size;  /* in bytes */
    void *stream;           /* CUDA stream; not used on the CPU */
    const char *kernel;     /* name of a kernel to force (see fmla_capabilities); NULL = the best */
    int32_t kv_format;      /* FMLA_KV_… whose tokens have d_qk values; may be 0 if kv is bf16 */
    float softmax_scale;    /* 0 = 1/sqrt(d_qk); finite */
    int32_t lse_empty;      /* FMLA_LSE_EMPTY_… */
    int32_t log_base;       /* FMLA_LOG_…, of lse and max_logits */
} fmla_sparse_prefill_args;

/* Returns the workspace of fmla_sparse_prefill for these arguments, in bytes, and its alignment; either may
 * be NULL. Reads the same kinds of arguments as fmla_dense_decode_workspace_size. The size is 0 on a GPU,
 * except on Hopper for calls so short that they split lists: up to 68096 bytes per SM over bf16 keys, and
 * over pages of bytes up to 131592 bytes per SM and 256 more.
 * Errors: as fmla_sparse_prefill, except those of the workspace. */
FMLA_API fmla_status fmla_sparse_prefill_workspace_size(const fmla_sparse_prefill_args *args, size_t *bytes,
                                                        size_t *alignment);

/* Returns an upper bound of the workspace, as fmla_dense_decode_workspace_bound does. It covers every call of
 * fmla_sparse_prefill whose s_q, h_q and topk are at most these and whose types, formats, d_qk, d_v, h_kv,
 * options, device and kernel are the same, with or without lengths, for any number of keys. The result of
 * fmla_sparse_prefill_workspace_size may fall with every size.
 * Errors: as fmla_sparse_prefill_workspace_size. */
FMLA_API fmla_status fmla_sparse_prefill_workspace_bound(const fmla_sparse_prefill_args *args, size_t *bytes,
                                                         size_t *alignment);

/* Returns the kernel that fmla_sparse_prefill would run with these arguments, by its name in
 * fmla_capabilities (static).
 * Errors: as fmla_sparse_prefill_workspace_size. */
FMLA_API fmla_status fmla_sparse_prefill_kernel(const fmla_sparse_prefill_args *args, const char **name);

/* Runs sparse prefill.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No
 * value of an index is an error. */
FMLA_API fmla_status fmla_sparse_prefill(const fmla_sparse_prefill_args *args);

/* ---- Dense MHA ------------------------------------------------------------------------------ */

/* Attention of all heads over separate keys and values, as in prefill and training (docs/semantics.md, "Dense
 * MHA"). Query head h reads key head h / (h_q / h_kv). Either every request has s_q tokens and s_k keys; or
 * requests are packed: their tokens, and their keys, follow each other in one dimension, cu_seqlens_q and
 * cu_seqlens_k give the starts, and tensors have no dimension b. */
typedef struct fmla_mha_forward_args {
    size_t struct_size;   /* set by FMLA_INIT */
    const fmla_tensor *q; /* [b, s_q, h_q, d_qk] or [tokens, h_q, d_qk], bf16 or fp16 */
    const fmla_tensor *k; /* [b, s_k, h_kv, d_qk] or [tokens of keys, h_kv, d_qk], in the type of q */
    const fmla_tensor *v; /* [b, s_k, h_kv, d_v] or [tokens of keys, h_kv, d_v], in the type of q */
    /* [b + 1] int32: request r has tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1. Values are clamped to
     * the number of tokens and to at least the value before. NULL if q has four dimensions. */
    const fmla_tensor *cu_seqlens_q;
    const fmla_tensor *cu_seqlens_k; /* the same of keys */
    /* [b, s_q, h_q, d_v] or [tokens, h_q, d_v] in the type of q; written. Tokens of no request are not
     * written. */
    const fmla_tensor *out;
    /* [b, h_q, s_q] or [h_q, tokens] fp32, the layout of fmla_merge; written. NULL = not wanted. */
    const fmla_tensor *lse;
    /* With cu_seqlens: upper bounds of a request's tokens and keys, below 2^31; 0 = not known. Where lengths in use
     * are given, of these. The results of a longer request are wrong. */
    int64_t max_s_q;       /* tokens */
    int64_t max_s_k;       /* keys */
    void *workspace;       /* fmla_mha_forward_workspace_size bytes on the device of q */
    size_t workspace_size; /* in bytes */
    void *stream;          /* CUDA stream; not used on the CPU */
    const char *kernel;    /* name of a kernel to force (see fmla_capabilities); NULL = the best */
    float softmax_scale;   /* 0 = 1/sqrt(d_qk); finite */
    int32_t causal;        /* 1: token j of s_q sees keys t ≤ s_k - s_q + j */
    int32_t lse_empty;     /* FMLA_LSE_EMPTY_… */
    int32_t log_base;      /* FMLA_LOG_… */
    /* Where tiles of query rows are too few for a GPU or for the threads, cuda-sm90, cuda-sm80 and the CPU's kernels
     * cut their keys into splits, whose results they join. 0: a request is split by its own lengths, so that it has
     * the same bits in any batch with the same max_s_q; on a GPU with cu_seqlens only if max_s_q is given, and is so
     * small that no request can have more tiles than run at the same time. 1: by all requests, which is faster for
     * several, and gives the same bits only in the same batch; on the CPU as 0. */
    int32_t batch_dependent;
    /* Splits of every request, at most 64; 1 = none; 0 = as many as take the least time. On a GPU a request of more
     * than 2^24 query rows times splits is not split. */
    int32_t num_splits;
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    /* [b] int32 or NULL: only the first seqused_q[r] tokens of request r count, clamped to [0, those that it has]; causal
     * is aligned to them. What follows them is padding, which may hold anything: there out becomes 0, and lse that
     * of a row without keys. */
    const fmla_tensor *seqused_q;
    const fmla_tensor *seqused_k; /* the same of keys, independently; padding is not read */
} fmla_mha_forward_args;

/* Returns the workspace of fmla_mha_forward for these arguments, in bytes, and its alignment; either may be
 * NULL. Reads the same kinds of arguments as fmla_dense_decode_workspace_size. The size grows with every
 * dimension on the CPU; it is 256 bytes on Hopper and 0 on other GPUs. Where a GPU splits the keys of requests, each
 * of their query rows takes 4 · d_v + 8 bytes more a split; then the size may fall as dimensions grow.
 * Errors: as fmla_mha_forward, except those of the workspace. */
FMLA_API fmla_status fmla_mha_forward_workspace_size(const fmla_mha_forward_args *args, size_t *bytes,
                                                     size_t *alignment);

/* Returns an upper bound of the workspace, as fmla_dense_decode_workspace_bound does. It covers every call of
 * fmla_mha_forward whose b, s_q or tokens, keys and h_q are at most these and whose types, d_qk, d_v, options,
 * device and kernel are the same.
 * Errors: as fmla_mha_forward_workspace_size. */
FMLA_API fmla_status fmla_mha_forward_workspace_bound(const fmla_mha_forward_args *args, size_t *bytes,
                                                      size_t *alignment);

/* Returns the kernel that fmla_mha_forward would run with these arguments, by its name in fmla_capabilities
 * (static).
 * Errors: as fmla_mha_forward_workspace_size. */
FMLA_API fmla_status fmla_mha_forward_kernel(const fmla_mha_forward_args *args, const char **name);

/* Runs dense MHA. A request's result has the same bits for any batch around it, unless batch_dependent is set.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No
 * value in cu_seqlens is an error. */
FMLA_API fmla_status fmla_mha_forward(const fmla_mha_forward_args *args);

/* ---- Gradients of dense MHA ------------------------------------------------------------------ */

/* The gradients of fmla_mha_forward (docs/semantics.md, "Dense MHA, backward"), by the method of
 * FlashAttention-2 (arXiv 2307.08691, section 3.1.2): probabilities are recomputed from q, k and lse.
 * Requests are separate or packed, as in fmla_mha_forward_args. dk and dv are summed over the query heads
 * that read the same key head. */
typedef struct fmla_mha_backward_args {
    size_t struct_size;              /* set by FMLA_INIT */
    const fmla_tensor *q;            /* as in the forward call */
    const fmla_tensor *k;            /* as in the forward call */
    const fmla_tensor *v;            /* as in the forward call */
    const fmla_tensor *cu_seqlens_q; /* as in the forward call */
    const fmla_tensor *cu_seqlens_k; /* as in the forward call */
    const fmla_tensor *out; /* [b, s_q, h_q, d_v] or [tokens, h_q, d_v] in the type of q: its output */
    /* [b, h_q, s_q] or [h_q, tokens] fp32: its log-sum-exp, in base log_base. A row whose lse is +inf or -inf
     * saw no key, and its gradients are 0. */
    const fmla_tensor *lse;
    const fmla_tensor *dout; /* the gradient of out, with its shape and the type of q */
    /* The gradients of q, k and v, with their shapes and the type of q; written. They may be views of one
     * packed tensor. Tokens of a request without keys, keys of a request without tokens, and tokens and keys
     * of no request become 0. */
    const fmla_tensor *dq; /* of q */
    const fmla_tensor *dk; /* of k */
    const fmla_tensor *dv; /* of v */
    /* With cu_seqlens: upper bounds of a request's tokens and keys, below 2^31; 0 = not known. Where lengths in use
     * are given, of these. The results of a longer request are wrong. */
    int64_t max_s_q;       /* tokens */
    int64_t max_s_k;       /* keys */
    void *workspace;       /* fmla_mha_backward_workspace_size bytes on the device of q */
    size_t workspace_size; /* in bytes */
    void *stream;          /* CUDA stream; not used on the CPU */
    const char *kernel;    /* name of a kernel to force (see fmla_capabilities); NULL = the best */
    float softmax_scale;   /* as in the forward call; 0 = 1/sqrt(d_qk); finite */
    int32_t causal;        /* as in the forward call */
    int32_t deterministic; /* 1: dq also has the same bits in every run, as it always has on the CPU */
    int32_t log_base;      /* FMLA_LOG_…, of lse and dlse */
    /* The sink of the forward call, [h_q] fp32; NULL = none. */
    const fmla_tensor *attn_sink;
    /* The gradient of lse, in its shape and base, fp32; NULL = 0. It is not used where a row sees no key. */
    const fmla_tensor *dlse;
    /* The gradient of attn_sink, [h_q] fp32; written. NULL = not wanted. */
    const fmla_tensor *d_attn_sink;
    /* As in the forward call. Padding has gradients 0, which are written, and may hold anything. */
    const fmla_tensor *seqused_q;
    const fmla_tensor *seqused_k;
} fmla_mha_backward_args;

/* Returns the workspace of fmla_mha_backward for these arguments, in bytes, and its alignment; either may be
 * NULL. Reads the same kinds of arguments as fmla_dense_decode_workspace_size. The size grows with
 * b, s_q, s_k and h_q, and linearly with tokens: on the CPU it is 8 bytes per row, 4 bytes per 64 rows of a head,
 * 56 bytes per request, and scratch per thread; on Hopper 4 · d_qk + 8 bytes per row of whole tiles, with causal and
 * h_q above h_kv also 4 · (d_qk + d_v) bytes per key of whole blocks and key head, and little more.
 * Errors: as fmla_mha_backward, except those of the workspace. */
FMLA_API fmla_status fmla_mha_backward_workspace_size(const fmla_mha_backward_args *args, size_t *bytes,
                                                      size_t *alignment);

/* Returns an upper bound of the workspace, as fmla_dense_decode_workspace_bound does. It covers every call of
 * fmla_mha_backward whose b, s_q, s_k or tokens, and heads are at most these and whose types, d_qk, d_v,
 * options, device and kernel are the same.
 * Errors: as fmla_mha_backward_workspace_size. */
FMLA_API fmla_status fmla_mha_backward_workspace_bound(const fmla_mha_backward_args *args, size_t *bytes,
                                                       size_t *alignment);

/* Returns the kernel that fmla_mha_backward would run with these arguments, by its name in fmla_capabilities
 * (static).
 * Errors: as fmla_mha_backward_workspace_size. */
FMLA_API fmla_status fmla_mha_backward_kernel(const fmla_mha_backward_args *args, const char **name);

/* Computes the gradients. dk, dv and d_attn_sink have the same bits in every run; on the CPU all have, for any
 * number of threads, and dq, dk and dv for any batch around a request.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No
 * value in cu_seqlens or lse is an error. */
FMLA_API fmla_status fmla_mha_backward(const fmla_mha_backward_args *args);

/* ---- Merge ---------------------------------------------------------------------------------- */

/* Merges n results over disjoint sets of keys into the result over all keys (docs/semantics.md, "Merge"); the
 * parts may come from several machines. A part whose lse is +inf or -inf saw no key, and its out is not read.
 * Parts are merged in order of their index.
 * The result may replace one part: out may be exactly one part (the same type, address and strides), and lse
 * exactly one part's lse. Any other memory that out or lse shares with another tensor is an error. */
typedef struct fmla_merge_args {
    size_t struct_size;           /* set by FMLA_INIT */
    const fmla_tensor *out_parts; /* [n, b, s_q, h_q, d_v] bf16, fp16 or fp32; n is 1 with `part` */
    const fmla_tensor *lse_parts; /* [n, b, h_q, s_q] fp32 */
    /* One more part, after those of out_parts and lse_parts, for callers whose parts are not one tensor: two
     * results are merged with n = 1. Both or neither; NULL with `part`. */
    const fmla_tensor *out_last;  /* [b, s_q, h_q, d_v] in the type of out_parts */
    const fmla_tensor *lse_last;  /* [b, h_q, s_q] fp32 */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL; applied once, to the merged result */
    const fmla_tensor *out;       /* [b, s_q, h_q, d_v] bf16, fp16 or fp32; written */
    const fmla_tensor *lse;       /* [b, h_q, s_q] fp32; written; NULL = not wanted */
    void *stream;                 /* CUDA stream; not used on the CPU */
    const char *kernel;           /* name of a kernel to force; NULL = the best */
    int32_t lse_empty;            /* FMLA_LSE_EMPTY_…, of the result; parts may use either */
    int32_t log_base;             /* FMLA_LOG_…, of the parts and of the result */
    /* 1 + the index of the only part whose out counts, at most n; 0 = all. Then out_parts has this part alone,
     * and `out` is its contribution to the merged result: out_part · exp(lse_part - lse), with the sink's factor.
     * The sum of the contributions of all parts is the merged result. Ranks that exchanged their lse scale their
     * own out in this way before they add them up. */
    int64_t part;
} fmla_merge_args;

/* Merges the parts.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_merge(const fmla_merge_args *args);

/* ---- Cache append --------------------------------------------------------------------------- */

/* Which of the 64 RoPE values form pair i of 32, and are rotated together. */
enum {
    FMLA_ROPE_NONE = 0,
    FMLA_ROPE_INTERLEAVED = 1, /* 2 i and 2 i + 1 */
    FMLA_ROPE_HALVES = 2       /* i and 32 + i */
};

/* Writes the vectors of new tokens into pages, quantised to the format (docs/semantics.md, "Cache append").
 * Slot s is slot s mod page_size of page s / page_size. All other bytes of the cache keep their values. */
typedef struct fmla_cache_append_args {
    size_t struct_size;        /* set by FMLA_INIT */
    const fmla_tensor *latent; /* [tokens, d_qk - 64] bf16, fp16 or fp32; [tokens, d_qk] without rope */
    /* [tokens, 64] in the type of latent: the last 64 values of each token. NULL: latent contains them.
     * latent and rope may be two views of one tensor. */
    const fmla_tensor *rope;
    /* [pages, page_size, 1, d_qk] bf16 or fp16; or [pages, page_size, 1, bytes of a token: 656, 584, 576, 528
     * or 288], int8, uint8 or float8_e4m3fn. The bytes of a token are contiguous, and with FMLA_KV_FP8_584,
     * FMLA_KV_FP8_528_SPLIT and FMLA_KV_FP4_288_SPLIT those of a page. Written. */
    const fmla_tensor *kv_cache;
    /* [tokens] int64: the slot of each token; -1 skips the token and ignores its vector. If a slot occurs
     * twice, the last token wins on the CPU; on a GPU the result is unspecified and may mix the tokens. */
    const fmla_tensor *slot_mapping;
    void *stream;       /* CUDA stream; not used on the CPU */
    const char *kernel; /* name of a kernel to force; NULL = the best */
    int32_t kv_format;  /* FMLA_KV_…, not FMLA_KV_NONE */
    float cache_scale;  /* of FMLA_KV_FP8_576: finite and > 0, 0 = 1. Other formats: 0 */
    /* Transforms of the values in the same pass before they are written, for d_qk 512 or 576: RMS norm of the
     * first 512, then RoPE of the last 64 (docs/semantics.md, "Cache append"). Each may be used alone; all
     * zero means neither. */
    const fmla_tensor *norm_weight; /* [512], in the type of latent; NULL: no norm */
    const fmla_tensor *positions;   /* [tokens] int32 or int64: rows of rope_table; NULL: no RoPE */
    /* [max_positions, 64] fp32: per position 32 cosines, then 32 sines (fmla_rope_table); NULL: no RoPE. */
    const fmla_tensor *rope_table;
    float norm_eps;     /* added to the mean of the squares; finite and ≥ 0; 0 without norm_weight */
    int32_t rope_pairs; /* FMLA_ROPE_… */
} fmla_cache_append_args;

/* Appends the tokens.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. On the CPU a slot that is neither -1
 * nor in [0, pages · page_size), or a position outside [0, max_positions) of a token that is not skipped, is
 * FMLA_INVALID_ARGUMENT, and nothing is written; on a GPU such a token is skipped. */
FMLA_API fmla_status fmla_cache_append(const fmla_cache_append_args *args);

/* Fills a rope_table in contiguous host memory for positions 0 … positions - 1: entry i of a row is
 * cos(position · base^(-i/32)) and entry 32 + i the sine, computed in double precision and rounded to fp32.
 * Models with other frequencies (YaRN, for example) must fill the table themselves.
 * Errors: FMLA_INVALID_ARGUMENT (positions < 0; base not finite or ≤ 0; table NULL with positions > 0). */
FMLA_API fmla_status fmla_rope_table(float *table, int64_t positions, double base);

/* ---- Cache gather --------------------------------------------------------------------------- */

/* Reads the vectors of tokens out of pages, decoded to the values that attention uses (docs/semantics.md,
 * "Cache gather"). */
typedef struct fmla_cache_gather_args {
    size_t struct_size;          /* set by FMLA_INIT */
    const fmla_tensor *kv_cache; /* as in fmla_cache_append_args; read */
    const fmla_tensor *slots; /* [tokens] int64; a value that is no slot of the cache, as -1, gives zeros */
    const fmla_tensor *out;   /* [tokens, d_qk] bf16, fp16 or fp32; written */
    void *stream;             /* CUDA stream; not used on the CPU */
    const char *kernel;       /* name of a kernel to force; NULL = the best */
    int32_t kv_format;        /* FMLA_KV_…, not FMLA_KV_NONE */
    float cache_scale;        /* of FMLA_KV_FP8_576: finite and > 0, 0 = 1. Other formats: 0 */
} fmla_cache_gather_args;

/* Gathers the tokens.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_cache_gather(const fmla_cache_gather_args *args);

/* ---- Cache convert --------------------------------------------------------------------------- */

/* Copies tokens from pages of one format and page size into pages of another with the same d_qk, in one pass
 * (docs/semantics.md, "Cache convert"). The result is that of fmla_cache_gather and fmla_cache_append with
 * intermediate values in a type that holds every element exactly. */
typedef struct fmla_cache_convert_args {
    size_t struct_size;           /* set by FMLA_INIT */
    const fmla_tensor *src_cache; /* as kv_cache of fmla_cache_append_args, in src_format; read */
    const fmla_tensor *src_slots; /* [tokens] int64: the slot of each token */
    const fmla_tensor *dst_cache; /* the same in dst_format; written; must not overlap src_cache */
    /* [tokens] int64: the new slot of each token. -1 here or in src_slots skips the token. A slot that occurs
     * twice here is treated as in fmla_cache_append_args. */
    const fmla_tensor *dst_slots;
    void *stream;       /* CUDA stream; not used on the CPU */
    const char *kernel; /* name of a kernel to force; NULL = the best */
    int32_t src_format; /* FMLA_KV_…, not FMLA_KV_NONE */
    int32_t dst_format; /* the same */
    float src_scale;    /* of FMLA_KV_FP8_576: finite and > 0, 0 = 1. Other formats: 0 */
    float dst_scale;    /* the same */
} fmla_cache_convert_args;

/* Converts the tokens.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. On the CPU a slot that is neither -1
 * nor in its cache is FMLA_INVALID_ARGUMENT, and nothing is written; on a GPU its token is skipped. */
FMLA_API fmla_status fmla_cache_convert(const fmla_cache_convert_args *args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLASHMLA_FLASHMLA_H */
