/* SPDX-License-Identifier: MIT */
#define ATTENTION_NAME cpu_avx512_attention
#include "vectors.h"

#include "../attention_f32.h"
