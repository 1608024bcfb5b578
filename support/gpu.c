/* SPDX-License-Identifier: MIT
 *
 * The driver's entry points are those of CUDA 12.0, declared here as far as they are used: tools and tests are built
 * where no toolkit is.
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
       ATTRIBUTE_CLOCK_KHZ = 13,
       ATTRIBUTE_MULTIPROCESSORS = 16,
       ATTRIBUTE_L2_BYTES = 38,
       ATTRIBUTE_MAJOR = 75,
       ATTRIBUTE_MINOR = 76
};

/* ENTRY(name of the member, symbol, parameters) */
#define ENTRIES(ENTRY)                                                                                       \
    ENTRY(init, cuInit, (unsigned flags))                                                                    \
    ENTRY(error_string, cuGetErrorString, (int error, const char **text))                                    \
    ENTRY(driver_version, cuDriverGetVersion, (int *version))                                                \
    ENTRY(device_count, cuDeviceGetCount, (int *count))                                                      \
    ENTRY(device_get, cuDeviceGet, (int *device, int ordinal))                                               \
    ENTRY(device_name, cuDeviceGetName, (char *name, int size, int device))                                  \
    ENTRY(device_memory, cuDeviceTotalMem_v2, (size_t * bytes, int device))                                  \
    ENTRY(device_attribute, cuDeviceGetAttribute, (int *value, int attribute, int device))                   \
    ENTRY(context_retain, cuDevicePrimaryCtxRetain, (handle * context, int device))                          \
    ENTRY(context_set, cuCtxSetCurrent, (handle context))                                                    \
    ENTRY(context_wait, cuCtxSynchronize, (void))                                                            \
    ENTRY(alloc, cuMemAlloc_v2, (device_pointer * memory, size_t bytes))                                     \
    ENTRY(free, cuMemFree_v2, (device_pointer memory))                                                       \
    ENTRY(upload, cuMemcpyHtoD_v2, (device_pointer to, const void *from, size_t bytes))                      \
    ENTRY(download, cuMemcpyDtoH_v2, (void *to, device_pointer from, size_t bytes))                          \
    ENTRY(fill, cuMemsetD8_v2, (device_pointer to, unsigned char byte, size_t bytes))                        \
    ENTRY(stream_open, cuStreamCreate, (handle * stream, unsigned flags))                                    \
    ENTRY(stream_close, cuStreamDestroy_v2, (handle stream))                                                 \
    ENTRY(stream_wait, cuStreamSynchronize, (handle stream))                                                 \
    ENTRY(event_open, cuEventCreate, (handle * event, unsigned flags))                                       \
    ENTRY(event_close, cuEventDestroy_v2, (handle event))                                                    \
    ENTRY(event_record, cuEventRecord, (handle event, handle stream))                                        \
    ENTRY(event_wait, cuEventSynchronize, (handle event))                                                    \
    ENTRY(event_elapsed, cuEventElapsedTime, (float *milliseconds, handle first, handle second))             \
    ENTRY(capture_begin, cuStreamBeginCapture_v2, (handle stream, int mode))                                 \
    ENTRY(capture_end, cuStreamEndCapture, (handle stream, handle * graph))                                  \
    ENTRY(graph_instantiate, cuGraphInstantiateWithFlags, (handle * exec, handle graph, uint64_t flags))     \
    ENTRY(graph_launch, cuGraphLaunch, (handle exec, handle stream))                                         \
    ENTRY(graph_close, cuGraphDestroy, (handle graph))                                                       \
    ENTRY(exec_close, cuGraphExecDestroy, (handle exec))

enum { MOST_DEVICES = 64 };

static struct {
    pthread_mutex_t lock;
    bool tried;
    char refusal[200]; /* "" if the driver is there and started */
    handle context[MOST_DEVICES];
#define MEMBER(name, symbol, parameters) int(*name) parameters;
    ENTRIES(MEMBER)
#undef MEMBER
} driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool passed(int error, const char *what, struct fault *fault)
{
    if (error == SUCCESS) return true;
    const char *words = NULL;
    if (driver.error_string(error, &words) != SUCCESS || !words) words = "unknown error";
    return fault_set(fault, "GPU: %s: %s (error %d)", what, words, error);
}

/* POSIX has no other way from an object pointer to a function's. */
static bool find_entry(void *library, const char *symbol, void *pointer)
{
    void *address = dlsym(library, symbol);
    memcpy(pointer, &address, sizeof address);
    if (!address) snprintf(driver.refusal, sizeof driver.refusal, "libcuda.so.1 has no %s", symbol);
    return address != NULL;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(driver.refusal, sizeof driver.refusal, "there is no NVIDIA driver here (%s)", dlerror());
        return;
    }
#define FIND(name, symbol, parameters)                                                                       \
    if (!find_entry(library, #symbol, &driver.name)) return;
    ENTRIES(FIND)
#undef FIND
    struct fault fault;
    int count = 0;
    if (!passed(driver.init(0), "cuInit", &fault) ||
        !passed(driver.device_count(&count), "cuDeviceGetCount", &fault))
        snprintf(driver.refusal, sizeof driver.refusal, "%.190s", fault.text);
}

static bool load_once(struct fault *fault)
{
    pthread_mutex_lock(&driver.lock);
    if (!driver.tried) load();
    driver.tried = true;
    pthread_mutex_unlock(&driver.lock);
    return !driver.refusal[0] || fault_set(fault, "GPU: %s", driver.refusal);
}

bool gpu_open(int32_t id, struct fault *fault)
{
    int count = 0, device = 0, error = SUCCESS;
    if (!load_once(fault) || !passed(driver.device_count(&count), "counting devices", fault)) return false;
    if (count > MOST_DEVICES) count = MOST_DEVICES;
    if (id < 0 || id >= count)
        return fault_set(fault, "GPU: cuda:%d: is not here, this machine has %d", (int)id, count);
    if (!passed(driver.device_get(&device, id), "finding the device", fault)) return false;
    pthread_mutex_lock(&driver.lock);
    if (!driver.context[id]) error = driver.context_retain(&driver.context[id], device);
    pthread_mutex_unlock(&driver.lock);
    return passed(error, "opening the primary context", fault) &&
           passed(driver.context_set(driver.context[id]), "making the context current", fault);
}

/* The driver's own version is told by the management library only, which comes with it. */
static bool version_from_nvml(char *text, unsigned size)
{
    int (*start)(void) = NULL;
    int (*stop)(void) = NULL;
    int (*version)(char *, unsigned) = NULL;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return false;
    void *addresses[3] = {dlsym(library, "nvmlInit_v2"), dlsym(library, "nvmlShutdown"),
                          dlsym(library, "nvmlSystemGetDriverVersion")};
    memcpy(&start, &addresses[0], sizeof start);
    memcpy(&stop, &addresses[1], sizeof stop);
    memcpy(&version, &addresses[2], sizeof version);
    bool good = start && stop && version && start() == 0;
    if (good) {
        good = version(text, size) == 0;
        stop();
    }
    dlclose(library);
    return good;
}

bool gpu_describe(int32_t id, struct gpu_description *d, struct fault *fault)
{
    int device = 0, cuda = 0, khz = 0, l2 = 0;
    memset(d, 0, sizeof *d);
    if (!load_once(fault) || !passed(driver.device_get(&device, id), "finding the device", fault) ||
        !passed(driver.driver_version(&cuda), "the driver's version", fault) ||
        !passed(driver.device_name(d->name, sizeof d->name - 1, device), "the device's name", fault) ||
        !passed(driver.device_memory(&d->memory, device), "the device's memory", fault))
        return false;
    const struct {
        int attribute, *value;
    } wanted[] = {{ATTRIBUTE_MAJOR, &d->major},
                  {ATTRIBUTE_MINOR, &d->minor},
                  {ATTRIBUTE_MULTIPROCESSORS, &d->multiprocessors},
                  {ATTRIBUTE_CLOCK_KHZ, &khz},
                  {ATTRIBUTE_L2_BYTES, &l2}};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        if (!passed(driver.device_attribute(wanted[i].value, wanted[i].attribute, device),
                    "an attribute of the device", fault))
            return false;
    d->sm_mhz = khz / 1000, d->cache = (size_t)l2;
    if (!version_from_nvml(d->driver, sizeof d->driver))
        snprintf(d->driver, sizeof d->driver, "CUDA %d.%d", cuda / 1000, cuda % 1000 / 10);
    return true;
}

/* ---- Memory --------------------------------------------------------------------------------- */

static device_pointer number_of(const void *memory)
{
    return (device_pointer)(uintptr_t)memory;
}

bool gpu_alloc(void **memory, size_t bytes, struct fault *fault)
{
    device_pointer pointer = 0;
    char what[64];
    snprintf(what, sizeof what, "allocating %zu bytes", bytes);
    *memory = NULL;
    if (!passed(driver.alloc(&pointer, bytes ? bytes : 1), what, fault)) return false;
    memcpy(memory, &pointer, sizeof pointer); /* an address, in another space */
    return true;
}

void gpu_free(void *memory)
{
    if (memory) driver.free(number_of(memory));
}

/* Copies from pageable memory and fills may return before the GPU has done them. */
static bool done(int error, const char *what, struct fault *fault)
{
    return passed(error, what, fault) && passed(driver.context_wait(), what, fault);
}

bool gpu_upload(void *to, const void *from, size_t bytes, struct fault *fault)
{
    return !bytes || done(driver.upload(number_of(to), from, bytes), "copying to the device", fault);
}

bool gpu_download(void *to, const void *from, size_t bytes, struct fault *fault)
{
    return !bytes || done(driver.download(to, number_of(from), bytes), "copying from the device", fault);
}

bool gpu_fill(void *to, unsigned char byte, size_t bytes, struct fault *fault)
{
    return !bytes || done(driver.fill(number_of(to), byte, bytes), "filling device memory", fault);
}

/* ---- Streams and events --------------------------------------------------------------------- */

bool gpu_stream_open(void **stream, struct fault *fault)
{
    *stream = NULL;
    return passed(driver.stream_open(stream, STREAM_NON_BLOCKING), "opening a stream", fault);
}

void gpu_stream_close(void *stream)
{
    if (stream) driver.stream_close(stream);
}

bool gpu_stream_wait(void *stream, struct fault *fault)
{
    return passed(driver.stream_wait(stream), "running a call", fault);
}

bool gpu_event_open(void **event, struct fault *fault)
{
    *event = NULL;
    return passed(driver.event_open(event, EVENT_DEFAULT), "opening an event", fault);
}

void gpu_event_close(void *event)
{
    if (event) driver.event_close(event);
}

bool gpu_event_record(void *event, void *stream, struct fault *fault)
{
    return passed(driver.event_record(event, stream), "recording an event", fault);
}

bool gpu_event_seconds(void *first, void *second, double *seconds, struct fault *fault)
{
    float milliseconds = 0.0f;
    if (!passed(driver.event_wait(second), "running a call", fault) ||
        !passed(driver.event_elapsed(&milliseconds, first, second), "the time between events", fault))
        return false;
    *seconds = 1e-3 * (double)milliseconds;
    return true;
}

/* ---- Graphs --------------------------------------------------------------------------------- */

bool gpu_capture_begin(void *stream, struct fault *fault)
{
    return passed(driver.capture_begin(stream, CAPTURE_GLOBAL), "beginning a capture", fault);
}

bool gpu_capture_end(void *stream, void **graph, struct fault *fault)
{
    handle captured = NULL;
    *graph = NULL;
    if (!passed(driver.capture_end(stream, &captured), "ending a capture", fault)) return false;
    const int error = driver.graph_instantiate(graph, captured, 0);
    driver.graph_close(captured); /* what was made of it stands alone */
    return passed(error, "making a graph", fault);
}

bool gpu_graph_launch(void *graph, void *stream, struct fault *fault)
{
    return passed(driver.graph_launch(graph, stream), "launching a graph", fault);
}

void gpu_graph_close(void *graph)
{
    if (graph) driver.exec_close(graph);
}
