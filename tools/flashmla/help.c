/* SPDX-License-Identifier: MIT */
#include "help.h"
#include "fill.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 80, HELP_COLUMN = 25 };

enum help_form help_form = HELP_TEXT;

/* ---- Text ------------------------------------------------------------------------------------ */

/* Returns the length, line ends included, of the next block of text: a paragraph, an indented line or an
 * empty line. */
static size_t next_block(const char *text)
{
    size_t length = strcspn(text, "\n");
    const bool alone = *text == ' ' || !length;
    if (text[length]) length++;
    while (!alone && text[length] && text[length] != ' ' && text[length] != '\n') {
        length += strcspn(text + length, "\n");
        if (text[length]) length++;
    }
    return length;
}

void help_fill(const char *text)
{
    for (size_t length; *text; text += length) {
        length = next_block(text);
        if (*text == ' ' || *text == '\n')
            printf("%.*s", (int)length, text);
        else
            fill_words(text, length, 0, 0, WIDTH);
    }
}

/* Returns the help text with the range of a number. */
static const char *full_help(const struct option *option, char *text, size_t size)
{
    if (option->kind == OPTION_COUNT || option->kind == OPTION_COUNTS)
        snprintf(text, size, "%s [%" PRId64 " to %" PRId64 "]", option->help, option->low, option->high);
    else
        snprintf(text, size, "%s", option->help);
    return text;
}

static void print_line(const char *left, const char *help)
{
    const int used = printf("  %-22s ", left);
    fill_words(help, strlen(help), (size_t)used, HELP_COLUMN, WIDTH);
}

static void print_text(const struct command *command, const struct option *options)
{
    char left[64], help[256];
    printf("flashmla %s - %s\n\nUsage: flashmla %s%s%s [options]\n\n", command->name, command->summary,
           command->name, command->operand ? " " : "", command->operand ? command->operand : "");
    for (const struct option *option = options; option->name; option++) {
        snprintf(left, sizeof left, "%s%s%s", option->name, option->takes ? " " : "",
                 option->takes ? option->takes : "");
        print_line(left, full_help(option, help, sizeof help));
    }
    print_line("--help", "this text");
    help_fill(command->details);
}

/* ---- The manual page ------------------------------------------------------------------------- */

static void man_characters(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) switch (text[i]) {
        case '\\': fputs("\\e", stdout); break;
        case '-': fputs("\\-", stdout); break;
        case '\'': fputs("\\(aq", stdout); break;
        case '^': fputs("\\(ha", stdout); break;
        case '~': fputs("\\(ti", stdout); break;
        default: putchar(text[i]);
        }
}

void help_man_word(const char *text)
{
    man_characters(text, strlen(text));
}

static void man_line(const char *text, size_t length)
{
    if (*text == '.') fputs("\\&", stdout);
    man_characters(text, length);
    putchar('\n');
}

void help_man_text(const char *text)
{
    bool verbatim = false;
    for (size_t length; *text; text += length) {
        length = next_block(text);
        const size_t end = length && text[length - 1] == '\n' ? length - 1 : length;
        if (*text == ' ') {
            if (!verbatim) puts(".PP\n.nf\n.RS 2");
            verbatim = true;
            man_line(text + strspn(text, " "), end - strspn(text, " "));
            continue;
        }
        if (verbatim) puts(".RE\n.fi");
        verbatim = false;
        if (*text == '\n') continue;
        puts(".PP");
        man_line(text, end);
    }
    if (verbatim) puts(".RE\n.fi");
}

static void print_man(const struct command *command, const struct option *options)
{
    char help[256];
    printf(".SS ");
    help_man_word(command->name);
    printf("\n\\fBflashmla ");
    help_man_word(command->name);
    printf("\\fR%s\\fI%s\\fR [options]\n.PP\n", command->operand ? " " : "",
           command->operand ? command->operand : "");
    putchar(toupper((unsigned char)*command->summary)); /* begins a sentence here */
    help_man_word(command->summary + 1);
    puts(".");
    for (const struct option *option = options; option->name; option++) {
        printf(".TP\n\\fB");
        help_man_word(option->name);
        printf("\\fR%s\\fI%s\\fR\n", option->takes ? " " : "", option->takes ? option->takes : "");
        full_help(option, help, sizeof help);
        man_line(help, strlen(help));
    }
    help_man_text(command->details);
}

void help_print(const struct command *command, const struct option *options)
{
    switch (help_form) {
    case HELP_TEXT: print_text(command, options); break;
    case HELP_MAN: print_man(command, options); break;
    case HELP_BASH: completion_bash(command, options); break;
    case HELP_ZSH: completion_zsh(command, options); break;
    }
}
