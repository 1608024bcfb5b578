/* SPDX-License-Identifier: MIT
 *
 * The head sizes of dense MHA that all kernels but the oracle declare: every d_qk with every d_v.
 */
#ifndef FMLA_HEAD_SIZES_H
#define FMLA_HEAD_SIZES_H

#include <stdint.h>

enum { HEAD_D_QKS = 5, HEAD_D_VS = 3, HEAD_SIZES = HEAD_D_QKS * HEAD_D_VS };
static const int32_t head_d_qk[] = {64, 96, 128, 192, 256}, head_d_v[] = {64, 128, 256};
_Static_assert(sizeof head_d_qk / sizeof *head_d_qk == HEAD_D_QKS &&
                   sizeof head_d_v / sizeof *head_d_v == HEAD_D_VS,
               "all are counted");

#endif
