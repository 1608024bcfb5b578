/* SPDX-License-Identifier: MIT */
#include "flashmla/flashmla.h"

#define TEXT_OF(x) #x
#define TEXT(x)    TEXT_OF(x)

int32_t fmla_version(void)
{
    return FMLA_VERSION;
}

const char *fmla_version_string(void)
{
    return TEXT(FMLA_VERSION_MAJOR) "." TEXT(FMLA_VERSION_MINOR) "." TEXT(FMLA_VERSION_PATCH);
}
