/* SPDX-License-Identifier: MIT
 *
 * Declares the entry points of the CUDA 12.0 driver that it uses: tools and tests build without a toolkit.
 */
#include "gpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t device_pointer; /* CUdeviceptr */
typedef void *handle;            /* CUcontext, CUstream, CUevent, CUgraph, CUgraphExec */

enum { SUCCESS = 0 }; /* CUDA_SUCCESS */
enum { STREAM_NON_BLOCKING = 1, CAPTURE_GLOBAL = 0, EVENT_DEFAULT = 0 };
enum { /* CUdevice_attribute */
       ATTRIBUTE_MULTIPROCESSORS = 16,
       ATTRIBUTE_L2_BYTES = 38,
       ATTRIBUTE_MAJOR = 75,
       ATTRIBUTE_MINOR = 76
};
enum { KERNEL_SHARED_BYTES = 8 }; /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */

/* X(member, symbol of the driver, parameters) */
#define ENTRIES(X)                                                                                           \
    X(init, cuInit, (unsigned flags))                                                                        \
    X(error_string, cuGetErrorString, (int error, const char **text))                                        \
    X(driver_version, cuDriverGetVersion, (int *version))                                                    \
    X(device_count, cuDeviceGetCount, (int *count))                                                          \
    X(device_get, cuDeviceGet, (int *device, int ordinal))                                                   \
    X(device_name, cuDeviceGetName, (char *name, int size, int device))                                      \
    X(device_memory, cuDeviceTotalMem_v2, (size_t * bytes, int device))                                      \
    X(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))                       \
    X(context_retain, cuDevicePrimaryCtxRetain, (handle * context, int device))                              \
    X(context_set, cuCtxSetCurrent, (handle context))                                                        \
    X(context_wait, cuCtxSynchronize, (void))                                                                \
    X(alloc, cuMemAlloc_v2, (device_pointer * memory, size_t bytes))                                         \
    X(free, cuMemFree_v2, (device_pointer memory))                                                           \
    X(upload, cuMemcpyHtoD_v2, (device_pointer to, const void *from, size_t bytes))                          \
    X(download, cuMemcpyDtoH_v2, (void *to, device_pointer from, size_t bytes))                              \
    X(fill, cuMemsetD8_v2, (device_pointer to, unsigned char byte, size_t bytes))                            \
    X(stream_open, cuStreamCreate, (handle * stream, unsigned flags))                                        \
    X(stream_close, cuStreamDestroy_v2, (handle stream))                                                     \
    X(stream_wait, cuStreamSynchronize, (handle stream))                                                     \
    X(event_open, cuEventCreate, (handle * event, unsigned flags))                                           \
    X(event_close, cuEventDestroy_v2, (handle event))                                                        \
    X(event_record, cuEventRecord, (handle event, handle stream))                                            \
    X(event_wait, cuEventSynchronize, (handle event))                                                        \
    X(event_elapsed, cuEventElapsedTime, (float *milliseconds, handle first, handle second))                 \
    X(capture_begin, cuStreamBeginCapture_v2, (handle stream, int mode))                                     \
    X(capture_end, cuStreamEndCapture, (handle stream, handle * graph))                                      \
    X(graph_instantiate, cuGraphInstantiateWithFlags, (handle * exec, handle graph, uint64_t flags))         \
    X(graph_launch, cuGraphLaunch, (handle exec, handle stream))                                             \
    X(graph_close, cuGraphDestroy, (handle graph))                                                           \
    X(exec_close, cuGraphExecDestroy, (handle exec))                                                         \
    X(device_bus, cuDeviceGetPCIBusId, (char *text, int size, int device))                                   \
    X(module_open, cuModuleLoadData, (handle * module, const void *image))                                   \
    X(module_close, cuModuleUnload, (handle module))                                                         \
    X(module_kernel, cuModuleGetFunction, (handle * kernel, handle module, const char *name))                \
    X(kernel_set, cuFuncSetAttribute, (handle kernel, int attribute, int value))                             \
    X(launch, cuLaunchKernel,                                                                                \
      (handle kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
       unsigned block_z, unsigned shared, handle stream, void **parameters, void **extra))

/* NOLINTBEGIN(bugprone-macro-parentheses): names of members and of parameters */
struct entries {
#define X(member, symbol, parameters) int(*member) parameters;
    ENTRIES(X)
#undef X
};
/* NOLINTEND(bugprone-macro-parentheses) */

static const struct {
    const char *symbol;
    size_t place;
} entries[] = {
#define X(member, symbol, parameters) {#symbol, offsetof(struct entries, member)},
    ENTRIES(X)
#undef X
};

enum { MOST_DEVICES = 64 };

static struct {
    pthread_mutex_t lock;
    bool tried;
    char refusal[200]; /* "" if the driver is initialised */
    handle context[MOST_DEVICES];
    struct entries call;
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool passed(int error, const char *what, struct reason *reason)
{
    if (error == SUCCESS) return true;
    const char *words = NULL;
    if (driver.call.error_string(error, &words) != SUCCESS || !words) words = "unknown error";
    return reason_set(reason, "GPU: %s: %s (error %d)", what, words, error);
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(driver.refusal, sizeof driver.refusal, "there is no NVIDIA driver here (%s)", dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        void *address = dlsym(library, entries[i].symbol);
        if (!address) {
            snprintf(driver.refusal, sizeof driver.refusal, "libcuda.so.1 has no %s", entries[i].symbol);
            return;
        }
        memcpy((char *)&driver.call + entries[i].place, &address, sizeof address);
    }
    struct reason reason;
    int count = 0;
    if (!passed(driver.call.init(0), "cuInit", &reason) ||
        !passed(driver.call.device_count(&count), "cuDeviceGetCount", &reason))
        snprintf(driver.refusal, sizeof driver.refusal, "%.190s", reason.text);
}

static bool load_once(struct reason *reason)
{
    pthread_mutex_lock(&driver.lock);
    if (!driver.tried) load();
    driver.tried = true;
    pthread_mutex_unlock(&driver.lock);
    return !driver.refusal[0] || reason_set(reason, "GPU: %s", driver.refusal);
}

bool gpu_open(int32_t id, struct reason *reason)
{
    int count = 0, device = 0, error = SUCCESS;
    if (!load_once(reason) || !passed(driver.call.device_count(&count), "counting devices", reason))
        return false;
    if (count > MOST_DEVICES) count = MOST_DEVICES;
    if (id < 0 || id >= count)
        return reason_set(reason, "GPU: cuda:%d: is not here, this machine has %d", (int)id, count);
    if (!passed(driver.call.device_get(&device, id), "finding the device", reason)) return false;
    pthread_mutex_lock(&driver.lock);
    if (!driver.context[id]) error = driver.call.context_retain(&driver.context[id], device);
    pthread_mutex_unlock(&driver.lock);
    return passed(error, "opening the primary context", reason) &&
           passed(driver.call.context_set(driver.context[id]), "making the context current", reason);
}

/* The management library (NVML), which comes with the driver and reports what the driver API does not;
 * NULL if it is absent. */
struct management {
    void *library;
    int (*start)(void);
    int (*stop)(void);
    int (*version)(char *text, unsigned size);
    int (*find)(const char *bus, handle *device);
    int (*clock)(handle device, int which, unsigned *mhz);
};

static bool management_open(struct management *m)
{
    static const char *const symbols[] = {"nvmlInit_v2", "nvmlShutdown", "nvmlSystemGetDriverVersion",
                                          "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetClockInfo"};
    enum { SYMBOLS = sizeof symbols / sizeof symbols[0] };
    void *places[SYMBOLS] = {&m->start, &m->stop, &m->version, &m->find, &m->clock};
    m->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    bool good = m->library != NULL;
    for (int i = 0; good && i < SYMBOLS; i++) {
        void *address = dlsym(m->library, symbols[i]);
        memcpy(places[i], &address, sizeof address);
        good = address != NULL;
    }
    if (good && m->start() == 0) return true;
    if (m->library) dlclose(m->library);
    return false;
}

static void management_close(struct management *m)
{
    m->stop();
    dlclose(m->library);
}

int gpu_sm_mhz(int32_t id)
{
    enum { CLOCK_SM = 1 }; /* NVML_CLOCK_SM */
    struct management m;
    struct reason reason;
    char bus[32];
    unsigned mhz = 0;
    int device = 0;
    handle found = NULL;
    if (!load_once(&reason) || driver.call.device_get(&device, id) != SUCCESS ||
        driver.call.device_bus(bus, sizeof bus, device) != SUCCESS || !management_open(&m))
        return 0;
    if (m.find(bus, &found) != 0 || m.clock(found, CLOCK_SM, &mhz) != 0) mhz = 0;
    management_close(&m);
    return (int)mhz;
}

bool gpu_describe(int32_t id, struct gpu_description *d, struct reason *reason)
{
    int device = 0, cuda = 0, l2 = 0;
    memset(d, 0, sizeof *d);
    if (!load_once(reason) || !passed(driver.call.device_get(&device, id), "finding the device", reason) ||
        !passed(driver.call.driver_version(&cuda), "the driver's version", reason) ||
        !passed(driver.call.device_name(d->name, sizeof d->name - 1, device), "the device's name", reason) ||
        !passed(driver.call.device_memory(&d->memory, device), "the device's memory", reason))
        return false;
    const struct {
        int attribute, *value;
    } wanted[] = {{ATTRIBUTE_MAJOR, &d->major},
                  {ATTRIBUTE_MINOR, &d->minor},
                  {ATTRIBUTE_MULTIPROCESSORS, &d->multiprocessors},
                  {ATTRIBUTE_L2_BYTES, &l2}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        if (!passed(driver.call.device_attribute(wanted[i].value, wanted[i].attribute, device),
                    "an attribute of the device", reason))
            return false;
    d->cache = (size_t)l2;
    struct management m;
    const bool managed = management_open(&m), told = managed && m.version(d->driver, sizeof d->driver) == 0;
    if (managed) management_close(&m);
    if (!told) snprintf(d->driver, sizeof d->driver, "CUDA %d.%d", cuda / 1000, cuda % 1000 / 10);
    return true;
}

/* ---- Memory --------------------------------------------------------------------------------- */

static device_pointer number_of(const void *memory)
{
    return (device_pointer)(uintptr_t)memory;
}

bool gpu_alloc(void **memory, size_t bytes, struct reason *reason)
{
    device_pointer pointer = 0;
    char what[64];
    snprintf(what, sizeof what, "allocating %zu bytes", bytes);
    *memory = NULL;
    if (!passed(driver.call.alloc(&pointer, bytes ? bytes : 1), what, reason)) return false;
    memcpy(memory, &pointer, sizeof pointer); /* an address in the device's address space */
    return true;
}

void gpu_free(void *memory)
{
    if (memory) driver.call.free(number_of(memory));
}

/* Waits for completion: copies from pageable memory and fills may return earlier. */
static bool done(int error, const char *what, struct reason *reason)
{
    return passed(error, what, reason) && passed(driver.call.context_wait(), what, reason);
}

bool gpu_upload(void *to, const void *from, size_t bytes, struct reason *reason)
{
    return !bytes || done(driver.call.upload(number_of(to), from, bytes), "copying to the device", reason);
}

bool gpu_download(void *to, const void *from, size_t bytes, struct reason *reason)
{
    return !bytes ||
           done(driver.call.download(to, number_of(from), bytes), "copying from the device", reason);
}

bool gpu_fill(void *to, unsigned char byte, size_t bytes, struct reason *reason)
{
    return !bytes || done(driver.call.fill(number_of(to), byte, bytes), "filling device memory", reason);
}

/* ---- Opening, closing and sending ------------------------------------------------------------- */

/* CALLS defines gpu_<name> as the driver call `of`; OPENS one that creates *what, NULL on failure. */
#define CALLS(name, parameters, of, words)                                                                   \
    bool gpu_##name parameters                                                                               \
    {                                                                                                        \
        return passed(driver.call.of, words, reason);                                                        \
    }
#define OPENS(name, what, parameters, of, words)                                                             \
    bool gpu_##name parameters                                                                               \
    {                                                                                                        \
        *(what) = NULL;                                                                                      \
        return passed(driver.call.of, words, reason);                                                        \
    }
#define CLOSES(what, entry)                                                                                  \
    void gpu_##what##_close(void *(what))                                                                    \
    {                                                                                                        \
        if (what) driver.call.entry(what);                                                                   \
    }
CLOSES(stream, stream_close)
CLOSES(event, event_close)
CLOSES(module, module_close)
CLOSES(graph, exec_close)
OPENS(stream_open, stream, (void **stream, struct reason *reason), stream_open(stream, STREAM_NON_BLOCKING),
      "opening a stream")
OPENS(event_open, event, (void **event, struct reason *reason), event_open(event, EVENT_DEFAULT),
      "opening an event")
OPENS(module_open, module, (void **module, const char *ptx, struct reason *reason), module_open(module, ptx),
      "compiling a kernel")
OPENS(kernel, kernel, (void **kernel, void *module, const char *name, struct reason *reason),
      module_kernel(kernel, module, name), name)
CALLS(stream_wait, (void *stream, struct reason *reason), stream_wait(stream), "running a call")
CALLS(event_record, (void *event, void *stream, struct reason *reason), event_record(event, stream),
      "recording an event")
CALLS(capture_begin, (void *stream, struct reason *reason), capture_begin(stream, CAPTURE_GLOBAL),
      "beginning a capture")
CALLS(graph_launch, (void *graph, void *stream, struct reason *reason), graph_launch(graph, stream),
      "launching a graph")
CALLS(kernel_shared, (void *kernel, unsigned bytes, struct reason *reason),
      kernel_set(kernel, KERNEL_SHARED_BYTES, (int)bytes), "asking for shared memory of a kernel")
CALLS(launch,
      (void *kernel, unsigned blocks, unsigned threads, unsigned shared, void *stream, void **parameters,
       struct reason *reason),
      launch(kernel, blocks, 1, 1, threads, 1, 1, shared, stream, parameters, NULL), "launching a kernel")

bool gpu_event_seconds(void *first, void *second, double *seconds, struct reason *reason)
{
    float milliseconds = 0.0f;
    if (!passed(driver.call.event_wait(second), "running a call", reason) ||
        !passed(driver.call.event_elapsed(&milliseconds, first, second), "the time between events", reason))
        return false;
    *seconds = 1e-3 * (double)milliseconds;
    return true;
}

bool gpu_best_time(const struct gpu_load *load, double *best, struct reason *reason)
{
    enum { TRIES = 5 };
    void *stream = NULL, *first = NULL, *second = NULL;
    bool good =
        gpu_stream_open(&stream, reason) && gpu_event_open(&first, reason) && gpu_event_open(&second, reason);
    *best = 1e30;
    for (int i = 0; good && i <= TRIES; i++) {
        double seconds = 0.0;
        good = gpu_event_record(first, stream, reason) &&
               gpu_launch(load->kernel, load->blocks, load->threads, 0, stream, load->parameters, reason) &&
               gpu_event_record(second, stream, reason) && gpu_event_seconds(first, second, &seconds, reason);
        if (i && seconds < *best) *best = seconds;
    }
    gpu_event_close(first), gpu_event_close(second), gpu_stream_close(stream);
    return good;
}

bool gpu_capture_end(void *stream, void **graph, struct reason *reason)
{
    handle captured = NULL;
    *graph = NULL;
    if (!passed(driver.call.capture_end(stream, &captured), "ending a capture", reason)) return false;
    const int error = driver.call.graph_instantiate(graph, captured, 0);
    driver.call.graph_close(captured); /* the executable graph does not need it */
    return passed(error, "making a graph", reason);
}
