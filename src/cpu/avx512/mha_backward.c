/* SPDX-License-Identifier: MIT */
#define GRADIENTS_NAME cpu_avx512_gradients
#include "vectors.h"

#include "../backward_f32.h"
