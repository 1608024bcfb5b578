/* SPDX-License-Identifier: MIT
 *
 * Command lines by table: one entry an option says what it is called, what it takes and where that goes. The
 * checks, their messages and --help all read the same table.
 */
#ifndef FLASHMLA_TOOL_OPTIONS_H
#define FLASHMLA_TOOL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

/* Documented in `flashmla --help`. */
enum { EXIT_GOOD = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_UNSUPPORTED = 3 };

enum option_kind {
    OPTION_ON,     /* value: bool, becomes true */
    OPTION_OFF,    /* value: bool, becomes false */
    OPTION_COUNT,  /* value: int64_t in [low, high] */
    OPTION_COUNTS, /* value: struct option_counts, each in [low, high], separated by commas */
    OPTION_REAL,   /* value: double, finite */
    OPTION_CHOICE, /* value: int, the index in choices */
    OPTION_TEXT    /* value: const char * */
};

struct option_counts {
    int64_t *items; /* allocated; freed by whoever owns the table */
    int64_t count;
};

struct option {
    const char *name; /* "--batch" */
    enum option_kind kind;
    void *value;
    const char *takes; /* "N", as help shows it; NULL for switches */
    const char *help;
    int64_t low, high;
    const char *choices[7]; /* ends with NULL */
    bool *given;            /* set when the option was there; may be NULL */
};

struct command {
    const char *name;    /* "plan" */
    const char *operand; /* "FILE", "[FILE]" or "[NAME]"; NULL = none */
    const char *summary; /* one line */
    const char *details; /* what help says below the options: examples first of all */
};

enum options_result { OPTIONS_PARSED, OPTIONS_HELPED, OPTIONS_WRONG };

/* Reads argv[1 … argc). The one operand, if it came, goes to *operand (which may be NULL if the command has
 * none). On OPTIONS_HELPED help stands on stdout; on OPTIONS_WRONG one line on stderr. options ends with an
 * entry without a name. */
enum options_result options_parse(const struct command *command, const struct option *options, int argc,
                                  char **argv, const char **operand);

/* One line on stderr, "flashmla plan: …"; returns status. */
int complain(const struct command *command, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
