/* SPDX-License-Identifier: MIT
 *
 * Any processor.
 */
#define CACHE_NAME cpu_generic_cache
#include "../cache_token.h"
