/* SPDX-License-Identifier: MIT */
#include "images.h"

const struct cuda_build cuda_build = {.targets = ""};
