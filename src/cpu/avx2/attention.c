/* SPDX-License-Identifier: MIT */
#define ATTENTION_NAME cpu_avx2_attention
#include "vectors.h"

#include "../attention_f32.h"
