/* SPDX-License-Identifier: MIT
 *
 * test_unload LIBRARY - a host that loads the library, computes on several threads, and closes it, again and again. Threads
 * of the library outlive a call, so the code that they run has to stay where it is.
 */
#include "tensors.h"

#include <dlfcn.h>
#include <time.h>

enum { TIMES = 20, ROWS = 4096, D_V = 64 };
static float parts[2 * ROWS * D_V], lse_parts[2 * ROWS], out_data[ROWS * D_V];

/* ISO C has no conversion between data and function pointers. */
static void *symbol(void *library, const char *name)
{
    void *address = dlsym(library, name);
    CHECK(address != NULL, "%s: %s", name, dlerror());
    if (!address) exit(check_done("test_unload"));
    return address;
}

static void compute(void *library)
{
    fmla_status (*set_num_threads)(int32_t) = NULL;
    fmla_status (*prepare)(fmla_device) = NULL;
    fmla_status (*merge)(const fmla_merge_args *) = NULL;
    *(void **)&set_num_threads = symbol(library, "fmla_set_num_threads");
    *(void **)&prepare = symbol(library, "fmla_prepare");
    *(void **)&merge = symbol(library, "fmla_merge");
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = TENSOR_OF(parts, f32, 2, 1, ROWS, 1, D_V);
    args.lse_parts = TENSOR_OF(lse_parts, f32, 2, 1, 1, ROWS),
    args.out = TENSOR_OF(out_data, f32, 1, ROWS, 1, D_V);
    CHECK(!set_num_threads(4) && !prepare((fmla_device){FMLA_DEVICE_CPU, 0}), "%s", "no threads");
    for (int i = 0; i < 3; i++) CHECK(!merge(&args), "merge %d failed", i);
}

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    const struct timespec moment = {0, 5000000};
    for (int i = 0; i < 2 * ROWS * D_V; i++) parts[i] = 1.0f;
    for (int i = 0; i < TIMES; i++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        CHECK(library != NULL, "%s", dlerror());
        if (!library) break;
        compute(library);
        CHECK(!dlclose(library), "%s", dlerror());
        nanosleep(&moment, NULL); /* gives a crash time to happen */
        void *still = dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD);
        CHECK(still != NULL, "time %d: the library is gone, and its threads are not", i);
        if (still) dlclose(still);
    }
    CHECK(out_data[0] == 1.0f && out_data[ROWS * D_V - 1] == 1.0f, "%g and %g", (double)out_data[0],
          (double)out_data[ROWS * D_V - 1]);
    return check_done("test_unload");
}
