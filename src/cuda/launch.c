/* SPDX-License-Identifier: MIT */
#include "launch.h"

#include "images.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SHARED_BYTES_UNASKED = 48 * 1024 /* available to every kernel without opt-in */ };

/* Loading takes long, so no lock is held during it. A thread marks the image, or the kernel in the contexts
 * of one device, that it loads; only threads that need the same one wait. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of the marks */
static pthread_cond_t unmarked = PTHREAD_COND_INITIALIZER;
static char marked_library; /* its address marks an image that is being loaded */
enum { NOWHERE = 0 };
/* Marks a kernel that is being made ready, in place of the context; contexts are stored as id + 1. */
static const uint64_t MARKED = UINT64_MAX;

static fmla_status failed(const char *operation, const struct cuda_scope *scope, const char *entry,
                          const char *subject, cu_result error)
{
    char what[128];
    snprintf(what, sizeof what, "%s of %s", entry, subject);
    return cuda_failed(operation, scope, what, error);
}

/* Loads a kernel of image i, which is marked; *library is NULL if the image is not loaded yet. */
static fmla_status load_kernel(const char *operation, const struct cuda_scope *scope,
                               struct cuda_kernel *kernel, size_t i, cu_library *library)
{
    const struct cuda_image *image = &cuda_build.images[i];
    cu_result error = CU_SUCCESS;
    if (!*library) error = scope->driver->library_load(library, image->begin, NULL, NULL, 0, NULL, NULL, 0);
    if (error) {
        *library = NULL;
        return failed(operation, scope, "cuLibraryLoadData", image->name, error);
    }
    error = scope->driver->library_kernel(&kernel->handle, *library, kernel->name);
    if (!error) return FMLA_OK;
    kernel->handle = NULL;
    return failed(operation, scope, "cuLibraryGetKernel", kernel->name, error);
}

/* Finds the kernel, once per process: libraries and kernels belong to no context, and outlive contexts that
 * are destroyed or reset. */
static fmla_status find_kernel(const char *operation, const struct cuda_scope *scope,
                               struct cuda_kernel *kernel)
{
    for (size_t i = 0; i < cuda_build.count; i++) {
        void **place = &cuda_build.loaded[i];
        fmla_status status = FMLA_OK;
        if (strcmp(cuda_build.images[i].name, kernel->image) != 0) continue;
        pthread_mutex_lock(&mutex);
        while (*place == &marked_library) pthread_cond_wait(&unmarked, &mutex);
        cu_library library = *place;
        *place = &marked_library;
        pthread_mutex_unlock(&mutex);
        if (!kernel->handle) status = load_kernel(operation, scope, kernel, i, &library);
        pthread_mutex_lock(&mutex);
        *place = library;
        pthread_cond_broadcast(&unmarked);
        pthread_mutex_unlock(&mutex);
        return status;
    }
    return fail(FMLA_UNSUPPORTED, "%s: kernel: %s is not in this build: it has no image %s", operation,
                kernel->name, kernel->image);
}

static fmla_status make_ready(const char *operation, const struct cuda_scope *scope,
                              struct cuda_kernel *kernel, int32_t shared_bytes)
{
    const int32_t id = scope->device->id;
    const fmla_status status = find_kernel(operation, scope, kernel);
    if (status) return status;
    /* This moves the code to the GPU, so that no launch has to wait for it. */
    cu_function function;
    cu_result error = scope->driver->kernel_function(&function, kernel->handle);
    if (error) return failed(operation, scope, "cuKernelGetFunction", kernel->name, error);
    const int32_t before = atomic_load(&kernel->shared_bytes[id]); /* it may be in use in another context */
    if (shared_bytes < before) shared_bytes = before;
    if (shared_bytes > SHARED_BYTES_UNASKED) {
        error = scope->driver->kernel_set_attribute(CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES, shared_bytes,
                                                    kernel->handle, scope->device->handle);
        if (error) return failed(operation, scope, "cuKernelSetAttribute", kernel->name, error);
    }
    atomic_store(&kernel->shared_bytes[id], shared_bytes);
    return FMLA_OK;
}

/* A thread that reads the context's number also sees everything stored before it: the handle and the allowed
 * shared memory. */
static bool is_ready(struct cuda_kernel *kernel, int32_t id, uint64_t context, int32_t shared_bytes)
{
    return atomic_load(&kernel->ready_in[id]) == context &&
           (shared_bytes <= SHARED_BYTES_UNASKED || shared_bytes <= atomic_load(&kernel->shared_bytes[id]));
}

fmla_status cuda_load(const char *operation, const struct cuda_scope *scope, struct cuda_kernel *kernel,
                      int32_t shared_bytes)
{
    const int32_t id = scope->device->id;
    const uint64_t context = scope->context_id + 1;
    if (is_ready(kernel, id, context, shared_bytes)) return FMLA_OK;
    pthread_mutex_lock(&mutex);
    while (atomic_load(&kernel->ready_in[id]) == MARKED) pthread_cond_wait(&unmarked, &mutex);
    const bool ready = is_ready(kernel, id, context, shared_bytes);
    if (!ready) atomic_store(&kernel->ready_in[id], MARKED);
    pthread_mutex_unlock(&mutex);
    if (ready) return FMLA_OK;

    /* While a stream is captured, its thread may not make calls that may allocate, unless it relaxes the
     * capture mode. */
    unsigned mode = CU_CAPTURE_RELAXED;
    fmla_status status;
    const cu_result error = scope->driver->exchange_capture_mode(&mode);
    if (error) {
        status = cuda_failed(operation, scope, "cuThreadExchangeStreamCaptureMode", error);
    } else {
        status = make_ready(operation, scope, kernel, shared_bytes);
        (void)scope->driver->exchange_capture_mode(&mode);
    }
    pthread_mutex_lock(&mutex);
    atomic_store(&kernel->ready_in[id], status ? NOWHERE : context);
    pthread_cond_broadcast(&unmarked);
    pthread_mutex_unlock(&mutex);
    return status;
}

int32_t cuda_sms_of_context(const struct cuda_scope *scope)
{
    static _Thread_local uint64_t known; /* the context's id + 1 */
    static _Thread_local int32_t sms;
    const struct driver *const driver = scope->driver;
    struct cu_resource resource;
    cu_context context;
    if (known == scope->context_id + 1) return sms;
    sms = scope->device->sms;
    if (driver->context_resource && !driver->context_get(&context) &&
        !driver->context_resource(context, &resource, CU_RESOURCE_SM) && resource.sm_count < INT32_MAX)
        sms = (int32_t)resource.sm_count;
    known = scope->context_id + 1;
    return sms;
}

fmla_status cuda_launch(const char *operation, const struct cuda_scope *scope,
                        const struct cuda_launch *launch, void **parameters)
{
    const int32_t shared_bytes = launch->shared_bytes ? launch->shared_bytes : launch->kernel->dynamic_bytes;
    const fmla_status status = cuda_load(operation, scope, launch->kernel, shared_bytes);
    if (status) return status;
    /* A launch that is captured is not refused for want of room, and would hang when the graph runs. */
    if ((launch->flags & LAUNCH_COOPERATIVE) && cuda_sms_of_context(scope) < scope->device->sms)
        return CUDA_NO_ROOM;
    struct cu_launch_attribute attributes[3];
    struct cu_launch_config config = {
        .grid_x = launch->blocks < INT32_MAX ? (unsigned)launch->blocks : INT32_MAX,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = (unsigned)(launch->threads ? launch->threads : launch->kernel->threads),
        .block_y = 1,
        .block_z = 1,
        .shared_bytes = (unsigned)shared_bytes,
        .stream = launch->stream,
        .attributes = attributes,
    };
    memset(attributes, 0, sizeof attributes);
    if (launch->cluster) {
        struct cu_launch_attribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_CLUSTER;
        attribute->value.cluster.x = (unsigned)launch->cluster;
        attribute->value.cluster.y = attribute->value.cluster.z = 1;
    }
    if (launch->flags & LAUNCH_COOPERATIVE) {
        struct cu_launch_attribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_COOPERATIVE;
        attribute->value.cooperative = 1;
    }
    if ((launch->flags & LAUNCH_OVERLAP) && scope->device->capability >= 90) {
        struct cu_launch_attribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_OVERLAP;
        attribute->value.overlap = 1;
    }
    /* cuLaunchKernelEx accepts a kernel in place of a function and takes the current context's. */
    const cu_result error =
        scope->driver->launch(&config, (cu_function)(void *)launch->kernel->handle, parameters, NULL);
    if (error == CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE && (launch->flags & LAUNCH_COOPERATIVE))
        return CUDA_NO_ROOM;
    return error ? failed(operation, scope, "launch", launch->kernel->name, error) : FMLA_OK;
}

fmla_status cuda_launch_alone(const char *operation, const char *argument, int32_t id,
                              const struct cuda_launch *launch, void **parameters)
{
    struct cuda_scope scope;
    fmla_status status = cuda_enter(operation, argument, id, &scope);
    if (status) return status;
    status = cuda_launch(operation, &scope, launch, parameters);
    cuda_leave(&scope);
    return status;
}

/* Maps each number to another that looks random (the finaliser of SplitMix64). */
static uint64_t mixed(uint64_t x)
{
    x *= UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A workspace may outlive a process that was killed in the middle of a launch, in memory that processes
 * share. The words there must not match a ticket of the next process, so processes start at random. */
static uint64_t first_ticket(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return mixed(mixed((uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec) +
                 (uint64_t)getpid()) |
           1;
}

uint64_t cuda_ticket(void)
{
    static _Atomic uint64_t launches; /* 0: none yet */
    uint64_t none = 0;
    if (!atomic_load_explicit(&launches, memory_order_relaxed))
        atomic_compare_exchange_strong(&launches, &none, first_ticket());
    return mixed(atomic_fetch_add_explicit(&launches, 1, memory_order_relaxed));
}
