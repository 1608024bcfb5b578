/* SPDX-License-Identifier: MIT */
#include "hint.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST = 40, LETTERS_A_SLIP = 3, SHORTEST = 4 };

static int least(int a, int b)
{
    return a < b ? a : b;
}

static bool same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

/* Returns the slips between two words; rows of the table are prefixes of `a`, columns prefixes of `b`. */
static int slips(const char *a, int of_a, const char *b, int of_b)
{
    int d[LONGEST + 1][LONGEST + 1];
    for (int i = 0; i <= of_a; i++) d[i][0] = i;
    for (int j = 0; j <= of_b; j++) d[0][j] = j;
    for (int i = 1; i <= of_a; i++)
        for (int j = 1; j <= of_b; j++) {
            const int changed = d[i - 1][j - 1] + !same_letter(a[i - 1], b[j - 1]);
            d[i][j] = least(changed, 1 + least(d[i - 1][j], d[i][j - 1]));
            if (i > 1 && j > 1 && same_letter(a[i - 1], b[j - 2]) && same_letter(a[i - 2], b[j - 1]))
                d[i][j] = least(d[i][j], d[i - 2][j - 2] + 1);
        }
    return d[of_a][of_b];
}

const char *hint(const char *word, const char *allowed, char text[HINT])
{
    const int length = (int)strcspn(word, "=");
    int nearest = length / LETTERS_A_SLIP + 1;
    *text = '\0';
    if (length < SHORTEST || length > LONGEST) return text;
    for (const char *at = allowed + strspn(allowed, ", "); *at; at += strspn(at, ", ")) {
        const int of_at = (int)strcspn(at, ", ");
        const int distance = of_at <= LONGEST ? slips(word, length, at, of_at) : nearest;
        if (distance < nearest) {
            nearest = distance;
            snprintf(text, HINT, "; did you mean %.*s?", of_at, at);
        }
        at += of_at;
    }
    return text;
}
