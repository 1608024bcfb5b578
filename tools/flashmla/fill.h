/* SPDX-License-Identifier: MIT
 *
 * Text filled into lines of a width.
 */
#ifndef FLASHMLA_TOOL_FILL_H
#define FLASHMLA_TOOL_FILL_H

#include <stddef.h>

/* Prints the words of text[0 … length), the first at column `at`, and ends the line. Words that would pass
 * `width` go to further lines, indented by `indent`. */
void fill_words(const char *text, size_t length, size_t at, size_t indent, size_t width);

#endif
