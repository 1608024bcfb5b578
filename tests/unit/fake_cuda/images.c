/* SPDX-License-Identifier: MIT
 *
 * The images of tests with the fake driver, in place of the library's: each is its own name.
 */
#include "cuda/images.h"

static const struct cuda_image images[] = {
#define KERNELS(image, names, params, also)                                                                  \
    {image, (const unsigned char *)(image), (const unsigned char *)(image) + sizeof(image)},
#include "kernels.def"
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
