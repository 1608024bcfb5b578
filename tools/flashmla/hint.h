/* SPDX-License-Identifier: MIT
 *
 * The word that was meant by a misspelt one.
 */
#ifndef FLASHMLA_TOOL_HINT_H
#define FLASHMLA_TOOL_HINT_H

enum { HINT = 64 };

/* Returns "; did you mean X?", in `text`, for the word of `allowed` that is nearest to `word`, or "" if none is
 * near: letters inserted, left out, changed or swapped with their neighbour, one in every three. Capital and
 * small letters are the same. The words of `allowed` are separated by blanks and commas; `word` ends at a =. */
const char *hint(const char *word, const char *allowed, char text[HINT]);

#endif
