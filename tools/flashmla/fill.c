/* SPDX-License-Identifier: MIT */
#include "fill.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void fill_words(const char *text, size_t length, size_t at, size_t indent, size_t width)
{
    bool first = true;
    for (size_t i = 0; i < length;) {
        const size_t blanks = strspn(text + i, " \n"), word = strcspn(text + i + blanks, " \n");
        i += blanks;
        if (i + word > length || !word) break;
        if (at + !first + word > width && at > indent) {
            printf("\n%*s", (int)indent, "");
            at = indent, first = true;
        }
        printf("%s%.*s", first ? "" : " ", (int)word, text + i);
        at += word + !first, first = false;
        i += word;
    }
    putchar('\n');
}
