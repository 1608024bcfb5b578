/* SPDX-License-Identifier: MIT */
#include "driver.h"

#include "images.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

static struct {
    pthread_once_t once;
    struct driver driver;
    char why[320]; /* "" if the driver is usable */
} state = {.once = PTHREAD_ONCE_INIT};

/* POSIX allows calling a pointer from dlsym, but ISO C does not allow converting it, so its bytes are
 * copied. */
static int find(void *library, const char *name, void *entry, size_t size)
{
    void *symbol = dlsym(library, name);
    if (!symbol) return 0;
    memcpy(entry, &symbol, size);
    return 1;
}

const char *driver_version_words(int version, char buffer[48])
{
    const char *release = version == 12000 ? " (driver 525)" : version == 13000 ? " (driver 580)" : "";
    snprintf(buffer, 48, "CUDA %d.%d%s", version / 1000, version % 1000 / 10, release);
    return buffer;
}

/* The version is checked first, so that the message for an old driver says that it is old, not which entry it
 * lacks. */
static int version_is_enough(void *library)
{
    cu_result (*get_version)(int *version);
    char has[48], needs[48];
    if (!find(library, "cuDriverGetVersion", &get_version, sizeof get_version) ||
        get_version(&state.driver.version)) {
        state.driver.version = 0;
        snprintf(state.why, sizeof state.why,
                 "libcuda.so.1 is not an NVIDIA driver: cuDriverGetVersion is missing or fails");
        return 0;
    }
    if (state.driver.version >= cuda_build.driver) return 1;
    snprintf(state.why, sizeof state.why,
             "the NVIDIA driver is too old: it has %s, this build needs %s or later",
             driver_version_words(state.driver.version, has), driver_version_words(cuda_build.driver, needs));
    return 0;
}

static void open_driver(void)
{
    struct driver *d = &state.driver;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* stays open */
    if (!library) {
        const char *words = dlerror();
        snprintf(state.why, sizeof state.why, "there is no NVIDIA driver: %s",
                 words ? words : "libcuda.so.1");
        return;
    }
    if (!version_is_enough(library)) return;
    const struct {
        const char *name;
        void *entry;
    } entries[] = {
#define ENTRY(member, name, ...) {#name, &d->member},
        CUDA_DRIVER_ENTRIES(ENTRY)
#undef ENTRY
    };
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (!find(library, entries[i].name, entries[i].entry, sizeof d->init)) {
            snprintf(state.why, sizeof state.why, "libcuda.so.1 (CUDA %d.%d) has no %s", d->version / 1000,
                     d->version % 1000 / 10, entries[i].name);
            return;
        }
#define ENTRY(member, name, ...) find(library, #name, &d->member, sizeof d->member);
    CUDA_DRIVER_LATER_ENTRIES(ENTRY)
#undef ENTRY
    const cu_result result = d->init(0);
    if (!result) return;
    char words[160];
    if (result == CU_ERROR_NO_DEVICE)
        snprintf(state.why, sizeof state.why, "there is no NVIDIA GPU that the driver can use");
    else
        snprintf(state.why, sizeof state.why, "the NVIDIA driver does not start: %s",
                 driver_words(d, result, words));
}

const struct driver *driver_open(const char **why)
{
    pthread_once(&state.once, open_driver);
    *why = state.why;
    return *state.why ? NULL : &state.driver;
}

int driver_version(void)
{
    return state.driver.version;
}

const char *driver_words(const struct driver *driver, cu_result error, char buffer[160])
{
    const char *name = NULL, *words = NULL;
    if (driver->error_name(error, &name) || !name) name = "unknown error";
    if (driver->error_string(error, &words) || !words) words = "the driver does not describe it";
    snprintf(buffer, 160, "%s %u (%s)", name, error, words);
    return buffer;
}
