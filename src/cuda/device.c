/* SPDX-License-Identifier: MIT */
#include "device.h"

#include "images.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
    pthread_once_t once;
    const struct driver *driver; /* NULL: no usable driver */
    int32_t count;
    struct cuda_device device[CUDA_DEVICES];
    struct cuda_device absent; /* returned for every device past the last */

    struct primary {
        pthread_mutex_t mutex;
        cu_context context; /* retained at first use, and again after a reset; NULL: not yet */
    } primary[CUDA_DEVICES];
} state = {.once = PTHREAD_ONCE_INIT};

int32_t cuda_build_code(const struct cuda_build *build, int32_t capability)
{
    int32_t code = 0;
    for (const char *at = build->targets; *at;) {
        char *end;
        const int32_t target = (int32_t)strtol(at, &end, 10);
        if (end == at) break;
        const bool exact = *end >= 'a' && *end <= 'z';
        const bool runs =
            exact ? capability == target : capability / 10 == target / 10 && capability >= target;
        if (runs && target > code) code = target;
        at = end + exact;
        while (*at == ' ') at++;
    }
    return !code && build->ptx && capability >= build->ptx ? build->ptx : code;
}

bool cuda_build_has(const struct cuda_build *build, const char *image)
{
    for (size_t i = 0; i < build->count; i++)
        if (strcmp(build->images[i].name, image) == 0) return true;
    return false;
}

/* Writes the reason to `unusable` if the device cannot be used. */
static void judge(struct cuda_device *d)
{
    if (d->capability < CUDA_LEAST_CAPABILITY)
        snprintf(d->unusable, sizeof d->unusable,
                 "%s is too old: its compute capability is %d.%d, the library needs %d.%d or later", d->name,
                 d->capability / 10, d->capability % 10, CUDA_LEAST_CAPABILITY / 10,
                 CUDA_LEAST_CAPABILITY % 10);
    else if (!d->code)
        snprintf(d->unusable, sizeof d->unusable,
                 "this build has no code for %s, whose compute capability is %d.%d; it was built for %s",
                 d->name, d->capability / 10, d->capability % 10, cuda_build.targets);
}

/* The most shared memory per CTA, by compute capability (CUDA C++ Programming Guide, "Compute
 * Capabilities"). */
static const struct {
    int32_t capability, shared_bytes;
} known_gpus[] = {{80, 163 << 10},  {86, 99 << 10},   {87, 163 << 10}, {89, 99 << 10},
                  {100, 227 << 10}, {103, 227 << 10}, {120, 99 << 10}, {121, 99 << 10}};

/* Gives a GPU another compute capability if FLASHMLA_GPU_CAPABILITY asks for it: kernels and tiles are chosen
 * for that one. */
static void pretend(struct cuda_device *d)
{
    static const char variable[] = "FLASHMLA_GPU_CAPABILITY";
    const char *text = getenv(variable);
    if (!text || !*text || *d->unusable) return;
    for (size_t i = 0; i < sizeof known_gpus / sizeof *known_gpus; i++) {
        char known[8];
        snprintf(known, sizeof known, "%d", known_gpus[i].capability);
        if (strcmp(text, known) != 0) continue;
        d->capability = known_gpus[i].capability;
        if (d->capability < d->code) d->code = d->capability;
        if (known_gpus[i].shared_bytes < d->shared_bytes) d->shared_bytes = known_gpus[i].shared_bytes;
        return;
    }
    snprintf(d->unusable, sizeof d->unusable,
             "environment variable %s is %.32s, must be 80, 86, 87, 89, 100, 103, 120 or 121", variable,
             text);
}

static void look_at(int32_t id)
{
    struct cuda_device *d = &state.device[id];
    int major = 0, minor = 0;
    char words[160];
    const char *asked = "cuDeviceGet";
    cu_result error = state.driver->device_get(&d->handle, id);
    if (!error) {
        asked = "cuDeviceGetName";
        error = state.driver->device_get_name(d->name, sizeof d->name, d->handle);
        d->name[sizeof d->name - 1] = 0;
    }
    const struct {
        unsigned attribute;
        int *value;
    } attributes[] = {
        {CU_ATTRIBUTE_CAPABILITY_MAJOR, &major},
        {CU_ATTRIBUTE_CAPABILITY_MINOR, &minor},
        {CU_ATTRIBUTE_SM_COUNT, &d->sms},
        {CU_ATTRIBUTE_SHARED_BYTES, &d->shared_bytes},
    };
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes && !error; i++) {
        asked = "cuDeviceGetAttribute";
        error = state.driver->device_get_attribute(attributes[i].value, attributes[i].attribute, d->handle);
    }
    d->capability = 10 * major + minor;
    d->code = cuda_build_code(&cuda_build, d->capability);
    if (error)
        snprintf(d->unusable, sizeof d->unusable, "%s: %s", asked, driver_words(state.driver, error, words));
    else
        judge(d), pretend(d);
}

static void look(void)
{
    char *absent = state.absent.unusable;
    const size_t size = sizeof state.absent.unusable;
    state.absent.id = -1;
    const char *why = "this build has no CUDA kernels";
    if (cuda_build.count) state.driver = driver_open(&why);
    if (!state.driver) {
        snprintf(absent, size, "%s", why);
        return;
    }
    int count = 0;
    char words[160];
    const cu_result error = state.driver->device_get_count(&count);
    if (error) {
        snprintf(absent, size, "cuDeviceGetCount: %s", driver_words(state.driver, error, words));
        return;
    }
    if (count == 1)
        snprintf(absent, size, "this machine has one GPU, cuda:0");
    else if (count > CUDA_DEVICES)
        snprintf(absent, size, "the library uses the first %d GPUs of a machine, this one has %d",
                 CUDA_DEVICES, count);
    else if (count)
        snprintf(absent, size, "this machine has %d GPUs, cuda:0 to cuda:%d", count, count - 1);
    else
        snprintf(absent, size, "there is no NVIDIA GPU that the driver can use");
    state.count = count < CUDA_DEVICES ? count : CUDA_DEVICES;
    for (int32_t id = 0; id < state.count; id++) {
        state.device[id].id = id;
        (void)pthread_mutex_init(&state.primary[id].mutex, NULL); /* cannot fail on Linux */
        look_at(id);
    }
}

const struct cuda_device *cuda_device(int32_t id)
{
    pthread_once(&state.once, look);
    return id >= 0 && id < state.count ? &state.device[id] : &state.absent;
}

int32_t cuda_device_count(void)
{
    pthread_once(&state.once, look);
    return state.count;
}

/* ---- The context of a call ------------------------------------------------------------------ */

fmla_status cuda_failed(const char *operation, const struct cuda_scope *scope, const char *what,
                        cu_result error)
{
    char words[160];
    return fail(FMLA_DEVICE_ERROR, "%s: cuda:%d: %s: %s", operation, scope->device->id, what,
                driver_words(scope->driver, error, words));
}

static bool is_gone(cu_result error)
{
    return error == CU_ERROR_INVALID_CONTEXT || error == CU_ERROR_CONTEXT_IS_DESTROYED;
}

/* Makes the device's primary context current. It is retained for good; otherwise its contents would come and
 * go with every call. The application may still reset it (cuDevicePrimaryCtxReset). It is then inactive until
 * somebody retains it; if somebody else did, its handle may have changed. */
static cu_result push_primary(const struct cuda_scope *scope, const char **asked)
{
    const struct driver *driver = scope->driver;
    const cu_device device = scope->device->handle;
    struct primary *primary = &state.primary[scope->device->id];
    unsigned flags;
    int active = 0;
    cu_result error = CU_SUCCESS;
    pthread_mutex_lock(&primary->mutex);
    *asked = "cuDevicePrimaryCtxGetState";
    if (primary->context) error = driver->primary_state(device, &flags, &active);
    for (bool retained = active; !error; retained = false) {
        *asked = "cuDevicePrimaryCtxRetain";
        if (!retained) error = driver->primary_retain(&primary->context, device);
        if (error) break;
        *asked = "cuCtxPushCurrent";
        error = driver->context_push(primary->context);
        if (!retained || !is_gone(error)) break;
        error = CU_SUCCESS;
    }
    pthread_mutex_unlock(&primary->mutex);
    return error;
}

static fmla_status other_context(const char *operation, const char *argument, const struct cuda_scope *scope,
                                 cu_device current)
{
    for (int32_t id = 0; id < state.count; id++)
        if (state.device[id].handle == current)
            return fail(
                FMLA_INVALID_ARGUMENT,
                "%s: %s: device is cuda:%d, must be cuda:%d, the device of this thread's current context",
                operation, argument, scope->device->id, id);
    return fail(FMLA_INVALID_ARGUMENT,
                "%s: %s: device is cuda:%d, must be the device of this thread's current context (handle %d)",
                operation, argument, scope->device->id, current);
}

fmla_status cuda_enter(const char *operation, const char *argument, int32_t id, struct cuda_scope *scope)
{
    *scope = (struct cuda_scope){.device = cuda_device(id)};
    if (*scope->device->unusable)
        return fail(FMLA_UNSUPPORTED, "%s: %s: device is cuda:%d: %s", operation, argument, id,
                    scope->device->unusable);
    scope->driver = state.driver;
    cu_context context;
    cu_result error = scope->driver->context_get(&context);
    if (error) return cuda_failed(operation, scope, "cuCtxGetCurrent", error);
    if (context) {
        cu_device current;
        error = scope->driver->context_device(&current);
        if (error) return cuda_failed(operation, scope, "cuCtxGetDevice", error);
        if (current != scope->device->handle) return other_context(operation, argument, scope, current);
    } else {
        const char *asked;
        error = push_primary(scope, &asked);
        if (error) return cuda_failed(operation, scope, asked, error);
        scope->pushed = true;
    }
    unsigned long long context_id;
    error = scope->driver->context_id(NULL, &context_id); /* of the current context */
    if (error) {
        cuda_leave(scope);
        return cuda_failed(operation, scope, "cuCtxGetId", error);
    }
    scope->context_id = context_id;
    return FMLA_OK;
}

void cuda_leave(const struct cuda_scope *scope)
{
    cu_context context;
    if (scope->pushed) (void)scope->driver->context_pop(&context); /* fails only if the context is lost */
}
