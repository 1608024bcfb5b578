/* SPDX-License-Identifier: MIT */
#ifndef FLASHMLA_TOOL_PLAN_SVG_H
#define FLASHMLA_TOOL_PLAN_SVG_H

#include "plan_view.h"

#include "fault.h"

/* Draws the plan: a bar for each request, as long as its keys, coloured by partition; below, the load of each
 * partition. The file is whole or absent. */
bool plan_svg_write(const char *path, const struct plan_picture *picture, struct fault *fault);

#endif
