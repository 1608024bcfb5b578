/* SPDX-License-Identifier: MIT
 *
 * The tile shapes that the portable dense decode is built in, and the choice among them.
 */
#ifndef FMLA_SM80_DENSE_DECODE_SHAPE_H
#define FMLA_SM80_DENSE_DECODE_SHAPE_H

#include <stdint.h>

enum { MAX_GROUPS = 9 /* of 64 columns: d_qk 576 */ };

#endif
