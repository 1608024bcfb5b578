/* SPDX-License-Identifier: MIT
 *
 * flashmla.h - attention kernels for multi-head latent attention (MLA), as a C library.
 *
 * This header is the whole contract. It compiles alone as C11 and as C++17. What every operation computes,
 * with its edge cases, is written in docs/semantics.md; here stand shapes, types, errors and threading.
 *
 * WORDS
 *   b                batch: requests             s_q, s_k   query tokens, keys of a request
 *   h_q, h_kv        query heads, key heads      d_qk, d_v  head sizes of Q·K and of V
 *   page             a block of page_size consecutive cache slots
 *   row              one (query token, query head)
 *   split            a part of one request's keys that is handled apart and merged afterwards
 *   partition        the list of (request, key range) that one worker is given
 *
 * CONVENTIONS
 *   Tensors          A fmla_tensor has the layout of DLPack's DLTensor; a DLTensor * may be cast to it. The
 *                    device of the tensors chooses the back end: host memory runs on the CPU, device memory
 *                    on that GPU. Sizes and strides count elements and are 64-bit. Strides are not negative;
 *                    only the innermost dimension must be contiguous. Element alignment is required; bases
 *                    and strides that are multiples of 16 bytes are fastest.
 *   Arguments        One struct an operation, made by FMLA_INIT(type); a member that is zero has its default.
 *   Memory           The caller owns all of it. No function keeps a pointer after it returned (GPU
 *                    operations: after the stream has passed them), and no operation allocates, but for the
 *                    threads that the built-in loop starts when it first wants them. Outputs do
 *                    not overlap anything else. A workspace may hold anything on entry and serves one call in
 *                    flight; a plan is read-only, may serve many calls at once, and may be copied to other memory
 *                    that is 16-byte aligned.
 *   Errors           Every function that can fail returns a fmla_status. On failure fmla_last_error() names
 *                    the argument, what came and what is allowed. What is wrong with a call is found before any
 *                    of it runs: nothing was written. FMLA_DEVICE_ERROR alone, which operations on a GPU may
 *                    answer, can come later, where the driver refuses a step behind others that already went to
 *                    the stream. Outputs and workspace may hold anything then, once the stream has passed these
 *                    steps; inputs and all other memory are as they were, and the call may be made again. What
 *                    goes wrong on the GPU after a call returned is told by a later call of the driver in that
 *                    context, which may be inside another operation.
 *                    Nothing prints, exits, aborts or throws.
 *   Threads          Every function may be called from any thread at any time. CPU operations return when the
 *                    result is there; they run on the threads that fmla_set_num_threads and
 *                    fmla_set_parallel_for arrange. After a fork, whatever other threads were doing, the child may
 *                    make CPU calls: they start threads of its own, and give the same bits. The threads of the
 *                    built-in loop stay, asleep, until the process ends, and so does the shared library after
 *                    dlclose; what has the archive in it must not be unloaded after CPU calls. They run on the
 *                    processors of the process's first thread, and keep a process alive whose threads have all
 *                    left by pthread_exit. No thread may be cancelled (pthread_cancel) inside of a call.
 *                    On processors with AMX the first call asks Linux to let the process use it (arch_prctl,
 *                    ARCH_REQ_XCOMP_PERM), for all its threads. Frames of signals are larger from then on, and
 *                    sigaltstack refuses a stack below sysconf(_SC_MINSIGSTKSZ), about 11 KiB. Where the process
 *                    has such a stack already, Linux refuses, and the other kernels run.
 *   GPUs             The driver is loaded at the first use of a GPU. An operation runs in the calling thread's
 *                    current context, which must be of the tensors' device (else FMLA_INVALID_ARGUMENT); a
 *                    thread without one borrows the device's primary context for the call. Between calls that
 *                    context may be reset (cuDevicePrimaryCtxReset), and others may be destroyed.
 *   Graphs           On a GPU, operations are asynchronous on args->stream, never synchronise, never read
 *                    device memory on the host, and can be captured into a CUDA graph. On the CPU, stream is
 *                    not used.
 *   Determinism      The same inputs on the same device with the same build (on the CPU: and the same number
 *                    of threads, on which the default number of partitions depends) give the same bits.
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

/* What follows `enum`: every constant below is an int32_t wherever the language can say so; in C before C23 clang can, by
 * which binding generators (bindgen for one) read headers. Elsewhere it is an int of the same values. */
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

/* As one number, for #if: major * 10000 + minor * 100 + patch. */
#define FMLA_VERSION (FMLA_VERSION_MAJOR * 10000 + FMLA_VERSION_MINOR * 100 + FMLA_VERSION_PATCH)

/* The FMLA_VERSION of the library that is linked. Compare the two to find a header and a library that do not belong
 * together. Never fails. */
FMLA_API int32_t fmla_version(void);

/* The same as text, "0.2.0". Static storage. */
FMLA_API const char *fmla_version_string(void);

/* ---- Status and errors ---------------------------------------------------------------------- */

/* The values are stable: programs may store them. */
typedef int32_t fmla_status;
enum FMLA_INT32 {
    FMLA_OK = 0,
    FMLA_INVALID_ARGUMENT = 1, /* the call can never work as written */
    FMLA_UNSUPPORTED = 2,      /* a sensible call that no kernel of this build, or on this machine, can run */
    FMLA_BUFFER_TOO_SMALL = 3, /* workspace or plan buffer: the message says how many bytes are needed */
    FMLA_DEVICE_ERROR = 4      /* the GPU driver refused something: the message has its words; see Errors */
};

/* The name of a status, "FMLA_OK". Static storage; never NULL. */
FMLA_API const char *fmla_status_name(fmla_status status);

/* What went wrong in the last failed call of this thread, as
 * "dense_decode: block_table: dtype is int64, must be int32"; "" if none has failed yet.
 * The text stays valid until the next failing call of this thread. */
FMLA_API const char *fmla_last_error(void);

/* ---- Tensors (the layout of DLPack's DLTensor, field for field) ----------------------------- */

enum FMLA_INT32 {
    FMLA_DEVICE_CPU = 1,
    FMLA_DEVICE_CUDA = 2,
    FMLA_DEVICE_CUDA_HOST = 3 /* pinned; used as host memory */
};

typedef struct fmla_device {
    int32_t device_type; /* FMLA_DEVICE_… (DLPack's DLDeviceType) */
    int32_t id;          /* which one of that type, from 0 */
} fmla_device;

enum FMLA_INT32 { FMLA_TYPE_INT = 0, FMLA_TYPE_UINT = 1, FMLA_TYPE_FLOAT = 2, FMLA_TYPE_BFLOAT = 4 };

typedef struct fmla_dtype {
    uint8_t code;   /* FMLA_TYPE_… (DLPack's DLDataTypeCode) */
    uint8_t bits;   /* of one element: 16 */
    uint16_t lanes; /* 1 */
} fmla_dtype;

typedef struct fmla_tensor {
    void *data;
    fmla_device device;
    int32_t ndim;
    fmla_dtype dtype;
    const int64_t *shape;   /* [ndim] */
    const int64_t *strides; /* [ndim], in elements; NULL = contiguous, the last dimension fastest */
    uint64_t byte_offset;   /* added to data */
} fmla_tensor;

/* ---- Argument structs ----------------------------------------------------------------------- */

/* FMLA_INIT(type) is a value of that struct type with struct_size set and everything else zero:
 *     fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
 * struct_size tells the library which version of the struct its caller was compiled with. Every published
 * size is accepted. A larger one (by up to 4096 bytes) is accepted if the part unknown to the library is zero, and
 * else FMLA_UNSUPPORTED; any other size is FMLA_INVALID_ARGUMENT. Structs
 * have no padding: they grow by whole members, and reserved ones fill them to a multiple of 8 bytes. */
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

/* One piece of work. `index` is in [0, count); `worker` in [0, workers) selects this piece's scratch memory,
 * so no two pieces that run at the same time may be given the same worker. */
typedef void (*fmla_task)(void *task_data, int64_t index, int32_t worker);

/* Runs task(task_data, i, worker) for every i in [0, count) exactly once, in any order, and returns when all
 * have returned. Several host threads may call it at once. It must not fail. */
typedef void (*fmla_parallel_for)(void *pool, int64_t count, fmla_task task, void *task_data);

/* Sends CPU work through the caller's own threads: `run` with `pool` as its first argument, using worker
 * numbers in [0, workers). run = NULL goes back to the built-in loop (workers is then not read). The
 * setting is global and taken up by the calls that start afterwards; run and pool must stay valid while such
 * calls are in flight.
 * Errors: FMLA_INVALID_ARGUMENT if run is given and workers is not in [1, 4096]. */
FMLA_API fmla_status fmla_set_parallel_for(fmla_parallel_for run, void *pool, int32_t workers);

/* How many threads the built-in loop uses at most: n in [1, 4096]; 0 = the environment variable OMP_NUM_THREADS, read
 * once, else all processors that the process may run on, the default. A call wakes as many of them as its work pays for,
 * short calls on a busy machine none; its bits depend on n alone. A workspace size asked before a change may be too small after it: the call then says
 * so.
 * Errors: FMLA_INVALID_ARGUMENT for other n. */
FMLA_API fmla_status fmla_set_num_threads(int32_t n);

/* How many workers the next CPU call may use. Never fails. */
FMLA_API int32_t fmla_num_threads(void);

/* ---- What runs here ------------------------------------------------------------------------- */

/* Types of elements that a kernel takes, as bits. */
enum FMLA_INT32 { FMLA_TAKES_BF16 = 1 << 0, FMLA_TAKES_FP16 = 1 << 1, FMLA_TAKES_FP32 = 1 << 2 };

/* One kernel of the library, seen from one device. All strings are static. */
typedef struct fmla_capability {
    size_t struct_size;
    const char *operation; /* "dense_decode" */
    const char *kernel;    /* "cpu-generic"; NULL in a row that says that the operation has no kernel there */
    const char *reason;    /* why it does not run here; "" if it does */
    const char *part_of;   /* the kernel that runs this one where it suits the call; "" for all others */
    int32_t available;     /* 1: this kernel runs on this device */
    int32_t forced_only;   /* 1: the oracle, or a part; runs only when named, and never counts as support */
    int32_t types;      /* of vectors that are no cache's: bits FMLA_TAKES_…; 0 where they play no part */
    int32_t kv_formats; /* bits 1 << FMLA_KV_… that a call may name; 0 where it names none, or any */
    int32_t d_qk[4];    /* the sizes that are taken, then zeros; without one, any */
    int32_t d_v[4];
    int32_t products; /* bits 1 << FMLA_PRODUCTS_… that a call may name; 0 where it names none */
    int32_t reserved;
} fmla_capability;

/* The index-th row for a device, in order of operation and then of preference: of the available kernels whose
 * features cover a call, the first runs. Walk it with index = 0, 1, … until FMLA_INVALID_ARGUMENT.
 * A kernel can be forced by name: by the call (args.kernel) or, for calls that name none, by the environment
 * variable FLASHMLA_KERNEL="cpu-generic" or "dense_decode=ref,merge=cpu-generic" (read once, at first use).
 * FLASHMLA_GPU_CAPABILITY=86 lets each GPU stand for one of this compute capability, with no more shared memory than such
 * a one has: kernels are chosen as there. It is for tests of what other GPUs do; 80, 86, 87, 89, 100, 103, 120 and 121 are known.
 * Errors: FMLA_INVALID_ARGUMENT (NULL, struct_size, index past the end, a device type that is unknown). */
FMLA_API fmla_status fmla_capabilities(fmla_device device, int64_t index, fmla_capability *capability);

/* What the library sees of one device. All strings are static. */
typedef struct fmla_device_info {
    size_t struct_size;
    const char *name;      /* "NVIDIA H200"; "" for the CPU */
    const char *reason;    /* why nothing of this build runs there; "" if something does */
    const char *built_for; /* GPUs that this build has machine code for, "80 90a"; "" without CUDA kernels */
    const char
        *needs;      /* the least driver for this build, "CUDA 13.0 (driver 580)"; "" without CUDA kernels */
    int32_t count;   /* devices of this type; 0 where there is no driver, or no build for it */
    int32_t workers; /* threads, or SMs */
    /* Of GPUs; else 0. Versions are CUDA's, 13000 for 13.0. */
    int32_t compute_capability; /* 90 for 9.0 */
    int32_t shared_bytes;       /* of shared memory that a block may have */
    int32_t driver;             /* the version that the driver is made for; 0 where it was not asked */
    int32_t driver_needed;      /* the least one that this build needs */
    int32_t built_with;         /* the version of the compiler of the kernels; 0: this build has none */
    int32_t ptx; /* GPUs from this compute capability on run code that their driver compiles; 0: none */
} fmla_device_info;

/* Describes a device; one that is not there, too: then reason says so.
 * Errors: FMLA_INVALID_ARGUMENT (NULL, struct_size, a device type that is unknown). */
FMLA_API fmla_status fmla_device_describe(fmla_device device, fmla_device_info *info);

/* Does ahead what the first call on a device would do once: detection, loading of kernels, on the CPU starting threads.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED if nothing of this build runs on the device, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_prepare(fmla_device device);

/* ---- The split plan ------------------------------------------------------------------------- */

/* How a batch of requests of different lengths is cut into equal loads (docs/semantics.md, "The split plan";
 * the method is FlashMLA's, of February 2025). The plan depends on the lengths,
 * the heads, s_q and the target only, so one plan serves every layer of a model for one step. One for dense decode and one
 * for sparse decode are different plans, made by different functions; both are described and used alike. */
typedef struct fmla_decode_plan_args {
    size_t struct_size;
    const fmla_tensor
        *seqlens;        /* [b] int32: keys of each request; clamped to [0, capacity]; b < 2^31 - 65537 */
    int64_t s_q;         /* query tokens of a request, ≥ 1 */
    int64_t h_q;         /* query heads, ≥ 1 */
    int64_t h_kv;        /* key heads, divides h_q */
    int64_t capacity;    /* max_pages * page_size of the cache; 0 = 2^31 - 1 */
    fmla_device target;  /* the device that will use the plan; {0, 0} = that of seqlens. A plan is position-
                            independent bytes: one made on the host may be copied to the device */
    int32_t num_workers; /* SMs or threads to plan for, in [0, 65536]; 0 = all that the target has */
    int32_t num_partitions; /* 0 = from num_workers, h_q, h_kv and s_q; else in [1, 65536] */
    void *plan;             /* where to write; 16-byte aligned memory of the device of seqlens */
    size_t plan_size;       /* its size in bytes, at least what fmla_decode_plan_size answered */
    void *stream;           /* CUDA stream, for seqlens in device memory */
    /* In place of `plan`, both: the tables of the plan alone (fmla_plan_view), each in memory of its own on the device of
     * seqlens; written. Their rows are then the number of partitions: num_partitions is 0 or the same, num_workers not
     * read. */
    const fmla_tensor *partitions; /* [num_partitions, 8] int32, rows without gaps, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
} fmla_decode_plan_args;

/* How many bytes a plan takes; depends on b and the number of partitions alone. args->plan, plan_size, partitions,
 * num_splits, stream and the data of seqlens are not looked at.
 * Errors: FMLA_INVALID_ARGUMENT; FMLA_UNSUPPORTED for a device without a kernel. */
FMLA_API fmla_status fmla_decode_plan_size(const fmla_decode_plan_args *args, size_t *bytes);

/* How many partitions it has, which a table of them should have as rows. Looks at what fmla_decode_plan_size looks at;
 * the lengths play no part.
 * Errors: as there. */
FMLA_API fmla_status fmla_decode_plan_partitions(const fmla_decode_plan_args *args, int32_t *count);

/* Writes the plan, or its tables.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR.
 * On a GPU it can be captured, and replayed after the lengths changed in place. */
FMLA_API fmla_status fmla_decode_plan(const fmla_decode_plan_args *args);

/* A plan for fmla_sparse_decode, whose requests are cut by the indices that count. What is said above of seqlens goes for
 * topk_length or extra_topk_length, whichever are given; with neither, the plan is in memory of `target`, and {0, 0} is host
 * memory. Members that are not described here are as in fmla_decode_plan_args. */
typedef struct fmla_sparse_plan_args {
    size_t struct_size;
    const fmla_tensor *topk_length;       /* [b] int32, clamped to [0, topk]; NULL = topk */
    const fmla_tensor *extra_topk_length; /* [b] int32, clamped to [0, extra_topk]; NULL = extra_topk */
    int64_t b;          /* requests, < 2^31 - 65537; 0 where a tensor of lengths says it, or the same */
    int64_t s_q;        /* query tokens of a request, ≥ 1 */
    int64_t h_q;        /* query heads, ≥ 1 */
    int64_t topk;       /* indices of a query token, in [0, 2^31) */
    int64_t extra_topk; /* of the extra cache; 0 without one */
    fmla_device target;
    int32_t num_workers;
    int32_t
        num_partitions; /* 0 = from num_workers, h_q, s_q, topk and extra_topk, never from b: the plan of a
                               batch may be copied over another one's, and what it does not need of its
                               partitions is idle; else in [1, 65536] */
    void *plan;
    size_t plan_size; /* at least what fmla_sparse_plan_size answered */
    void *stream;
    const fmla_tensor *partitions;
    const fmla_tensor *num_splits;
} fmla_sparse_plan_args;

/* As fmla_decode_plan_size, fmla_decode_plan_partitions and fmla_decode_plan. */
FMLA_API fmla_status fmla_sparse_plan_size(const fmla_sparse_plan_args *args, size_t *bytes);
FMLA_API fmla_status fmla_sparse_plan_partitions(const fmla_sparse_plan_args *args, int32_t *count);
FMLA_API fmla_status fmla_sparse_plan(const fmla_sparse_plan_args *args);

enum FMLA_INT32 { FMLA_PARTITION_FIELDS = 8 };

/* A plan, readable. The pointers point into the plan. */
typedef struct fmla_plan_view {
    size_t struct_size;
    int64_t batch;
    int64_t num_partitions;
    int64_t payload; /* the load no partition exceeds, in blocks of 64 keys, overheads of 5 included */
    const int32_t *partitions; /* [num_partitions, 8]: begin request, end request (inclusive), begin block,
                                  end block (exclusive), begin split index, first request is split,
                                  last request is split, 0. Idle: begin request = batch, end request = batch - 1 */
    const int32_t *num_splits; /* [batch + 1]: prefix sum of the number of splits of each request */
} fmla_plan_view;

/* Describes a plan in host memory.
 * Errors: FMLA_INVALID_ARGUMENT if it is none or damaged,
 * FMLA_BUFFER_TOO_SMALL if it is cut off. */
FMLA_API fmla_status fmla_plan_describe(const void *plan, size_t plan_size, fmla_plan_view *view);

/* ---- Dense decode --------------------------------------------------------------------------- */

/* `lse` (and nothing else) of a row that sees no key. */
enum FMLA_INT32 {
    FMLA_LSE_EMPTY_POSITIVE_INFINITY = 0 /* FlashMLA's */,
    FMLA_LSE_EMPTY_NEGATIVE_INFINITY = 1
};

/* The base of the logarithm in `lse`. */
enum FMLA_INT32 { FMLA_LOG_NATURAL = 0, FMLA_LOG_BASE_2 = 2 };

/* How queries meet the keys of a cache of bytes (docs/semantics.md, "FP8 products"). BF16: queries are taken as they are, and each
 * key is made a bf16 value. FP8: each query row is also quantised to e4m3, so that a kernel may multiply codes with codes. */
enum FMLA_INT32 { FMLA_PRODUCTS_BF16 = 0, FMLA_PRODUCTS_FP8 = 1 };

/* Attention of a few new tokens of each request over its cached keys (docs/semantics.md, "Dense decode"):
 *     S = softmax_scale · Q Kᵀ,  lse = ln Σ exp(S),  out = softmax(S) V,  V = the first d_v values of K.
 * Query head h reads key head h / (h_q / h_kv). */
typedef struct fmla_dense_decode_args {
    size_t struct_size;
    /* [b, s_q, h_q, d_qk] bf16 or fp16; with FMLA_PRODUCTS_FP8 bf16, or, over FMLA_KV_FP8_576 alone, e4m3 codes of any type of
     * one byte. FMLA_KV_FP8_656 takes no codes, because the last 64 values of its queries stay bf16 */
    const fmla_tensor *q;
    /* [pages, page_size, h_kv, d_qk], the type of q; or bytes as in fmla_sparse_decode_args, of FMLA_KV_FP8_576
     * [pages, page_size, 1, 576]. Bytes are worth bf16 values, which are multiplied (docs/semantics.md,
     * "Cache formats"); on a GPU q is then not fp16 */
    const fmla_tensor *kv_cache;
    const fmla_tensor *block_table; /* [b, max_pages] int32: the page of each page_size keys of a request.
                                       Entries past ceil(length / page_size) are never used, whatever they
                                       hold. NULL: page r holds the keys of request r, pages ≥ b */
    const fmla_tensor *seqlens; /* [b] int32: keys of each request; clamped to [0, max_pages · page_size] */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    const fmla_tensor *out;       /* [b, s_q, h_q, d_v], the type of q, of codes bf16; written */
    const fmla_tensor *lse;       /* [b, h_q, s_q] fp32, written; NULL = not wanted */
    const void *plan; /* from fmla_decode_plan for this b; NULL = planned inside the call. A plan made
                         for other lengths is safe; made for other heads, safe and unbalanced */
    size_t plan_size; /* its size in bytes */
    void *workspace;  /* fmla_dense_decode_workspace_size bytes on the device of q */
    size_t workspace_size;
    void *stream;            /* CUDA stream; not used on the CPU */
    const char *kernel;      /* force a kernel by name (fmla_capabilities lists them); NULL = the best */
    int32_t kv_format;       /* FMLA_KV_…; may be 0 where kv_cache has the type of q */
    int32_t products;        /* FMLA_PRODUCTS_…; FP8 over FMLA_KV_FP8_576 and FMLA_KV_FP8_656 alone */
    float softmax_scale;     /* 0 = 1/sqrt(d_qk); finite */
    int32_t causal;          /* 1: token j of s_q sees keys t ≤ s_k - s_q + j; 0: all see all */
    int32_t lse_empty;       /* FMLA_LSE_EMPTY_… */
    int32_t log_base;        /* FMLA_LOG_… */
    int32_t batch_invariant; /* 1: a request's result has the same bits whatever else is in the batch and
                                wherever it stands in it; plan is then not read. Takes workspace in proportion
                                       to the capacity of the table */
    int32_t num_partitions; /* of the plan made inside the call, in [0, 65536]: 0 = by the device. With a plan
                                       in host memory: 0, or what it was made with; in device memory: what it was
                                       made with, which the host cannot read. With tables: 0, or their rows */
    /* In place of `plan`, both: the tables of a plan for this b (of fmla_decode_plan, or copies of those that a
     * fmla_plan_view shows), each in memory of its own on the device of q. They do not say what batch they were made for.
     * Tables of another one are refused on the CPU; on a GPU they lead to no bad access, but results may be wrong, and those
     * of requests that they leave out are not written. Not read if batch_invariant. Those that FlashMLA itself makes have
     * other fields. */
    const fmla_tensor *partitions; /* [partitions of the plan, 8] int32, rows without gaps, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
    const fmla_tensor *kv_scale;   /* [1] fp32: the scale of an FMLA_KV_FP8_576 cache; NULL = 1 */
    const fmla_tensor *q_scale;    /* [1] fp32: the scale of q where it has codes; NULL = 1 */
} fmla_dense_decode_args;

/* How much workspace fmla_dense_decode takes with these arguments, and its alignment (either may be NULL),
 * from shapes, types, options and device: the data of tensors, workspace and stream are not looked at and may be
 * NULL (a plan in host memory is read). It is the same for all kernels of a GPU: which of them
 * takes a call depends on addresses too, and a query has none. On the CPU it grows with fmla_num_threads().
 * Errors: as fmla_dense_decode, workspace aside. */
FMLA_API fmla_status fmla_dense_decode_workspace_size(const fmla_dense_decode_args *args, size_t *bytes,
                                                      size_t *alignment);

/* For a workspace that is made once and serves calls of many sizes: the most that fmla_dense_decode takes in any call whose
 * b, s_q, h_q, pages and max_pages are at most those of these arguments, and whose types, d_qk, d_v, h_kv, page_size, options,
 * device and kernel are the same; whether attn_sink and lse are there or not, and whatever the data and the strides. The
 * calls may plan inside or be given a plan or tables, if these have as many partitions as these arguments name (by
 * num_partitions, the rows of partitions, or a plan in host memory), or where they name none, as many as fmla_decode_plan
 * and the call itself choose for their sizes. On the CPU for calls with the same fmla_num_threads().
 * It never falls as sizes grow, and is at most about twice what the call that takes the most takes. What
 * fmla_dense_decode_workspace_size answers grows with b, pages and max_pages too, but with s_q and h_q only if batch_invariant
 * is set or the partitions are named; otherwise it may fall.
 * Errors: as fmla_dense_decode_workspace_size. */
FMLA_API fmla_status fmla_dense_decode_workspace_bound(const fmla_dense_decode_args *args, size_t *bytes,
                                                       size_t *alignment);

/* The kernel that fmla_dense_decode would run with these arguments, as fmla_capabilities names it (static). Looks
 * at what fmla_dense_decode_workspace_size looks at.
 * Errors: as there. */
FMLA_API fmla_status fmla_dense_decode_kernel(const fmla_dense_decode_args *args, const char **name);

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace, plan), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. On the CPU
 * an entry of block_table that is used and is no page of the cache is FMLA_INVALID_ARGUMENT; on a GPU it is
 * undefined. */
FMLA_API fmla_status fmla_dense_decode(const fmla_dense_decode_args *args);

/* ---- Cache formats -------------------------------------------------------------------------- */

/* How a token lies in a cache, byte by byte (docs/semantics.md, "Cache formats"); always named by the caller, never
 * guessed. The values are stable. */
typedef int32_t fmla_kv_format;
enum FMLA_INT32 {
    FMLA_KV_NONE = 0,    /* not given */
    FMLA_KV_BF16 = 1,    /* d_qk bf16 */
    FMLA_KV_FP16 = 2,    /* d_qk fp16 */
    FMLA_KV_FP8_656 = 3, /* d_qk 576: 512 e4m3, 4 f32 scales, 64 bf16 */
    FMLA_KV_FP8_584 = 4, /* d_qk 512: 448 e4m3, 64 bf16; behind the tokens of a page 8 bytes of scales each */
    FMLA_KV_FP8_576 = 5, /* d_qk 576: 576 e4m3; one scale for the whole cache */
    FMLA_KV_FP8_528 = 6, /* d_qk 512: 512 e4m3, 16 ue8m0 scales */
    FMLA_KV_FP8_528_SPLIT =
        7,               /* the same, but the 16 scales of each token stand behind all tokens of the page */
    FMLA_KV_FP4_288 = 8, /* d_qk 512: 512 e2m1 in 256 bytes, 32 e4m3 scales */
    FMLA_KV_FP4_288_SPLIT =
        9, /* the same, but the 32 scales of each token stand behind all tokens of the page */
    FMLA_KV_FP8_528_F32 = 10 /* d_qk 512: 512 e4m3, 4 f32 scales */
};

/* ---- Sparse decode -------------------------------------------------------------------------- */

/* Attention of a few new tokens of each request over the cached keys that each of them names (docs/semantics.md, "Sparse
 * decode"): as dense decode, with a key list for every query token in place of a request's keys, and one key head. */
typedef struct fmla_sparse_decode_args {
    size_t struct_size;
    const fmla_tensor *q; /* [b, s_q, h_q, d_qk] bf16 or fp16 */
    /* [pages, page_size, 1, d_qk] of the type of q; or [pages, page_size, 1, bytes of a token], of any type of one byte.
     * Pages and tokens lie at strides and addresses that are multiples of 4 (FMLA_KV_FP8_656, FMLA_KV_FP8_528_F32), 2
     * (FMLA_KV_FP8_584) or 1. A page of FMLA_KV_FP8_584, FMLA_KV_FP8_528_SPLIT or FMLA_KV_FP4_288_SPLIT is in one piece:
     * dimension 1 has the stride of the bytes of a token, which says nothing of where a token is */
    const fmla_tensor *kv_cache;
    const fmla_tensor
        *indices; /* [b, s_q, topk] int32: page · page_size + slot; outside [0, pages · page_size) there
                                   is no key, anywhere in the list. One that stands twice counts twice */
    const fmla_tensor
        *topk_length; /* [b] int32 or NULL = topk: how many of the indices count, from the first on;
                                       clamped to [0, topk] */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    /* A second cache, with a format (extra_kv_format), page size, indices and lengths of its own: a token sees the keys that it
     * names in either. The first two both or neither; the last only with them. */
    const fmla_tensor *extra_kv_cache;    /* as kv_cache */
    const fmla_tensor *extra_indices;     /* [b, s_q, extra_topk] int32 */
    const fmla_tensor *extra_topk_length; /* [b] int32 or NULL = extra_topk; clamped to [0, extra_topk] */
    const fmla_tensor *out;               /* [b, s_q, h_q, d_v], the type of q; written */
    const fmla_tensor *lse;               /* [b, h_q, s_q] fp32, written; NULL = not wanted */
    const void *plan; /* from fmla_sparse_plan, for this b; NULL = planned inside the call. A plan
                         made for other lengths is safe; made for other heads, safe and unbalanced. Not read
                         where a GPU's kernel cuts few keys evenly by itself (docs/semantics.md) */
    size_t plan_size; /* its size in bytes */
    /* In place of `plan`, both: its tables, as in fmla_dense_decode_args. */
    const fmla_tensor *partitions; /* [partitions of the plan, 8] int32, rows without gaps, 16-byte aligned */
    const fmla_tensor *num_splits; /* [b + 1] int32 */
    void *workspace;               /* fmla_sparse_decode_workspace_size bytes on the device of q */
    size_t workspace_size;
    void *stream;            /* CUDA stream; not used on the CPU */
    const char *kernel;      /* force a kernel by name (fmla_capabilities lists them); NULL = the best */
    int32_t kv_format;       /* FMLA_KV_…; may be 0 where kv_cache has the type of q */
    float softmax_scale;     /* 0 = 1/sqrt(d_qk); finite */
    int32_t lse_empty;       /* FMLA_LSE_EMPTY_… */
    int32_t log_base;        /* FMLA_LOG_… */
    int32_t batch_invariant; /* 1: a request's result has the same bits whatever else is in the batch and
                                wherever it stands in it; plan is then not read. Takes workspace in proportion
                                to topk and extra_topk */
    int32_t num_partitions;  /* of the plan made inside the call, as in fmla_dense_decode_args */
    int32_t extra_kv_format; /* of extra_kv_cache, FMLA_KV_… of the same d_qk; 0 = kv_format */
    int32_t reserved;        /* 0 */
} fmla_sparse_decode_args;

/* How much workspace fmla_sparse_decode takes with these arguments, and its alignment (either may be NULL),
 * from shapes, types, options and device, as fmla_dense_decode_workspace_size does.
 * Errors: as fmla_sparse_decode, workspace aside. */
FMLA_API fmla_status fmla_sparse_decode_workspace_size(const fmla_sparse_decode_args *args, size_t *bytes,
                                                       size_t *alignment);

/* As fmla_dense_decode_workspace_bound: the most that fmla_sparse_decode takes in any call whose b, s_q, h_q, topk and
 * extra_topk are at most these (extra_topk is 0 without extra_indices), whose types, formats, d_qk, d_v, options, device and
 * kernel are the same, with lengths or without, caches of any pages, and plans as there; of those that were made with b 0, too.
 * What fmla_sparse_decode_workspace_size answers grows with every size if batch_invariant is set or the partitions are
 * named. Otherwise it may fall with s_q and h_q, and on GPUs of compute capability 9.0 with every size: smaller batches
 * may take more.
 * Errors: as fmla_sparse_decode_workspace_size. */
FMLA_API fmla_status fmla_sparse_decode_workspace_bound(const fmla_sparse_decode_args *args, size_t *bytes,
                                                        size_t *alignment);

/* The kernel that fmla_sparse_decode would run with these arguments, as fmla_capabilities names it (static).
 * Errors: as there. */
FMLA_API fmla_status fmla_sparse_decode_kernel(const fmla_sparse_decode_args *args, const char **name);

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace, plan), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No value of an
 * index is an error. */
FMLA_API fmla_status fmla_sparse_decode(const fmla_sparse_decode_args *args);

/* ---- Sparse prefill ------------------------------------------------------------------------- */

/* Attention of the tokens of a prompt over the keys that each of them names (docs/semantics.md, "Sparse prefill"): a list for
 * every token, as in sparse decode, and no batch. Query head h reads key head h / (h_q / h_kv). */
typedef struct fmla_sparse_prefill_args {
    size_t struct_size;
    const fmla_tensor *q; /* [s_q, h_q, d_qk] bf16 */
    /* [s_kv, h_kv, d_qk] bf16; or pages, [pages, page_size, 1, d_qk] bf16, or of bytes as in fmla_sparse_decode_args.
     * Of pages s_kv is pages · page_size, and h_kv is 1 */
    const fmla_tensor *kv;
    const fmla_tensor
        *indices; /* [s_q, h_kv, topk] int32: a token of kv, of pages page · page_size + slot; outside
                                   [0, s_kv) there is no key, anywhere in the list. One that stands twice counts twice */
    const fmla_tensor
        *topk_length; /* [s_q] int32 or NULL = topk: how many of the indices count, from the first on;
                                       clamped to [0, topk] */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL: out *= 1 / (1 + exp(sink - lse)), natural lse */
    const fmla_tensor *out;       /* [s_q, h_q, d_v] bf16; written */
    const fmla_tensor
        *max_logits; /* [s_q, h_q] fp32, written: the largest score, softmax_scale applied, of the base of
                                       lse; -inf where no key is seen. NULL = not wanted */
    const fmla_tensor *lse; /* [s_q, h_q] fp32, written; NULL = not wanted */
    void *workspace;        /* fmla_sparse_prefill_workspace_size bytes on the device of q */
    size_t workspace_size;
    void *stream;        /* CUDA stream; not used on the CPU */
    const char *kernel;  /* force a kernel by name (fmla_capabilities lists them); NULL = the best */
    int32_t kv_format;   /* FMLA_KV_…, of d_qk values a token; may be 0 where kv is bf16 */
    float softmax_scale; /* 0 = 1/sqrt(d_qk); finite */
    int32_t lse_empty;   /* FMLA_LSE_EMPTY_… */
    int32_t log_base;    /* FMLA_LOG_…, of lse and max_logits */
} fmla_sparse_prefill_args;

/* How much workspace fmla_sparse_prefill takes with these arguments, and its alignment (either may be NULL),
 * from shapes, types, options and device, as fmla_dense_decode_workspace_size does: 0 bytes on a GPU, but on Hopper, where a
 * call is so short that it cuts lists, up to 68608 for each SM over bf16 keys, and up to 131344 over FP8 pages.
 * Errors: as fmla_sparse_prefill, workspace aside. */
FMLA_API fmla_status fmla_sparse_prefill_workspace_size(const fmla_sparse_prefill_args *args, size_t *bytes,
                                                        size_t *alignment);

/* As fmla_dense_decode_workspace_bound: the most that fmla_sparse_prefill takes in any call whose s_q, h_q and topk are at most
 * these, and whose types, formats, d_qk, d_v, h_kv, options, device and kernel are the same, with lengths or without, and as many
 * keys as there may be. What fmla_sparse_prefill_workspace_size answers may fall with every size.
 * Errors: as fmla_sparse_prefill_workspace_size. */
FMLA_API fmla_status fmla_sparse_prefill_workspace_bound(const fmla_sparse_prefill_args *args, size_t *bytes,
                                                         size_t *alignment);

/* The kernel that fmla_sparse_prefill would run with these arguments, as fmla_capabilities names it (static).
 * Errors: as there. */
FMLA_API fmla_status fmla_sparse_prefill_kernel(const fmla_sparse_prefill_args *args, const char **name);

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No value of an index
 * is an error. */
FMLA_API fmla_status fmla_sparse_prefill(const fmla_sparse_prefill_args *args);

/* ---- Dense MHA ------------------------------------------------------------------------------ */

/* Attention of all heads over keys and values of their own, as in prefill and training (docs/semantics.md, "Dense MHA"). Query
 * head h reads key head h / (h_q / h_kv). Requests are apart, all of s_q tokens and s_k keys; or their tokens, and their keys,
 * are one after the other, and cu_seqlens_q and cu_seqlens_k say where each begins: then tensors have no dimension b. */
typedef struct fmla_mha_forward_args {
    size_t struct_size;
    const fmla_tensor *q; /* [b, s_q, h_q, d_qk] or [tokens, h_q, d_qk], bf16 or fp16 */
    const fmla_tensor *k; /* [b, s_k, h_kv, d_qk] or [tokens of keys, h_kv, d_qk], of the type of q */
    const fmla_tensor *v; /* [b, s_k, h_kv, d_v] or [tokens of keys, h_kv, d_v], of the type of q */
    /* [b + 1] int32: request r has tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1, and so its keys; clamped to the tokens that
     * there are and to what came before. NULL where q has four dimensions */
    const fmla_tensor *cu_seqlens_q;
    const fmla_tensor *cu_seqlens_k;
    /* [b, s_q, h_q, d_v] or [tokens, h_q, d_v] of the type of q; written. Tokens of no request stay as they are */
    const fmla_tensor *out;
    /* [b, h_q, s_q] or [h_q, tokens] fp32, as fmla_merge takes it; written. NULL = not wanted */
    const fmla_tensor *lse;
    /* With cu_seqlens: no request has more tokens, or more keys; 0 = not known. Results of a longer one are wrong */
    int64_t max_s_q;
    int64_t max_s_k;
    void *workspace; /* fmla_mha_forward_workspace_size bytes on the device of q */
    size_t workspace_size;
    void *stream;        /* CUDA stream; not used on the CPU */
    const char *kernel;  /* force a kernel by name (fmla_capabilities lists them); NULL = the best */
    float softmax_scale; /* 0 = 1/sqrt(d_qk); finite */
    int32_t causal;      /* 1: token j of s_q sees keys t ≤ s_k - s_q + j */
    int32_t lse_empty;   /* FMLA_LSE_EMPTY_… */
    int32_t log_base;    /* FMLA_LOG_… */
} fmla_mha_forward_args;

/* How much workspace fmla_mha_forward takes with these arguments, and its alignment (either may be NULL), from shapes, types,
 * options and device, as fmla_dense_decode_workspace_size does; it grows with every size, and is 256 bytes on Hopper, none on other
 * GPUs.
 * Errors: as fmla_mha_forward, workspace aside. */
FMLA_API fmla_status fmla_mha_forward_workspace_size(const fmla_mha_forward_args *args, size_t *bytes,
                                                     size_t *alignment);

/* As fmla_dense_decode_workspace_bound: the most that fmla_mha_forward takes in any call whose b, s_q or tokens, and h_q are at
 * most these, and whose types, d_qk, d_v, options, device and kernel are the same.
 * Errors: as fmla_mha_forward_workspace_size. */
FMLA_API fmla_status fmla_mha_forward_workspace_bound(const fmla_mha_forward_args *args, size_t *bytes,
                                                      size_t *alignment);

/* The kernel that fmla_mha_forward would run with these arguments, as fmla_capabilities names it (static).
 * Errors: as there. */
FMLA_API fmla_status fmla_mha_forward_kernel(const fmla_mha_forward_args *args, const char **name);

/* A request has the same bits whatever else is in the batch.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No value in cu_seqlens is
 * an error. */
FMLA_API fmla_status fmla_mha_forward(const fmla_mha_forward_args *args);

/* ---- Gradients of dense MHA ------------------------------------------------------------------ */

/* The gradients of fmla_mha_forward (docs/semantics.md, "Dense MHA, backward"), by the method of FlashAttention-2 (arXiv 2307.08691,
 * section 3.1.2): probabilities are computed again from q, k and lse. Requests are apart or one after the other, as there. Of query
 * heads that read one key head dk and dv are the sum. */
typedef struct fmla_mha_backward_args {
    size_t struct_size;
    const fmla_tensor *q; /* as fmla_mha_forward had them, */
    const fmla_tensor *k;
    const fmla_tensor *v;
    const fmla_tensor *cu_seqlens_q; /* with what says where requests begin, */
    const fmla_tensor *cu_seqlens_k;
    const fmla_tensor *out; /* [b, s_q, h_q, d_v] or [tokens, h_q, d_v] of the type of q: what it wrote, */
    /* [b, h_q, s_q] or [h_q, tokens] fp32, and its logarithms to the base log_base. A row whose lse is +inf or -inf saw no key, and has gradients 0 */
    const fmla_tensor *lse;
    const fmla_tensor *dout; /* the gradient of out, of its shape and the type of q */
    /* The gradients of q, k and v, of their shapes and the type of q; written. They may be views of one packed tensor. Tokens of a
     * request without keys, keys of one without tokens, and tokens and keys of no request become 0 */
    const fmla_tensor *dq;
    const fmla_tensor *dk;
    const fmla_tensor *dv;
    /* With cu_seqlens: no request has more tokens, or more keys; 0 = not known. Results of a longer one are wrong */
    int64_t max_s_q;
    int64_t max_s_k;
    void *workspace; /* fmla_mha_backward_workspace_size bytes on the device of q */
    size_t workspace_size;
    void *stream;          /* CUDA stream; not used on the CPU */
    const char *kernel;    /* force a kernel by name (fmla_capabilities lists them); NULL = the best */
    float softmax_scale;   /* that of the forward call; 0 = 1/sqrt(d_qk); finite */
    int32_t causal;        /* that of the forward call */
    int32_t deterministic; /* 1: dq too has the same bits in every run. On the CPU it always has */
    int32_t log_base;      /* FMLA_LOG_…, of lse */
} fmla_mha_backward_args;

/* How much workspace fmla_mha_backward takes with these arguments, and its alignment (either may be NULL), from shapes, types,
 * options and device, as fmla_dense_decode_workspace_size does. It grows with every size, and linearly with tokens; on the CPU it
 * is 8 bytes a row, 64 a request, and a scratch a thread, on Hopper 4 · d_qk + 8 bytes a row of whole tiles.
 * Errors: as fmla_mha_backward, workspace aside. */
FMLA_API fmla_status fmla_mha_backward_workspace_size(const fmla_mha_backward_args *args, size_t *bytes,
                                                      size_t *alignment);

/* As fmla_dense_decode_workspace_bound: the most that fmla_mha_backward takes in any call whose b, s_q, s_k or tokens, and heads are
 * at most these, and whose types, d_qk, d_v, options, device and kernel are the same.
 * Errors: as fmla_mha_backward_workspace_size. */
FMLA_API fmla_status fmla_mha_backward_workspace_bound(const fmla_mha_backward_args *args, size_t *bytes,
                                                       size_t *alignment);

/* The kernel that fmla_mha_backward would run with these arguments, as fmla_capabilities names it (static).
 * Errors: as there. */
FMLA_API fmla_status fmla_mha_backward_kernel(const fmla_mha_backward_args *args, const char **name);

/* dk and dv have the same bits in every run; on the CPU all three have, whatever the number of threads and the rest of the batch.
 * Errors: FMLA_INVALID_ARGUMENT, FMLA_BUFFER_TOO_SMALL (workspace), FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. No value in cu_seqlens or
 * lse is an error. */
FMLA_API fmla_status fmla_mha_backward(const fmla_mha_backward_args *args);

/* ---- Merge ---------------------------------------------------------------------------------- */

/* Joins n results over disjoint sets of keys into the result over all of them (docs/semantics.md, "Merge"):
 * parts of one machine or of several. A part whose lse is +inf or -inf saw no key, and its out is not read.
 * Parts join in order of their index. */
typedef struct fmla_merge_args {
    size_t struct_size;
    const fmla_tensor *out_parts; /* [n, b, s_q, h_q, d_v] bf16, fp16 or fp32 */
    const fmla_tensor *lse_parts; /* [n, b, h_q, s_q] fp32 */
    const fmla_tensor *attn_sink; /* [h_q] fp32 or NULL; applied once, to the whole */
    const fmla_tensor *out; /* [b, s_q, h_q, d_v] bf16, fp16 or fp32; written; must not overlap the parts */
    const fmla_tensor *lse; /* [b, h_q, s_q] fp32, written; NULL = not wanted; must not overlap the parts */
    void *stream;           /* CUDA stream; not used on the CPU */
    const char *kernel;     /* force a kernel by name; NULL = the best */
    int32_t lse_empty;      /* FMLA_LSE_EMPTY_…, of the result; parts may use either */
    int32_t log_base;       /* FMLA_LOG_…, of the parts and of the result */
} fmla_merge_args;

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_merge(const fmla_merge_args *args);

/* ---- Cache append --------------------------------------------------------------------------- */

/* Which of the 64 values of RoPE are turned together, as pair i of 32. */
enum {
    FMLA_ROPE_NONE = 0,
    FMLA_ROPE_INTERLEAVED = 1, /* 2 i and 2 i + 1 */
    FMLA_ROPE_HALVES = 2       /* i and 32 + i */
};

/* Writes the vectors of new tokens into pages, quantised as the format says (docs/semantics.md, "Cache append"). Slot s is
 * slot s mod page_size of page s / page_size. Bytes of the cache that belong to no slot written stay as they are. */
typedef struct fmla_cache_append_args {
    size_t struct_size;
    const fmla_tensor *latent; /* [tokens, d_qk - 64] bf16, fp16 or fp32; [tokens, d_qk] without rope */
    const fmla_tensor
        *rope; /* [tokens, 64], the type of latent: the last 64 values of each token. NULL: latent has
                                  them; two views of one tensor do as well */
    /* [pages, page_size, 1, d_qk] bf16 or fp16; or [pages, page_size, 1, bytes of a token: 656, 584, 576, 528 or 288] of
     * any type of one byte, where a token is without gaps, and with FMLA_KV_FP8_584, FMLA_KV_FP8_528_SPLIT and
     * FMLA_KV_FP4_288_SPLIT a page. Written. */
    const fmla_tensor *kv_cache;
    const fmla_tensor
        *slot_mapping;  /* [tokens] int64: where each token goes; -1: nowhere, and its vector is not used.
                                        A slot that occurs twice: the last token stays on the CPU; on a GPU it is not
                                        said which, and pieces of several may */
    void *stream;       /* CUDA stream; not used on the CPU */
    const char *kernel; /* force a kernel by name; NULL = the best */
    int32_t kv_format;  /* FMLA_KV_…, not FMLA_KV_NONE */
    float cache_scale;  /* of FMLA_KV_FP8_576, finite and > 0; 0 = 1. Others: 0 */
    /* What is done to the values first, in the same pass, where d_qk is 512 or 576: RMS norm of the first 512, then RoPE of
     * the last 64 (docs/semantics.md, "Cache append"). Both by themselves, too; zero of everything: neither. */
    const fmla_tensor *norm_weight; /* [512], the type of latent; NULL: no norm */
    const fmla_tensor *positions;   /* [tokens] int32 or int64: rows of rope_table; NULL: no RoPE */
    /* [max_positions, 64] fp32: 32 cosines and 32 sines of each position (fmla_rope_table); NULL: no RoPE */
    const fmla_tensor *rope_table;
    float norm_eps; /* what is added to the mean of the squares, finite and ≥ 0; 0 without norm_weight */
    int32_t rope_pairs; /* FMLA_ROPE_… */
} fmla_cache_append_args;

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. On the CPU a slot that is neither -1 nor in [0, pages · page_size), or
 * a position outside [0, max_positions) of a token that is not skipped, is FMLA_INVALID_ARGUMENT, and nothing was written; on a GPU such
 * a token is skipped. */
FMLA_API fmla_status fmla_cache_append(const fmla_cache_append_args *args);

/* Fills a table for `rope_table`, in host memory without gaps, for positions 0 … positions - 1: entry i of a row is
 * cos(position · base^(-i/32)), entry 32 + i the sine, worked out in double precision and rounded to fp32. What a model has beyond
 * a base (YaRN's frequencies, say) is its caller's to write.
 * Errors: FMLA_INVALID_ARGUMENT (positions < 0; base not finite or ≤ 0; table NULL with positions). */
FMLA_API fmla_status fmla_rope_table(float *table, int64_t positions, double base);

/* ---- Cache gather --------------------------------------------------------------------------- */

/* Reads the vectors of tokens out of pages, as the values that attention takes them for (docs/semantics.md, "Cache gather"). */
typedef struct fmla_cache_gather_args {
    size_t struct_size;
    const fmla_tensor *kv_cache; /* as of fmla_cache_append_args; read */
    const fmla_tensor
        *slots; /* [tokens] int64; -1, or any other that is no slot of the cache: a row of zeros */
    const fmla_tensor *out; /* [tokens, d_qk] bf16, fp16 or fp32; written */
    void *stream;           /* CUDA stream; not used on the CPU */
    const char *kernel;     /* force a kernel by name; NULL = the best */
    int32_t kv_format;      /* FMLA_KV_…, not FMLA_KV_NONE */
    float cache_scale;      /* of FMLA_KV_FP8_576, finite and > 0; 0 = 1. Others: 0 */
} fmla_cache_gather_args;

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. */
FMLA_API fmla_status fmla_cache_gather(const fmla_cache_gather_args *args);

/* ---- Cache convert --------------------------------------------------------------------------- */

/* Takes tokens from pages of one format and page size into pages of another, with equal d_qk, in one pass (docs/semantics.md, "Cache
 * convert"): what fmla_cache_gather and fmla_cache_append would do through values that hold every element exactly. */
typedef struct fmla_cache_convert_args {
    size_t struct_size;
    const fmla_tensor *src_cache; /* as kv_cache of fmla_cache_append_args, in src_format; read */
    const fmla_tensor *src_slots; /* [tokens] int64: where each token is */
    const fmla_tensor *dst_cache; /* the same in dst_format; written; must not overlap src_cache */
    const fmla_tensor
        *dst_slots; /* [tokens] int64: where each token goes. -1 here or in src_slots: it is skipped. A slot
                           that occurs twice here: as in fmla_cache_append_args */
    void *stream;   /* CUDA stream; not used on the CPU */
    const char *kernel; /* force a kernel by name; NULL = the best */
    int32_t src_format; /* FMLA_KV_…, not FMLA_KV_NONE */
    int32_t dst_format; /* the same */
    float src_scale;    /* of FMLA_KV_FP8_576, finite and > 0; 0 = 1. Others: 0 */
    float dst_scale;    /* the same */
} fmla_cache_convert_args;

/* Errors: FMLA_INVALID_ARGUMENT, FMLA_UNSUPPORTED, FMLA_DEVICE_ERROR. On the CPU a slot that is neither -1 nor one of its cache is
 * FMLA_INVALID_ARGUMENT, and nothing was written; on a GPU its token is skipped. */
FMLA_API fmla_status fmla_cache_convert(const fmla_cache_convert_args *args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* FLASHMLA_FLASHMLA_H */
