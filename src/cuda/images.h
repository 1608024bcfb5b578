/* SPDX-License-Identifier: MIT
 *
 * The machine code that the build embedded: one fatbin (code for several GPUs, compressed) a .cu file.
 * cmake/cuda.cmake makes the table; src/cuda/no_images.c is the one of a build without nvcc.
 */
#ifndef FMLA_CUDA_IMAGES_H
#define FMLA_CUDA_IMAGES_H

#include <stddef.h>

struct cuda_image {
    const char *name; /* the .cu file, from src/cuda, without its ending: "any/merge" */
    const unsigned char *begin, *end;
};

struct cuda_build {
    int toolkit;         /* the CUDA version of nvcc: 13000; 0: there are no images */
    int driver;          /* the least CUDA version of a driver that loads them */
    const char *targets; /* GPUs with machine code of their own: "80 90a" */
    int ptx;             /* later GPUs are served by the PTX for this one; 0: there is none */
    size_t count;
    const struct cuda_image *images;
    void **loaded; /* the driver's handle of each image; launch.c's */
};

extern const struct cuda_build cuda_build;

#endif
