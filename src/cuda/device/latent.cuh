/* SPDX-License-Identifier: MIT
 *
 * The width of a value in latent attention, which is the first columns of its key; for all kernels but merge
 * and the cache kernels.
 */
#pragma once

static constexpr int D_V = 512;
