/* SPDX-License-Identifier: MIT
 *
 * Table-driven command lines: one entry per option gives its name, its argument and its target. The
 * checks, their messages, --help, the manual page and the shell completions all read the same table.
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
    OPTION_SET,  /* value: struct option_counts: the index, or all but the last one's if that one is chosen */
    OPTION_TEXT, /* value: const char * */
    OPTION_GPU,  /* value: fmla_device */
    OPTION_OUTPUT /* value: const char *, a file to write; "-" is standard output */
};

struct option_counts {
    int64_t *items; /* allocated; freed by the table's owner */
    int64_t count;
};

enum { OPTION_CHOICES = 24 };

struct option {
    const char *name; /* "--batch" */
    enum option_kind kind;
    void *value;
    const char *takes; /* "N", as shown in help; NULL for switches */
    const char *help;
    int64_t low, high;
    const char *choices[OPTION_CHOICES]; /* ends with NULL; of an OPTION_TEXT: completion suggestions */
    bool *given;                         /* set if the option was given; may be NULL */
};

/* Rows of an option table. */
#define OPTION_ROW(name, kind, to, takes, help, least, most, given, ...)                                     \
    {                                                                                                        \
        name, kind, to, takes, help, least, most, {__VA_ARGS__}, given                                       \
    }
#define OPTION_SWITCH(name, to, help) OPTION_ROW(name, OPTION_ON, to, NULL, help, 0, 0, NULL, NULL)
#define OPTION_NUMBER(name, to, least, most, help, given)                                                    \
    OPTION_ROW(name, OPTION_COUNT, to, "N", help, least, most, given, NULL)
#define OPTION_LIST(name, to, takes, least, most, help, given)                                               \
    OPTION_ROW(name, OPTION_COUNTS, to, takes, help, least, most, given, NULL)
#define OPTION_ONE_OF(name, to, takes, help, given, ...)                                                     \
    OPTION_ROW(name, OPTION_CHOICE, to, takes, help, 0, 0, given, __VA_ARGS__)
#define OPTION_SET_OF(name, to, takes, help, ...)                                                            \
    OPTION_ROW(name, OPTION_SET, to, takes, help, 0, 0, NULL, __VA_ARGS__)
#define OPTION_FILE(name, to, help) OPTION_ROW(name, OPTION_OUTPUT, to, "FILE", help, 0, 0, NULL, NULL)
#define OPTION_JSON(to)                                                                                      \
    OPTION_FILE("--json", to, "write the results there, one JSON object a line; - is standard output")
#define OPTION_DEVICE(to)                                                                                    \
    OPTION_ROW("--device", OPTION_GPU, to, "DEVICE", "cpu (the default) or cuda:N", 0, 0, NULL, "cpu",       \
               "cuda:0")
#define OPTION_KERNEL(to)                                                                                    \
    OPTION_ROW("--kernel", OPTION_TEXT, to, "NAME", "force a kernel; flashmla info --all lists them", 0, 0,  \
               NULL, NULL)
#define OPTION_THREADS(to)                                                                                   \
    OPTION_NUMBER("--threads", to, 1, 4096, "number of threads; default: as flashmla info says", NULL)

enum operand_use { OPERAND_WORD, OPERAND_INPUT, OPERAND_OUTPUT };

struct command {
    const char *name;    /* "plan" */
    const char *operand; /* "FILE", "[FILE]" or "[NAME]"; NULL = none */
    const char *summary; /* one line */
    const char *details; /* text below the options in help: paragraphs are filled; indented lines stay */
    enum operand_use use;
    const char *const *words; /* of an OPERAND_WORD: its allowed words, ending with NULL; may be NULL */
};

/* Reads argv[1 … argc). Refuses repeated options, and an output file that is the input or is written
 * twice. If a file goes to standard output, nothing else is printed there. The operand, if given, goes to
 * *operand (which may be NULL if the command has none). Returns -1 if the command is to run; else its exit
 * code: help was printed to stdout, or one line to stderr. `options` ends with an entry without a name. */
int options_parse(const struct command *command, const struct option *options, int argc, char **argv,
                  const char **operand);

/* Reports a word that is not among `words`, which end with NULL, nor among `others`; `what` is for example
 * "command". */
int no_such(const struct command *command, const char *what, const char *word, const char *const *words,
            const char *others);

/* Prints one line to stderr, "flashmla plan: …", and returns status. */
int complain(const struct command *command, int status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The commands. Each takes the words after `flashmla`, its own name first, and returns an exit code. */
int command_info(int argc, char **argv);
int command_make_input(int argc, char **argv);
int command_run(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_layout(int argc, char **argv);

#endif
