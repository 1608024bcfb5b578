/* SPDX-License-Identifier: MIT
 *
 * xmlcheck <FILE: is it well-formed, as far as the pictures go? Tags nest, attribute values are quoted,
 * nothing stands outside the root. No replacement for a parser; fresh machines have none.
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { DEPTH = 32, NAME = 32, TAG = 4096 };

/* Returns true if all quotes of a tag are closed and no '<' or '&' is inside. */
static int tag_is_sound(const char *tag)
{
    int quotes = 0;
    for (const char *c = tag; *c; c++) {
        if (*c == '"') quotes++;
        if (*c == '<' || *c == '&') return 0;
        if (*c == '=' && quotes % 2 == 0 && c[1] != '"') return 0;
    }
    return quotes % 2 == 0;
}

int main(void)
{
    static char names[DEPTH][NAME], tag[TAG];
    int depth = 0, roots = 0, c;
    while ((c = getchar()) != EOF) {
        if (c == '&' || (c == '>') || (c != '<' && depth == 0 && !isspace(c))) return 1;
        if (c != '<') continue;
        int length = 0;
        while ((c = getchar()) != EOF && c != '>' && length < TAG - 1) tag[length++] = (char)c;
        tag[length] = 0;
        if (c != '>' || !length) return 1;
        if (*tag == '?') continue;
        if (*tag == '/') {
            if (depth == 0 || strcmp(names[--depth], tag + 1) != 0) return 1;
            continue;
        }
        if (!tag_is_sound(tag) || depth == DEPTH || (depth == 0 && roots++)) return 1;
        const size_t name = strcspn(tag, " /");
        if (name == 0 || name >= NAME) return 1;
        if (tag[length - 1] == '/') continue;
        memcpy(names[depth], tag, name);
        names[depth++][name] = 0;
    }
    return depth != 0 || roots != 1;
}
