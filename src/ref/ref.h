/* SPDX-License-Identifier: MIT
 *
 * The oracle: every operation as its definition reads (docs/semantics.md), scalar, in double, one row after
 * the other, with nothing shared with the kernels but the number formats. It runs when named, and decides who
 * is right.
 */
#ifndef FMLA_REF_H
#define FMLA_REF_H

#include "../kernel.h"

extern const struct kernel_driver ref_attention_driver, ref_merge_driver, ref_cache_driver;

#endif
