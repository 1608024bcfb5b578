/* SPDX-License-Identifier: MIT
 *
 * The images of tests with the fake driver, in place of the library's: each is its own name.
 */
#include "cuda/images.h"

#define IMAGE_80(name) {name, (const unsigned char *)(name), (const unsigned char *)(name) + sizeof(name)},
#if defined(FAKE_WITHOUT_SM90) /* as where 9.0 was not among the GPUs of a build */
#define IMAGE_90(name)
#else
#define IMAGE_90(name) IMAGE_80(name)
#endif

static const struct cuda_image images[] = {
#include <images.def> /* made by CMake of the list of .cu files */
};

static void *loaded[sizeof images / sizeof *images];

const struct cuda_build cuda_build = {
    .toolkit = 13000,
    .driver = 13000,
#if defined(FAKE_WITHOUT_SM90)
    .targets = "80",
#else
    .targets = "80 90a",
#endif
    .ptx = 80,
    .count = sizeof images / sizeof *images,
    .images = images,
    .loaded = loaded,
};
