/* SPDX-License-Identifier: MIT */
#define ATTENTION_NAME cpu_generic_attention
#include "vectors.h"

#include "../attention_f32.h"
