/* SPDX-License-Identifier: MIT
 *
 * The machine code embedded in the build: one fatbin (code for several GPUs, compressed) per .cu file.
 * cmake/cuda.cmake generates the table; src/cuda/no_images.c is the table of a build without nvcc.
 */
#ifndef FMLA_CUDA_IMAGES_H
#define FMLA_CUDA_IMAGES_H

#include <stddef.h>

struct cuda_image {
    const char *name; /* path of the .cu file in src/cuda, without its ending: "any/merge" */
    const unsigned char *begin, *end;
};

struct cuda_build {
    int toolkit;         /* CUDA version of nvcc, as 13000; 0: there are no images */
    int driver;          /* lowest CUDA version of a driver that loads them */
    const char *targets; /* GPUs with machine code: "80 90a" */
    int ptx;             /* capability of the PTX, which serves later GPUs; 0: none */
    size_t count;
    const struct cuda_image *images;
    void **loaded; /* the driver's handle of each image; used by launch.c */
};

extern const struct cuda_build cuda_build;

#endif
