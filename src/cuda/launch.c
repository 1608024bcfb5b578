/* SPDX-License-Identifier: MIT */
#include "launch.h"

#include "images.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { SHARED_BYTES_UNASKED = 48 * 1024 /* every kernel may be launched with these */ };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static fmla_status failed(const char *operation, const struct cuda_scope *scope, const char *entry,
                          const char *subject, cu_result error)
{
    char what[128];
    snprintf(what, sizeof what, "%s of %s", entry, subject);
    return cuda_failed(operation, scope, what, error);
}

/* Libraries and kernels belong to no context: once a process. */
static fmla_status find_kernel(const char *operation, const struct cuda_scope *scope,
                               struct cuda_kernel *kernel)
{
    const struct driver *driver = scope->driver;
    for (size_t i = 0; i < cuda_build.count; i++) {
        const struct cuda_image *image = &cuda_build.images[i];
        if (strcmp(image->name, kernel->image) != 0) continue;
        cu_library library = cuda_build.loaded[i];
        cu_result error = CU_SUCCESS;
        if (!library) {
            error = driver->library_load(&library, image->begin, NULL, NULL, 0, NULL, NULL, 0);
            if (error) return failed(operation, scope, "cuLibraryLoadData", image->name, error);
            cuda_build.loaded[i] = library;
        }
        error = driver->library_kernel(&kernel->handle, library, kernel->name);
        if (!error) return FMLA_OK;
        kernel->handle = NULL;
        return failed(operation, scope, "cuLibraryGetKernel", kernel->name, error);
    }
    return fail(FMLA_UNSUPPORTED, "%s: kernel: %s is not in this build: it has no image %s", operation,
                kernel->name, kernel->image);
}

static fmla_status make_ready(const char *operation, const struct cuda_scope *scope,
                              struct cuda_kernel *kernel, int32_t shared_bytes)
{
    const int32_t id = scope->device->id;
    if (!kernel->handle) {
        const fmla_status status = find_kernel(operation, scope, kernel);
        if (status) return status;
    }
    if (kernel->ready_in[id] != scope->context) {
        /* The code goes to the GPU here, so that no launch has to wait for it. */
        cu_function function;
        const cu_result error = scope->driver->kernel_function(&function, kernel->handle);
        if (error) return failed(operation, scope, "cuKernelGetFunction", kernel->name, error);
        kernel->ready_in[id] = scope->context;
    }
    if (shared_bytes > SHARED_BYTES_UNASKED && shared_bytes > kernel->shared_bytes[id]) {
        const cu_result error = scope->driver->kernel_set_attribute(
            CU_KERNEL_MAX_DYNAMIC_SHARED_BYTES, shared_bytes, kernel->handle, scope->device->handle);
        if (error) return failed(operation, scope, "cuKernelSetAttribute", kernel->name, error);
        kernel->shared_bytes[id] = shared_bytes;
    }
    return FMLA_OK;
}

fmla_status cuda_load(const char *operation, const struct cuda_scope *scope, struct cuda_kernel *kernel,
                      int32_t shared_bytes)
{
    const int32_t id = scope->device->id;
    fmla_status status = FMLA_OK;
    pthread_mutex_lock(&mutex);
    if (!kernel->handle || kernel->ready_in[id] != scope->context ||
        (shared_bytes > SHARED_BYTES_UNASKED && shared_bytes > kernel->shared_bytes[id])) {
        /* While a stream is captured, what may allocate is refused to its thread, unless that relaxes the mode. */
        unsigned mode = CU_CAPTURE_RELAXED;
        const cu_result error = scope->driver->exchange_capture_mode(&mode);
        if (error) {
            status = cuda_failed(operation, scope, "cuThreadExchangeStreamCaptureMode", error);
        } else {
            status = make_ready(operation, scope, kernel, shared_bytes);
            (void)scope->driver->exchange_capture_mode(&mode);
        }
    }
    pthread_mutex_unlock(&mutex);
    return status;
}

fmla_status cuda_launch(const char *operation, const struct cuda_scope *scope,
                        const struct cuda_launch *launch, void **parameters)
{
    const fmla_status status = cuda_load(operation, scope, launch->kernel, launch->shared_bytes);
    if (status) return status;
    struct cu_launch_attribute attributes[2];
    struct cu_launch_config config = {
        .grid_x = launch->blocks < INT32_MAX ? (unsigned)launch->blocks : INT32_MAX,
        .grid_y = 1,
        .grid_z = 1,
        .block_x = (unsigned)launch->threads,
        .block_y = 1,
        .block_z = 1,
        .shared_bytes = (unsigned)launch->shared_bytes,
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
    if ((launch->flags & LAUNCH_OVERLAP) && scope->device->capability >= 90) {
        struct cu_launch_attribute *attribute = &attributes[config.num_attributes++];
        attribute->id = CU_LAUNCH_OVERLAP;
        attribute->value.overlap = 1;
    }
    /* The driver takes a kernel where it asks for a function: the current context's. */
    const cu_result error =
        scope->driver->launch(&config, (cu_function)(void *)launch->kernel->handle, parameters, NULL);
    return error ? failed(operation, scope, "launch", launch->kernel->name, error) : FMLA_OK;
}
