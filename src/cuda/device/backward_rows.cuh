/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA on tensor cores: the scales of P and dS, and delta.
 */
#pragma once

#include "element.cuh"

static constexpr float P_SCALE = 32768.0f,
                       P_SCALE_LOG2 = 15.0f; /* factor of P: maps 1 close to the largest fp16 */

/* Factor of dS and delta in addition to P_SCALE. Without it dS in fp16 would overflow, or have few bits left
 * with thousands of keys. */
template <typename Element> static constexpr float DS_SCALE = Element::IS_BF16 ? 1.0f : 64.0f / P_SCALE;
template <typename Element> static constexpr float DS_UNSCALE = 1.0f / (P_SCALE * DS_SCALE<Element>);

template <typename Element> DEVICE float dot_of_pair(uint32_t a, uint32_t b)
{
    return Element::to_float((uint16_t)a) * Element::to_float((uint16_t)b) +
           Element::to_float((uint16_t)(a >> 16)) * Element::to_float((uint16_t)(b >> 16));
}

/* Returns the contribution of eight elements of a row of out and of dO to its delta. */
template <typename Element> DEVICE float dot_of_eight(const uint4 &a, const uint4 &b)
{
    return dot_of_pair<Element>(a.x, b.x) + dot_of_pair<Element>(a.y, b.y) + dot_of_pair<Element>(a.z, b.z) +
           dot_of_pair<Element>(a.w, b.w);
}
