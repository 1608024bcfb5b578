/* SPDX-License-Identifier: MIT */
#ifndef FLASHMLA_TOOL_SAME_FILE_H
#define FLASHMLA_TOOL_SAME_FILE_H

#include <stdbool.h>

/* Do both paths lead to one file, whatever their names: through links, or as one that is still to be made? "-" is standard
 * input, or output where it is written. Terminals and /dev/null hold nothing that could be lost, and are never the same. */
bool same_file(const char *a, bool a_written, const char *b, bool b_written);

#endif
