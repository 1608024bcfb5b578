/* SPDX-License-Identifier: MIT
 *
 * Detects the devices of this machine and chooses a kernel for a call.
 */
#include "dispatch.h"

#include "cpu/allow_amx.h"
#include "cpu/backward.h"
#include "cpu/cpu.h"
#include "cuda/backward.h"
#include "cuda/cuda.h"
#include "operations.h"
#include "ref/ref.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const struct kernel kernels[] = {
#include "kernels.def"
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

static bool serves(const struct kernel *kernel, enum operation operation)
{
    return kernel->operations & 1u << operation;
}

const char *device_name(fmla_device device, char buffer[32])
{
    if (device.device_type == FMLA_DEVICE_CPU || device.device_type == FMLA_DEVICE_CUDA_HOST) return "cpu";
    if (device.device_type == FMLA_DEVICE_CUDA)
        snprintf(buffer, 32, "cuda:%d", device.id);
    else
        snprintf(buffer, 32, "device type %d", device.device_type);
    return buffer;
}

/* ---- Devices -------------------------------------------------------------------------------- */

const char *dispatch_device_reason(fmla_device device)
{
    return device.device_type == FMLA_DEVICE_CUDA ? cuda_device(device.id)->unusable : "";
}

int32_t dispatch_workers(fmla_device device)
{
    if (device.device_type == FMLA_DEVICE_CPU) return threads_now().workers;
    return *dispatch_device_reason(device) ? 0 : cuda_device(device.id)->sms;
}

bool dispatch_has_plan_costs(fmla_device device)
{
    return device.device_type == FMLA_DEVICE_CUDA && cuda_has_plan_costs(cuda_device(device.id));
}

int32_t dispatch_sparse_partitions(fmla_device device, int64_t b, int64_t s_q, int64_t h_q, int64_t topk,
                                   int64_t extra_topk)
{
    return cuda_sparse_partitions(device.id, b, s_q, h_q, topk, extra_topk);
}

int32_t dispatch_sparse_rows(fmla_device device, int64_t s_q, int64_t h_q, int64_t topk, int64_t extra_topk)
{
    return cuda_sparse_rows(device.id, s_q, h_q, topk, extra_topk);
}

fmla_status dispatch_prepare(fmla_device device)
{
    if (device.device_type == FMLA_DEVICE_CUDA) return cuda_prepare(device.id);
    threads_prepare();
    return FMLA_OK;
}

/* ---- State of the process: processor, environment, texts of fmla_capabilities --------------- */

static struct {
    pthread_once_t once;
    struct processor processor;
    int order[OPERATIONS][KERNELS]; /* rows of each operation, best first on this processor; then -1 */
    char environment[512];
    bool environment_too_long;
    bool built[KERNELS]; /* the build has the kernel's image */
    char driver_needed[48];
    char capabilities[KERNELS][64]; /* the refusal of a GPU that lacks the compute capability */
} state = {.once = PTHREAD_ONCE_INIT};

/* May run twice: after a fork in the middle of it, the child runs it again. */
static void describe_kernel(int index)
{
    const struct kernel *kernel = &kernels[index];
    state.built[index] = !kernel->image || cuda_build_has(&cuda_build, kernel->image);
    snprintf(state.capabilities[index], sizeof state.capabilities[index],
             "this GPU's compute capability is %s %d.%d", kernel->this_capability ? "not" : "below",
             kernel->capability / 10, kernel->capability % 10);
}

#if defined(__x86_64__)
/* Only newer compilers' __builtin_cpu_supports knows f16c. The avx2 check already tells whether the
 * system saves the registers. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static struct processor this_processor(void)
{
    struct processor found = {0};
#if defined(__x86_64__)
    found.intel = __builtin_cpu_is("intel");
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())
        found.meets |= NEEDS_AVX2;
    if ((found.meets & NEEDS_AVX2) && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        found.meets |= NEEDS_AVX512;
    if ((found.meets & NEEDS_AVX512) && __builtin_cpu_supports("avx512bf16"))
        found.meets |= NEEDS_AVX512_BF16;
#if defined(FMLA_AMX)
    if ((found.meets & NEEDS_AVX512_BF16) && cpu_allow_amx()) found.meets |= NEEDS_AMX;
#endif
#endif
    return found;
}

/* Sets the order of preference, which both dispatch and fmla_capabilities follow. */
static void order_kernels(void)
{
    for (int op = 0; op < OPERATIONS; op++) {
        int *row = state.order[op], count = 0;
        for (int i = 0; i < KERNELS; i++)
            if (serves(&kernels[i], (enum operation)op)) row[count++] = i;
        if (count < KERNELS) row[count] = -1;
        for (int at = 0; at + 1 < count; at++) {
            const int slow = row[at];
            if (!kernels[slow].slow_on_intel || !state.processor.intel) continue;
            if (kernels[row[at + 1]].needs != NEEDS_AVX512) continue;
            row[at] = row[at + 1], row[++at] = slow;
        }
    }
}

static void initialise(void)
{
    state.processor = this_processor();
    order_kernels();
    const char *environment = getenv("FLASHMLA_KERNEL");
    if (environment) {
        const int length = snprintf(state.environment, sizeof state.environment, "%s", environment);
        state.environment_too_long = length >= (int)sizeof state.environment;
    }
    for (int i = 0; i < KERNELS; i++) describe_kernel(i);
    driver_version_words(cuda_build.driver, state.driver_needed);
}

void dispatch_pretend(const struct processor *processor)
{
    pthread_once(&state.once, initialise);
    state.processor = processor ? *processor : this_processor();
    order_kernels();
}

void dispatch_describe(fmla_device device, fmla_device_info *info)
{
    pthread_once(&state.once, initialise);
    info->reason = dispatch_device_reason(device);
    info->workers = dispatch_workers(device);
    info->name = info->built_for = info->needs = info->workers_from = "";
    info->count = 1;
    if (device.device_type != FMLA_DEVICE_CUDA) {
        info->workers_from = threads_from();
        return;
    }
    const struct cuda_device *gpu = cuda_device(device.id);
    info->name = gpu->name;
    info->built_for = cuda_build.targets;
    info->needs = cuda_build.count ? state.driver_needed : "";
    info->built_with = cuda_build.toolkit;
    info->ptx = cuda_build.ptx;
    info->count = cuda_device_count();
    info->compute_capability = gpu->capability;
    info->workers = gpu->sms; /* also for a GPU that cannot be used */
    info->shared_bytes = gpu->shared_bytes;
    info->driver = driver_version();
    info->driver_needed = cuda_build.driver;
}

/* ---- Whether a kernel accepts a call -------------------------------------------------------- */

static bool has_size(const int32_t *sizes, int64_t size)
{
    if (!sizes[0] || !size) return true;
    for (int i = 0; i < KERNEL_SIZES && sizes[i]; i++)
        if (sizes[i] == size) return true;
    return false;
}

/* Returns what the kernel needs and the device lacks; "" if nothing. */
static const char *missing_feature(const struct kernel *kernel, fmla_device device)
{
    if (device.device_type == FMLA_DEVICE_CUDA) {
        const char *reason = dispatch_device_reason(device);
        if (*reason) return reason;
        const int32_t capability = cuda_device(device.id)->capability;
        if (capability < kernel->capability || (kernel->this_capability && capability != kernel->capability))
            return state.capabilities[kernel - kernels];
        return state.built[kernel - kernels] ? "" : "this build has no machine code for it (FMLA_CUDA_ARCHS)";
    }
    const unsigned missing = kernel->needs & ~state.processor.meets;
    return !missing                ? ""
           : (missing & NEEDS_AMX) ? "this processor has no AMX with BF16, or the system does not allow it"
           : (missing & NEEDS_AVX512_BF16) ? "this processor has no AVX-512 BF16"
           : (missing & NEEDS_AVX512)      ? "this processor has no AVX-512 (F, BW, VL, DQ)"
                                           : "this processor has no AVX2 with FMA and F16C";
}

static void append_elements(char *text, size_t size, unsigned elements)
{
    static const char *const names[] = {"bf16", "fp16", "fp32"};
    for (int e = 0; e < 3; e++)
        if (elements & (1u << e)) text_append(text, size, " %s", names[e]);
}

/* Returns the name of the lowest format in a set of FORMATS_…. */
static const char *format_name(unsigned formats)
{
    return cache_formats[__builtin_ctz(formats) + FMLA_KV_BF16].name + strlen("FMLA_KV_");
}

/* Appends, for example, "d_qk 512 576, d_v 512, cache BF16 FP8_656". */
static void append_shapes(char *text, size_t size, const struct kernel *kernel)
{
    const int32_t *const sizes[] = {kernel->d_qk, kernel->d_v};
    const unsigned formats = kernel->formats;
    for (int which = 0; which < 2; which++) {
        text_append(text, size, which ? ", d_v" : " d_qk");
        for (int i = 0; i < KERNEL_SIZES && sizes[which][i]; i++)
            text_append(text, size, " %d", sizes[which][i]);
        if (!sizes[which][0]) text_append(text, size, " any");
    }
    for (int f = 0; f < KV_FORMATS; f++)
        if (formats & (1u << f))
            text_append(text, size, "%s %s", formats & ((1u << f) - 1) ? "" : ", cache",
                        format_name(1u << f));
}

static void append_products(char *text, size_t size, unsigned products)
{
    static const char *const names[] = {"FMLA_PRODUCTS_BF16", "FMLA_PRODUCTS_FP8"};
    for (int p = 0; p < 2; p++)
        if (products & (1u << p)) text_append(text, size, " %s (%d)", names[p], p);
}

/* If `kernel` cannot run `wanted`, writes the reason and the refused argument and returns true; otherwise
 * returns false. */
static bool refuses(const struct kernel *kernel, const struct wanted *wanted, const char **argument,
                    char *why, size_t size)
{
    char device[32];
    const char *takes;
    const bool asked = wanted->problem.attention != NULL;
    const char *missing = "";
    *argument = wanted->argument;
    if (kernel->device_type != wanted->device.device_type)
        snprintf(why, size, "device is %s, kernel %s runs on %s", device_name(wanted->device, device),
                 kernel->name, kernel->device_type == FMLA_DEVICE_CPU ? "cpu" : "cuda");
    else if (*(missing = missing_feature(kernel, wanted->device)))
        snprintf(why, size, "%s %s: %s", *dispatch_device_reason(wanted->device) ? "device is" : "kernel",
                 *dispatch_device_reason(wanted->device) ? device_name(wanted->device, device) : kernel->name,
                 missing);
    else if (wanted->elements & ~kernel->elements) {
        snprintf(why, size, "is");
        append_elements(why, size, wanted->elements);
        text_append(why, size, ", kernel %s takes", kernel->name);
        append_elements(why, size, kernel->elements);
    } else if (!has_size(kernel->d_qk, wanted->d_qk) || !has_size(kernel->d_v, wanted->d_v)) {
        const bool qk = !has_size(kernel->d_qk, wanted->d_qk);
        if (!qk && wanted->values) *argument = wanted->values;
        snprintf(why, size, "d_%s is %lld, kernel %s takes", qk ? "qk" : "v",
                 (long long)(qk ? wanted->d_qk : wanted->d_v), kernel->name);
        append_shapes(why, size, kernel);
    } else if ((wanted->formats | wanted->extra_formats) & ~kernel->formats) {
        const unsigned first = wanted->formats & ~kernel->formats;
        *argument = first ? "kv_format" : "extra_kv_format";
        snprintf(why, size, "is %s, kernel %s takes",
                 format_name(first ? first : wanted->extra_formats & ~kernel->formats), kernel->name);
        append_shapes(why, size, kernel);
    } else if (wanted->products & ~kernel->products) {
        *argument = "products";
        snprintf(why, size, "kernel %s takes", kernel->name);
        append_products(why, size, kernel->products);
    } else if (asked && kernel->driver->refuses &&
               (takes = kernel->driver->refuses(kernel->driver, wanted->problem, argument)))
        snprintf(why, size, "kernel %s %s", kernel->name, takes);
    else
        return false;
    return true;
}

/* ---- Overrides ------------------------------------------------------------------------------ */

static const struct kernel *find(enum operation operation, const char *name, size_t length)
{
    for (int i = 0; i < KERNELS; i++)
        if (serves(&kernels[i], operation) && strlen(kernels[i].name) == length &&
            memcmp(kernels[i].name, name, length) == 0)
            return &kernels[i];
    return NULL;
}

static fmla_status unknown_kernel(enum operation operation, const char *source, const char *name,
                                  size_t length)
{
    char names[160] = "";
    for (int i = 0; i < KERNELS; i++) {
        if (!serves(&kernels[i], operation)) continue;
        text_append(names, sizeof names, "%s%s", *names ? ", " : "", kernels[i].name);
    }
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is \"%.*s\", must be one of: %s", operation_name(operation),
                source, (int)length, name, names);
}

static fmla_status unknown_operation(const char *operation, const char *source, const char *name,
                                     size_t length)
{
    char names[240] = "";
    for (int op = 0; op < OPERATIONS; op++)
        text_append(names, sizeof names, "%s%s", op ? ", " : "", operation_name((enum operation)op));
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: operation is \"%.*s\", must be one of: %s", operation, source,
                (int)length, name, names);
}

/* Finds the kernel that FLASHMLA_KERNEL names for this operation and device. The variable is a list of "name"
 * or "operation=name". A bare name applies to every operation that has such a kernel; a name never applies to
 * a device other than its kernel's. */
static fmla_status from_environment(const struct wanted *wanted, const struct kernel **kernel)
{
    static const char source[] = "environment variable FLASHMLA_KERNEL";
    *kernel = NULL;
    if (state.environment_too_long)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is longer than %zu bytes",
                    operation_name(wanted->operation), source, sizeof state.environment - 1);
    for (const char *at = state.environment; *at;) {
        const size_t length = strcspn(at, ",");
        const char *equals = memchr(at, '=', length);
        const char *name = equals ? equals + 1 : at;
        const size_t name_length = length - (size_t)(name - at);
        const char *operation = operation_name(wanted->operation);
        const size_t target_length = equals ? (size_t)(equals - at) : 0;
        bool known = false, target_known = !equals, ours = !equals;
        for (int op = 0; op < OPERATIONS; op++) {
            known |= find((enum operation)op, name, name_length) != NULL;
            if (strlen(operation_name((enum operation)op)) != target_length ||
                memcmp(operation_name((enum operation)op), at, target_length) != 0)
                continue;
            target_known = true;
            ours |= op == (int)wanted->operation;
        }
        if (!target_known) return unknown_operation(operation, source, at, target_length);
        const struct kernel *named = ours ? find(wanted->operation, name, name_length) : NULL;
        if (ours && !named && (equals || !known))
            return unknown_kernel(wanted->operation, source, name, name_length);
        if (named && named->device_type == wanted->device.device_type) *kernel = named;
        at += length;
        if (*at == ',') at++;
    }
    return FMLA_OK;
}

/* Returns whether the row may be chosen without being forced. */
static bool is_choice(const struct kernel *row, const struct wanted *wanted)
{
    return !row->forced_only && row->device_type == wanted->device.device_type;
}

/* Returns the row at place `at` of the order, which accepts `wanted`, or the next row if that accepts it and
 * is faster. */
static const struct kernel *faster_of(const int *order, int at, const struct wanted *wanted)
{
    const struct kernel *row = &kernels[order[at]];
    const bool asked = wanted->problem.attention != NULL;
    if (!asked || !row->driver->leaves || !row->driver->leaves(row->driver, wanted->problem)) return row;
    for (int next = at + 1; next < KERNELS && order[next] >= 0; next++) {
        const struct kernel *other = &kernels[order[next]];
        const char *argument;
        char why[480];
        if (!is_choice(other, wanted)) continue;
        return refuses(other, wanted, &argument, why, sizeof why) ? row : other;
    }
    return row;
}

fmla_status dispatch(const struct wanted *wanted, const char *forced, const struct kernel **kernel)
{
    pthread_once(&state.once, initialise);
    const char *operation = operation_name(wanted->operation);
    const char *argument = wanted->argument;
    char why[480];

    *why = 0;
    if (forced) {
        *kernel = find(wanted->operation, forced, strlen(forced));
        if (!*kernel) return unknown_kernel(wanted->operation, "kernel", forced, strlen(forced));
    } else {
        const fmla_status status = from_environment(wanted, kernel);
        if (status) return status;
    }
    if (*kernel) {
        if (!refuses(*kernel, wanted, &argument, why, sizeof why)) return FMLA_OK;
        return fail(FMLA_UNSUPPORTED, "%s: %s: %s", operation, argument, why);
    }

    bool device_has_kernels = false;
    const int *order = state.order[wanted->operation];
    for (int at = 0; at < KERNELS && order[at] >= 0; at++) {
        const struct kernel *row = &kernels[order[at]];
        if (!is_choice(row, wanted)) continue;
        device_has_kernels = true;
        /* The last refusal is reported: it is that of the most general kernel. */
        if (refuses(row, wanted, &argument, why, sizeof why)) continue;
        *kernel = faster_of(order, at, wanted);
        return FMLA_OK;
    }
    if (device_has_kernels) return fail(FMLA_UNSUPPORTED, "%s: %s: %s", operation, argument, why);
    char device[32];
    return fail(FMLA_UNSUPPORTED,
                "%s: %s: device is %s, must be cpu: this build has kernels of %s for cpu only", operation,
                wanted->argument, device_name(wanted->device, device), operation);
}

fmla_status dispatch_decide(const struct kernel *kernel, union problem problem, struct prepared *prepared)
{
    prepared->bytes = 0, prepared->alignment = 16;
    return kernel->driver->prepare ? kernel->driver->prepare(kernel->driver, problem, prepared) : FMLA_OK;
}

static void describe_row(fmla_device device, enum operation operation, const struct kernel *kernel,
                         fmla_capability *row)
{
    *row = (fmla_capability){
        .struct_size = row->struct_size, .operation = operation_name(operation), .part_of = ""};
    row->reason = kernel ? missing_feature(kernel, device)
                         : "this build has no kernel of this operation for this device";
    row->available = !*row->reason;
    if (!kernel) return;
    row->kernel = kernel->name;
    if (kernel->part_of) row->part_of = kernel->part_of;
    row->forced_only = kernel->forced_only;
    row->types = (int32_t)kernel->elements;
    row->kv_formats = (int32_t)(kernel->formats << FMLA_KV_BF16);
    row->products = (int32_t)kernel->products;
    memcpy(row->d_qk, kernel->d_qk, sizeof row->d_qk);
    memcpy(row->d_v, kernel->d_v, sizeof row->d_v);
}

bool dispatch_capability(fmla_device device, int64_t index, fmla_capability *capability)
{
    pthread_once(&state.once, initialise);
    int64_t row = 0;
    for (int op = 0; op < OPERATIONS; op++) {
        bool supported = false;
        for (int at = 0; at < KERNELS && state.order[op][at] >= 0; at++) {
            const struct kernel *kernel = &kernels[state.order[op][at]];
            if (kernel->device_type != device.device_type) continue;
            supported |= !kernel->forced_only;
            if (row++ != index) continue;
            describe_row(device, (enum operation)op, kernel, capability);
            return true;
        }
        if (supported || row++ != index) continue;
        describe_row(device, (enum operation)op, NULL, capability);
        return true;
    }
    return false;
}
