/* SPDX-License-Identifier: MIT */
#include "fake_cuda.h"

#include "cuda/cache_params.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* The types with which the library calls them. */
#define ENTRY(member, name, ...) __typeof__ (*((struct driver *)0)->member)(name);
CUDA_DRIVER_ENTRIES(ENTRY)
CUDA_DRIVER_LATER_ENTRIES(ENTRY)
#undef ENTRY
cu_result cuDriverGetVersion(int *version);

enum { DEPTH = 8, KERNELS_ASKED = 512, LIBRARIES = 128, SHARED_BYTES_UNASKED = 48 * 1024 };

struct CUlib_st {
    const char *image; /* in these tests an image is its own name */
};

/* The parameters of kernels whose names begin and end like this; the first line counts. `also`: int32 behind
 * the struct. Parameters of other kernels are not recorded. tests/house/kernels.sh checks that every kernel
 * that the library launches exists in its image. */
static const struct form {
    const char *begins, *ends;
    size_t bytes;
    int also;
} forms[] = {
#define FORM(begins, ends, params, also) begins, ends, sizeof(struct params), also
    {FORM("cache_", "", cache_params, 0)},
    {FORM("decode_plan", "", plan_params, 0)},
    {FORM("join_", "", join_params, 2)},
    {FORM("merge", "", merge_params, 0)},
    {FORM("mha_backward_", "", mha_backward_params, 0)},
    {FORM("mha_forward_", "", mha_forward_params, 0)},
    {FORM("mha_padding", "", mha_padding_params, 0)},
    {FORM("quantise_queries", "", quantise_params, 0)},
    {FORM("sparse_decode_", "", sparse_decode_params, 0)},
    {FORM("sparse_prefill_", "", sparse_prefill_params, 0)},
    {FORM("sm80_dense_decode_", "", dense_decode_params, 0)},
    {FORM("sm80_mha_forward_", "", mha_forward_sm80_params, 0)},
    {FORM("sm80_mha_backward_", "", mha_backward_sm80_params, 0)},
    {FORM("sm80_sparse_decode_", "", sparse_sm80_params, 0)},
    {FORM("sm90_dense_decode_fp8_", "", dense_decode_fp8_params, 0)},
    {FORM("sm90_dense_decode_converted_", "", dense_decode_fp8_params, 0)},
    {FORM("sm90_dense_decode_", "", dense_decode_sm90_params, 0)},
    {FORM("sm90_mha_backward_", "", mha_backward_sm90_params, 0)},
    {FORM("sm90_mha_forward_", "", mha_forward_sm90_params, 0)},
    {FORM("sm90_sparse_decode_", "_together", sparse_decode_sm90_params, 0)},
    {FORM("sm90_sparse_decode_", "", sparse_decode_params, 0)},
    {FORM("sm90_sparse_prefill_fp", "", sparse_prefill_fp8_params, 0)},
    {FORM("sm90_sparse_prefill_", "", sparse_prefill_sm90_params, 0)},
    {"", "", 0, 0},
};

/* The kernels that were requested. */
static struct CUkern_st {
    const struct form *form;
    char name[64];
    int shared_bytes[FAKE_DEVICES]; /* set by attribute */
} kernels[KERNELS_ASKED];

_Static_assert(sizeof(struct dense_decode_fp8_params) <= FAKE_PARAMETERS, "room for parameters");

static struct CUlib_st libraries[LIBRARIES];
static int num_libraries;
static struct CUctx_st primaries[FAKE_DEVICES][2];
static int place[FAKE_DEVICES]; /* which of the two is the primary context */
static unsigned long long last_id;
/* The context in which a kernel's function was requested. */
static unsigned long long ready_in[KERNELS_ASKED][FAKE_DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local struct CUctx_st *stack[DEPTH];
static _Thread_local int depth;
static _Thread_local unsigned capture_mode; /* global: the driver's default */

static struct fake_cuda fake = {.version = 13000,
                                .devices = 1,
                                .name = "NVIDIA Imaginary",
                                .capability = 90,
                                .sms = 132,
                                .shared_bytes = 232448};

struct fake_cuda *fake_cuda_state(void)
{
    return &fake;
}

int fake_cuda_depth(void)
{
    return depth;
}

unsigned fake_cuda_capture_mode(void)
{
    return capture_mode;
}

static void hold(int call, int device)
{
    const struct timespec pause = {0, 1000000};
    if (!fake.hold || call != fake.held_call || device != fake.held_device) return;
    fake.held = 1;
    for (int i = 0; fake.hold && i < 20000; i++) nanosleep(&pause, NULL);
    fake.held = 0;
}

/* Counts a call; returns the answer that a test preset. */
static cu_result called(int call)
{
    pthread_mutex_lock(&mutex);
    const cu_result answer = ++fake.calls[call] > fake.passes[call] ? fake.fails[call] : CU_SUCCESS;
    if (answer && fake.once[call]) fake.fails[call] = CU_SUCCESS;
    pthread_mutex_unlock(&mutex);
    if (depth) hold(call, stack[depth - 1]->device);
    return answer;
}

/* Returns the current context; NULL if none. */
static struct CUctx_st *current(void)
{
    return depth ? stack[depth - 1] : NULL;
}

/* Returns the result of an entry that works in the current context. */
static cu_result usable(void)
{
    if (!current()) return FAKE_INVALID_CONTEXT;
    return current()->destroyed ? FAKE_CONTEXT_IS_DESTROYED : CU_SUCCESS;
}

#define CALLED(name)                                                                                         \
    do {                                                                                                     \
        const cu_result result = called(CALL_##name);                                                        \
        if (result) return result;                                                                           \
    } while (0)

static int ordinal(cu_device device)
{
    return device >= FAKE_HANDLE && device < FAKE_HANDLE + fake.devices ? device - FAKE_HANDLE : -1;
}

cu_result cuDriverGetVersion(int *version)
{
    *version = fake.version;
    return CU_SUCCESS;
}

cu_result cuInit(unsigned flags)
{
    CALLED(cuInit);
    return flags ? FAKE_INVALID_VALUE : CU_SUCCESS;
}

cu_result cuDeviceGetCount(int *count)
{
    CALLED(cuDeviceGetCount);
    *count = fake.devices;
    return CU_SUCCESS;
}

cu_result cuDeviceGet(cu_device *device, int number)
{
    CALLED(cuDeviceGet);
    if (number < 0 || number >= fake.devices) return FAKE_INVALID_DEVICE;
    *device = FAKE_HANDLE + number;
    return CU_SUCCESS;
}

cu_result cuDeviceGetName(char *name, int size, cu_device device)
{
    CALLED(cuDeviceGetName);
    if (ordinal(device) < 0) return FAKE_INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s", fake.name);
    return CU_SUCCESS;
}

cu_result cuDeviceGetAttribute(int *value, unsigned attribute, cu_device device)
{
    CALLED(cuDeviceGetAttribute);
    if (ordinal(device) < 0) return FAKE_INVALID_DEVICE;
    switch (attribute) {
    case CU_ATTRIBUTE_SM_COUNT: *value = fake.sms; return CU_SUCCESS;
    case CU_ATTRIBUTE_CAPABILITY_MAJOR: *value = fake.capability / 10; return CU_SUCCESS;
    case CU_ATTRIBUTE_CAPABILITY_MINOR: *value = fake.capability % 10; return CU_SUCCESS;
    case CU_ATTRIBUTE_SHARED_BYTES: *value = fake.shared_bytes; return CU_SUCCESS;
    default: return FAKE_INVALID_VALUE;
    }
}

cu_result cuDevicePrimaryCtxRetain(cu_context *context, cu_device device)
{
    CALLED(cuDevicePrimaryCtxRetain);
    const int k = ordinal(device);
    if (k < 0) return FAKE_INVALID_DEVICE;
    hold(CALL_cuDevicePrimaryCtxRetain, k);
    pthread_mutex_lock(&mutex);
    struct CUctx_st *primary = &primaries[k][place[k]];
    fake.retained[k]++;
    if (!primary->primary || primary->destroyed)
        *primary = (struct CUctx_st){.device = k, .primary = 1, .id = ++last_id};
    pthread_mutex_unlock(&mutex);
    *context = primary;
    return CU_SUCCESS;
}

cu_result cuDevicePrimaryCtxGetState(cu_device device, unsigned *flags, int *active)
{
    CALLED(cuDevicePrimaryCtxGetState);
    const int k = ordinal(device);
    if (k < 0) return FAKE_INVALID_DEVICE;
    const struct CUctx_st *primary = &primaries[k][place[k]];
    *flags = 0, *active = primary->primary && !primary->destroyed;
    return CU_SUCCESS;
}

/* As in the driver: threads keep it as their current context, and retaining it makes it usable again. Its
 * modules and settings are lost. */
cu_result cuDevicePrimaryCtxReset_v2(cu_device device)
{
    const int k = ordinal(device);
    if (k < 0) return FAKE_INVALID_DEVICE;
    pthread_mutex_lock(&mutex);
    primaries[k][place[k]].destroyed = 1;
    if (fake.resets_move) place[k] = !place[k];
    for (int i = 0; i < KERNELS_ASKED; i++) kernels[i].shared_bytes[k] = 0;
    pthread_mutex_unlock(&mutex);
    return CU_SUCCESS;
}

void fake_cuda_context(struct CUctx_st *context, int device)
{
    pthread_mutex_lock(&mutex);
    *context = (struct CUctx_st){.device = device, .id = ++last_id};
    pthread_mutex_unlock(&mutex);
}

cu_result cuCtxGetCurrent(cu_context *context)
{
    CALLED(cuCtxGetCurrent);
    *context = current();
    return CU_SUCCESS;
}

cu_result cuCtxPushCurrent_v2(cu_context context)
{
    CALLED(cuCtxPushCurrent_v2);
    if (!context || depth == DEPTH) return FAKE_INVALID_CONTEXT;
    if (context->destroyed) return FAKE_CONTEXT_IS_DESTROYED;
    stack[depth++] = context;
    return CU_SUCCESS;
}

cu_result cuCtxPopCurrent_v2(cu_context *context)
{
    CALLED(cuCtxPopCurrent_v2);
    if (!depth) return FAKE_INVALID_CONTEXT;
    *context = stack[--depth];
    return CU_SUCCESS;
}

cu_result cuCtxGetDevice(cu_device *device)
{
    CALLED(cuCtxGetDevice);
    if (!depth) return FAKE_INVALID_CONTEXT;
    *device = FAKE_HANDLE + stack[depth - 1]->device;
    return CU_SUCCESS;
}

cu_result cuCtxGetId(cu_context context, unsigned long long *id)
{
    CALLED(cuCtxGetId);
    if (!context && usable()) return usable();
    *id = (context ? context : current())->id;
    return CU_SUCCESS;
}

/* Not among the entries that can be made to fail: drivers before CUDA 12.4 have none. */
cu_result cuCtxGetDevResource(cu_context context, struct cu_resource *resource, unsigned type)
{
    if (!context || type != CU_RESOURCE_SM) return FAKE_INVALID_CONTEXT;
    memset(resource, 0, 144);
    resource->type = type;
    resource->sm_count = (unsigned)(fake.context_sms ? fake.context_sms : fake.sms);
    return CU_SUCCESS;
}

static int loading_is_refused(void)
{
    return fake.capturing && capture_mode != CU_CAPTURE_RELAXED;
}

cu_result cuLibraryLoadData(cu_library *library, const void *image, unsigned *jit_options, void **jit_values,
                            unsigned num_jit, unsigned *options, void **values, unsigned num_options)
{
    CALLED(cuLibraryLoadData);
    const struct timespec pause = {0, 1000000}; /* long enough for other threads to arrive too, if they may */
    nanosleep(&pause, NULL);
    (void)jit_options, (void)jit_values, (void)options, (void)values;
    if (num_jit || num_options || num_libraries == LIBRARIES) return FAKE_INVALID_VALUE;
    if (loading_is_refused()) return FAKE_CAPTURE_UNSUPPORTED;
    libraries[num_libraries].image = image;
    *library = &libraries[num_libraries++];
    return CU_SUCCESS;
}

static const struct form *form_of(const char *name)
{
    const struct form *form = forms;
    for (;; form++) {
        const size_t length = strlen(name), begins = strlen(form->begins), ends = strlen(form->ends);
        if (length >= begins + ends && !strncmp(name, form->begins, begins) &&
            !strcmp(name + length - ends, form->ends))
            return form;
    }
}

cu_result cuLibraryGetKernel(cu_kernel *kernel, cu_library library, const char *name)
{
    CALLED(cuLibraryGetKernel);
    if (!library->image) return FAKE_NOT_FOUND;
    pthread_mutex_lock(&mutex);
    struct CUkern_st *at = kernels, *const end = kernels + KERNELS_ASKED;
    while (at < end && at->form && strcmp(at->name, name) != 0) at++;
    if (at < end && !at->form) at->form = form_of(name), snprintf(at->name, sizeof at->name, "%s", name);
    pthread_mutex_unlock(&mutex);
    *kernel = at;
    return at < end ? CU_SUCCESS : FAKE_NOT_FOUND;
}

cu_result cuKernelGetFunction(cu_function *function, cu_kernel kernel)
{
    CALLED(cuKernelGetFunction);
    if (usable()) return usable();
    if (loading_is_refused()) return FAKE_CAPTURE_UNSUPPORTED;
    ready_in[kernel - kernels][current()->device] = current()->id;
    *function = (cu_function)(void *)kernel;
    return CU_SUCCESS;
}

cu_result cuKernelSetAttribute(unsigned attribute, int value, cu_kernel kernel, cu_device device)
{
    CALLED(cuKernelSetAttribute);
    const int k = ordinal(device);
    if (k < 0) return FAKE_INVALID_DEVICE;
    if (attribute != CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES || value < 0 || value > fake.shared_bytes)
        return FAKE_INVALID_VALUE;
    kernel->shared_bytes[k] = value;
    return CU_SUCCESS;
}

cu_result cuLaunchKernelEx(const struct cu_launch_config *config, cu_function function, void **parameters,
                           void **extra)
{
    CALLED(cuLaunchKernelEx);
    struct CUkern_st *kernel = (struct CUkern_st *)(void *)function;
    if (usable()) return usable();
    /* The driver would load it now, and a captured launch would fail. */
    if (ready_in[kernel - kernels][current()->device] != current()->id) return FAKE_NOT_FOUND;
    const struct cu_launch_config *c = config;
    const int set = kernel->shared_bytes[stack[depth - 1]->device];
    const unsigned most = set > SHARED_BYTES_UNASKED ? (unsigned)set : SHARED_BYTES_UNASKED;
    if (extra || !c->grid_x || c->grid_x > INT32_MAX || c->grid_y != 1 || c->grid_z != 1 || !c->block_x ||
        c->block_x > 1024 || c->block_y != 1 || c->block_z != 1 || c->shared_bytes > most ||
        c->num_attributes > 2)
        return FAKE_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    cu_result result = FAKE_INVALID_VALUE;
    if (fake.launches < FAKE_LAUNCHES) {
        struct fake_launch *launch = &fake.launch[fake.launches++];
        launch->kernel = kernel->name;
        launch->context = stack[depth - 1];
        launch->config = *c;
        for (unsigned i = 0; i < c->num_attributes; i++) launch->attributes[i] = c->attributes[i];
        unsigned char *const to = launch->parameters;
        memcpy(to, parameters[0], kernel->form->bytes);
        for (int i = 0; i < kernel->form->also; i++)
            memcpy(to + kernel->form->bytes + 4 * (size_t)i, parameters[1 + i], 4);
        result = CU_SUCCESS;
    }
    pthread_mutex_unlock(&mutex);
    return result;
}

static cu_result text_of(cu_result error, bool name, const char **text)
{
    static const struct {
        cu_result error;
        const char *name, *text;
    } errors[] = {{FAKE_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
                  {FAKE_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
                  {803, "CUDA_ERROR_MISMATCH", "driver and library differ"}};
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) *text = name ? errors[i].name : errors[i].text;
    return *text ? CU_SUCCESS : FAKE_INVALID_VALUE;
}

cu_result cuGetErrorName(cu_result error, const char **text)
{
    CALLED(cuGetErrorName);
    return text_of(error, true, text);
}

cu_result cuGetErrorString(cu_result error, const char **text)
{
    CALLED(cuGetErrorString);
    return text_of(error, false, text);
}

cu_result cuThreadExchangeStreamCaptureMode(unsigned *mode)
{
    CALLED(cuThreadExchangeStreamCaptureMode);
    if (*mode > CU_CAPTURE_RELAXED) return FAKE_INVALID_VALUE;
    const unsigned before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CU_SUCCESS;
}

/* The driver's documented requirements for a map without interleaving, of 16-bit elements. */
cu_result cuTensorMapEncodeTiled(cu_tensor_map map, unsigned type, uint32_t rank, void *base,
                                 const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                                 const uint32_t *steps, unsigned interleave, unsigned swizzle,
                                 unsigned promotion, unsigned fill)
{
    enum { ELEMENT_BYTES = 2, LINE_BYTES = 128, MOST_BOX = 256, MOST_STEP = 8 };
    CALLED(cuTensorMapEncodeTiled);
    if (!map || (uintptr_t)map % 64 || !base || (uintptr_t)base % 16 || rank < 1 || rank > 5)
        return FAKE_INVALID_VALUE;
    if ((type != CU_TENSOR_FLOAT16 && type != CU_TENSOR_BFLOAT16) ||
        interleave != CU_TENSOR_INTERLEAVE_NONE || swizzle > CU_TENSOR_SWIZZLE_128B ||
        promotion > 3 /* 256 bytes */ || fill > 1 /* NaN */)
        return FAKE_INVALID_VALUE;
    struct fake_tensor view = {.type = type,
                               .rank = rank,
                               .base = base,
                               .interleave = interleave,
                               .swizzle = swizzle,
                               .promotion = promotion,
                               .fill = fill};
    for (uint32_t i = 0; i < rank; i++) {
        view.sizes[i] = sizes[i], view.box[i] = box[i], view.steps[i] = steps[i];
        if (!sizes[i] || sizes[i] > UINT64_C(1) << 32 || !box[i] || box[i] > MOST_BOX || !steps[i] ||
            steps[i] > MOST_STEP)
            return FAKE_INVALID_VALUE;
        if (i == 0) continue;
        view.strides[i - 1] = strides[i - 1];
        if (!strides[i - 1] || strides[i - 1] % 16 || strides[i - 1] >= UINT64_C(1) << 40)
            return FAKE_INVALID_VALUE;
    }
    const uint32_t inner_bytes = box[0] * ELEMENT_BYTES;
    if (inner_bytes % 16 || (swizzle == CU_TENSOR_SWIZZLE_128B && inner_bytes > LINE_BYTES) ||
        (swizzle == CU_TENSOR_SWIZZLE_64B && inner_bytes > LINE_BYTES / 2))
        return FAKE_INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    memset(map, 0, sizeof(struct tensor_map));
    memcpy(map, &fake.tensors, sizeof fake.tensors);
    fake.tensor[fake.tensors++ % FAKE_TENSORS] = view;
    pthread_mutex_unlock(&mutex);
    return CU_SUCCESS;
}
