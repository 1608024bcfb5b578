/* SPDX-License-Identifier: MIT
 *
 * The width of a value in latent attention, the first columns of its key: of all kernels but merge and those of caches.
 */
#pragma once

static constexpr int D_V = 512;
