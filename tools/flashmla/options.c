/* SPDX-License-Identifier: MIT */
#include "options.h"

#include "call.h"
#include "help.h"
#include "hint.h"

#include "infile.h"
#include "outfile.h"
#include "reason.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int complain(const struct command *command, int status, const char *format, ...)
{
    struct reason line = {""};
    char text[sizeof line.text];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    reason_set(&line, "%s", text);
    fprintf(stderr, "flashmla%s%s: %s\n", *command->name ? " " : "", command->name, line.text);
    return status;
}

enum { WORDS = 400 };

static const char *joined(const char *const *words, char text[WORDS])
{
    *text = '\0';
    for (; *words; words++) {
        const size_t used = strlen(text);
        snprintf(text + used, WORDS - used, "%s%s", used ? ", " : "", *words);
    }
    return text;
}

int no_such(const struct command *command, const char *what, const char *word, const char *const *words,
            const char *others)
{
    char allowed[WORDS], near[HINT];
    joined(words, allowed);
    return complain(command, EXIT_USAGE, "%.100s: no such %s; allowed are %s%s%s", word, what, allowed,
                    others, hint(word, allowed, near));
}

/* ---- Values ---- */

static bool parse_count(const char *text, char **end, int64_t *value)
{
    errno = 0;
    const bool digits = *text >= '0' && *text <= '9';
    const bool negative = *text == '-' && text[1] >= '0' && text[1] <= '9';
    const long long parsed = strtoll(text, end, 10);
    *value = parsed;
    return (digits || negative) && errno == 0;
}

static bool range_fault(const struct option *option, const char *text, struct reason *reason)
{
    const char *const what =
        option->kind == OPTION_COUNTS ? "whole numbers separated by commas, each" : "a whole number";
    return reason_set(reason, "%s: '%s' must be %s in [%" PRId64 ", %" PRId64 "]", option->name, text, what,
                      option->low, option->high);
}

/* Empties the option's list and makes room in it. */
static bool make_room(const struct option *option, int64_t count, struct reason *reason)
{
    struct option_counts *counts = option->value;
    free(counts->items);
    counts->count = 0;
    counts->items = malloc((size_t)count * sizeof *counts->items);
    return counts->items || reason_set(reason, "%s: out of memory", option->name);
}

static bool parse_counts(const struct option *option, const char *text, struct reason *reason)
{
    struct option_counts *counts = option->value;
    int64_t commas = 0;
    for (const char *c = text; *c; c++) commas += *c == ',';
    if (!make_room(option, commas + 1, reason)) return false;
    const char *at = text;
    for (;;) {
        int64_t value;
        char *end;
        if (!parse_count(at, &end, &value) || value < option->low || value > option->high ||
            (*end && *end != ','))
            return range_fault(option, text, reason);
        counts->items[counts->count++] = value;
        if (!*end) return true;
        at = end + 1;
    }
}

static bool parse_choice(const struct option *option, const char *text, int *index, struct reason *reason)
{
    char allowed[WORDS], near[HINT];
    for (*index = 0; option->choices[*index]; ++*index)
        if (!strcmp(option->choices[*index], text)) return true;
    joined(option->choices, allowed);
    return reason_set(reason, "%s: '%.100s' must be one of %s%s", option->name, text, allowed,
                      hint(text, allowed, near));
}

static bool parse_set(const struct option *option, const char *text, struct reason *reason)
{
    struct option_counts *counts = option->value;
    int index;
    if (!parse_choice(option, text, &index, reason)) return false;
    const bool all = !option->choices[index + 1];
    if (!make_room(option, index + 1, reason)) return false;
    for (int i = all ? 0 : index; i <= index - all; i++) counts->items[counts->count++] = i;
    return true;
}

static bool parse_value(const struct option *option, const char *text, struct reason *reason)
{
    char *end;
    switch (option->kind) {
    case OPTION_ON: *(bool *)option->value = true; return true;
    case OPTION_OFF: *(bool *)option->value = false; return true;
    case OPTION_COUNTS: return parse_counts(option, text, reason);
    case OPTION_CHOICE: return parse_choice(option, text, option->value, reason);
    case OPTION_SET: return parse_set(option, text, reason);
    case OPTION_TEXT:
    case OPTION_OUTPUT: *(const char **)option->value = text; return true;
    case OPTION_GPU:
        return device_parse(text, option->value) ||
               reason_set(reason, "%s: '%s' must be cpu or cuda:N", option->name, text);
    case OPTION_COUNT: {
        int64_t value;
        if (!parse_count(text, &end, &value) || *end || value < option->low || value > option->high)
            return range_fault(option, text, reason);
        *(int64_t *)option->value = value;
        return true;
    }
    case OPTION_REAL: {
        const double value = strtod(text, &end);
        if (end == text || *end || !isfinite(value))
            return reason_set(reason, "%s: '%s' must be a finite number", option->name, text);
        *(double *)option->value = value;
        return true;
    }
    }
    return false;
}

/* ---- The line ---- */

static const struct option *find_option(const struct option *options, const char *text, size_t length)
{
    for (const struct option *option = options; option->name; option++)
        if (strlen(option->name) == length && !strncmp(option->name, text, length)) return option;
    return NULL;
}

/* Returns the name of a command's operand in messages. */
static const char *operand_word(const struct command *command)
{
    if (!command->operand) return "file";
    return strstr(command->operand, "COMMAND") ? "command"
           : strstr(command->operand, "NAME")  ? "name"
                                               : "file";
}

static bool unknown_fault(const struct option *options, const char *text, struct reason *reason)
{
    char allowed[sizeof reason->text - 200] = "", near[HINT];
    size_t used = 0;
    for (const struct option *option = options; option->name && used < sizeof allowed; option++)
        used += (size_t)snprintf(allowed + used, sizeof allowed - used, "%s ", option->name);
    if (used < sizeof allowed) snprintf(allowed + used, sizeof allowed - used, "--help");
    return reason_set(reason, "%.100s: no such option; allowed are %s%s", text, allowed,
                      hint(text, allowed, near));
}

/* Reads the option at argv[*i] and advances past its value. `seen`: bit mask of options already read. */
static bool parse_option(const struct option *options, int argc, char **argv, int *i, uint64_t *seen,
                         struct reason *reason)
{
    const char *const word = argv[*i];
    const char *value = strchr(word, '=');
    const size_t length = value ? (size_t)(value - word) : strlen(word);
    const struct option *option = find_option(options, word, length);
    if (!option) return unknown_fault(options, word, reason);
    const uint64_t bit = (uint64_t)1 << (option - options);
    if (*seen & bit) return reason_set(reason, "%s: is given twice, may be given once", option->name);
    *seen |= bit;
    if (value) value++;
    if (!option->takes) {
        if (value) return reason_set(reason, "%s: takes no value", option->name);
        value = "";
    }
    if (!value) {
        if (*i + 1 == argc)
            return reason_set(reason, "%s: its value %s is missing", option->name, option->takes);
        value = argv[++*i];
    }
    if (option->given) *option->given = true;
    return parse_value(option, value, reason);
}

/* ---- Files ---- */

static bool describe(const char *path, bool written, struct stat *status)
{
    if (!strcmp(path, "-")) return !fstat(written ? STDOUT_FILENO : STDIN_FILENO, status);
    return !stat(path, status);
}

static bool is_one(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool describe_folder(const char *path, struct stat *status)
{
    const char *name = last_part(path);
    if (name == path) return !stat(".", status);
    char *folder = strndup(path, (size_t)(name - path));
    const bool found = folder && !stat(folder, status);
    free(folder);
    return found;
}

/* Returns true if both paths lead to one file, through links or as a file not yet created. "-" is standard
 * input, or standard output if written. Terminals and /dev/null have no content to lose and never count as
 * the same. */
static bool same_file(const char *a, bool a_written, const char *b, bool b_written)
{
    struct stat of_a, of_b;
    const bool a_is = describe(a, a_written, &of_a), b_is = describe(b, b_written, &of_b);
    if (a_is && b_is) /* a socket may be input and output; a terminal all of them */
        return is_one(&of_a, &of_b) &&
               (S_ISREG(of_a.st_mode) || (a_written && b_written && !S_ISCHR(of_a.st_mode)));
    if (a_is || b_is) return false;
    return describe_folder(a, &of_a) && describe_folder(b, &of_b) && is_one(&of_a, &of_b) &&
           !strcmp(last_part(a), last_part(b));
}

/* A file that the command reads or writes, and its name in messages: "--out", "FILE". */
struct used_file {
    const char *called, *path;
    bool written;
};

static bool check_files(const struct used_file *files, int count, struct reason *reason)
{
    for (int i = 0; i < count; i++)
        for (int k = 0; k < i; k++) {
            if (!same_file(files[k].path, files[k].written, files[i].path, files[i].written)) continue;
            if (!files[k].written)
                return reason_set(reason, "%s: '%s' is the input file %s, must be another", files[i].called,
                                  files[i].path, infile_name(files[k].path));
            return reason_set(reason, "%s: '%s' is the file that %s writes, must be another", files[i].called,
                              files[i].path, files[k].called);
        }
    return true;
}

/* Puts the operand first, so that messages name it second. *to_stdout: a file goes to standard output. */
static bool check_all_files(const struct command *command, const struct option *options, const char *operand,
                            bool *to_stdout, struct reason *reason)
{
    struct used_file files[8];
    int count = 0;
    if (operand && command->use != OPERAND_WORD)
        files[count++] = (struct used_file){command->operand, operand, command->use == OPERAND_OUTPUT};
    for (const struct option *option = options; option->name; option++) {
        const char *path = option->kind == OPTION_OUTPUT ? *(const char **)option->value : NULL;
        if (path) files[count++] = (struct used_file){option->name, path, true};
    }
    for (int i = 0; i < count; i++) *to_stdout |= files[i].written && !strcmp(files[i].path, "-");
    return check_files(files, count, reason);
}

/* ---- All of it ---- */

int options_parse(const struct command *command, const struct option *options, int argc, char **argv,
                  const char **operand)
{
    struct reason reason = {""};
    bool only_operands = false, to_stdout = false;
    uint64_t seen = 0;
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) {
            help_print(command, options);
            return EXIT_GOOD;
        } else if (!strcmp(argv[i], "--")) {
            break;
        }
    for (int i = 1; i < argc; i++) {
        bool good = true;
        if (!only_operands && !strcmp(argv[i], "--")) {
            only_operands = true;
        } else if (!only_operands && argv[i][0] == '-' && argv[i][1]) {
            good = parse_option(options, argc, argv, &i, &seen, &reason);
        } else if (!command->operand) {
            good = reason_set(&reason, "'%s': the command takes no file", argv[i]);
        } else if (*operand) {
            good = reason_set(&reason, "'%s': one %s is allowed, '%s' came before it", argv[i],
                              operand_word(command), *operand);
        } else {
            *operand = argv[i];
        }
        if (!good) return complain(command, EXIT_USAGE, "%s", reason.text);
    }
    if (command->operand && *command->operand != '[' && !*operand)
        return complain(command, EXIT_USAGE, "%s is missing; see flashmla %s --help", command->operand,
                        command->name);
    if (!check_all_files(command, options, operand ? *operand : NULL, &to_stdout, &reason))
        return complain(command, EXIT_USAGE, "%s", reason.text);
    if (to_stdout && !outfile_claim_stdout(&reason)) return complain(command, EXIT_FAILED, "%s", reason.text);
    return -1;
}
