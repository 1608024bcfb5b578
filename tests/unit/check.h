/* SPDX-License-Identifier: MIT
 *
 * Checks for unit tests. A failing check prints the place, the case and the values, and the test
 * continues, so that one run shows all errors; check_done() ends with the count. A program includes this
 * once.
 */
#ifndef FMLA_CHECK_H
#define FMLA_CHECK_H

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static uint64_t check_count, check_failures;

enum { CHECK_PRINTED = 40 /* failures; a broken table would otherwise print a million lines */ };

__attribute__((format(printf, 4, 5), noinline, cold)) static void
check_fail(const char *file, int line, const char *what, const char *format, ...)
{
    if (check_failures++ == CHECK_PRINTED) fprintf(stderr, "... and more\n");
    if (check_failures > CHECK_PRINTED) return;
    fprintf(stderr, "%s:%d: %s: ", file, line, what);
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
}

/* CHECK(condition, format, values…): the format names the case and the values found. */
#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        check_count++;                                                                                       \
        if (!(condition)) check_fail(__FILE__, __LINE__, #condition, __VA_ARGS__);                           \
    } while (0)

/* Checks that two integers are equal. */
#define CHECK_EQ(value, expected)                                                                            \
    do {                                                                                                     \
        const int64_t check_value = (int64_t)(value), check_expected = (int64_t)(expected);                  \
        CHECK(check_value == check_expected, "%s is %" PRId64 ", expected %" PRId64, #value, check_value,    \
              check_expected);                                                                               \
    } while (0)

/* Checks that a call of the library succeeds; prints its message otherwise. */
#define CHECK_OK(call) CHECK((call) == FMLA_OK, "%s", fmla_last_error())

/* Returns the n-th pair in braces of `text`, as it is in the source. */
static inline const char *check_pair(const char *text, size_t n, int *length)
{
    int depth = 0;
    for (const char *begin = text;; text++) {
        if (*text == '{' && !depth++) begin = text;
        if ((*text == '}' && !--depth && !n--) || !*text) return *length = (int)(text - begin), begin + 1;
    }
}

static inline void check_all(const char *file, int line, const char *text, const int64_t pairs[][2],
                             size_t count)
{
    for (size_t i = 0; i < count; i++) {
        check_count++;
        if (pairs[i][0] == pairs[i][1]) continue;
        int length = 0;
        const char *const pair = check_pair(text, i, &length);
        check_fail(file, line, "CHECK_ALL", "%.*s: is %" PRId64 ", expected %" PRId64, length - 1, pair,
                   pairs[i][0], pairs[i][1]);
    }
}

/* Checks integers against their expected values, each pair in braces: {value, expected}, … */
#define CHECK_ALL(...) CHECK_PAIRS(__VA_ARGS__) /* a macro may expand to several pairs */
#define CHECK_PAIRS(...)                                                                                     \
    check_all(__FILE__, __LINE__, #__VA_ARGS__, (const int64_t[][2]){__VA_ARGS__},                           \
              sizeof((const int64_t[][2]){__VA_ARGS__}) / sizeof(int64_t[2]))

/* Prints the count; a test that checked nothing fails. */
static inline int check_done(const char *name)
{
    if (check_failures)
        printf("%s: %" PRIu64 " of %" PRIu64 " checks failed\n", name, check_failures, check_count);
    else if (!check_count)
        printf("%s: nothing was checked\n", name);
    else
        printf("%s: %" PRIu64 " checks passed\n", name, check_count);
    return check_failures || !check_count;
}

#endif
