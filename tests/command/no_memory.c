/* SPDX-License-Identifier: MIT
 *
 * Linked with the command: tests it with its n-th allocation failing, for every n, once or from then on.
 * It either completes its work, or ends with one line, a non-zero exit code and no file. ld's --wrap makes
 * this file's main the program's; each run is a child process that has allocated nothing yet. The wrapped
 * names are glibc's internal ones behind malloc.
 */
#define _GNU_SOURCE /* MAP_ANONYMOUS, memfd_create */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- An allocation that fails ---------------------------------------------------------------- */

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static long fail_at; /* counted from 1; 0: none */
static bool fail_on; /* also all later ones */
static atomic_int *reached;

static bool fails(void)
{
    static atomic_long count;
    if (!fail_at) return false;
    const long now = atomic_fetch_add(&count, 1) + 1;
    if (now < fail_at || (now > fail_at && !fail_on)) return false;
    atomic_store(reached, 1);
    errno = ENOMEM;
    return true;
}

typedef void *allocated;
#define FAILS_OR(name, parameters, real)                                                                     \
    allocated name parameters                                                                                \
    {                                                                                                        \
        return fails() ? NULL : (real);                                                                      \
    }
FAILS_OR(malloc, (size_t size), __libc_malloc(size))
FAILS_OR(calloc, (size_t count, size_t size), __libc_calloc(count, size))
FAILS_OR(realloc, (void *old, size_t size), __libc_realloc(old, size))
FAILS_OR(aligned_alloc, (size_t alignment, size_t size), __libc_memalign(alignment, size))

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (fails()) return ENOMEM;
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

/* ---- Runs ------------------------------------------------------------------------------------ */

int __real_main(int argc, char **argv);
int __wrap_main(int argc, char **argv);

enum { MOST_WORDS = 32, MOST_TEXT = 1 << 20 };

static int failures, checks;

/* Files in memory, because thousands of runs write them: the output of the run without a failure, and that of
 * the last run, whose messages are in `err`. */
static int whole, out, err;

static void empty(int file)
{
    if (ftruncate(file, 0) || lseek(file, 0, SEEK_SET)) abort();
}

/* Runs the words of `line` with its output in `to` and in `err`; returns the exit code, or -1 after a
 * signal. */
static int run(const char *line, int to, long at, bool on)
{
    static char words[1024];
    char *argv[MOST_WORDS] = {"flashmla"}, *rest = words;
    int argc = 1, status;
    fflush(stdout);
    empty(to), empty(err);
    atomic_store(reached, 0);
    const pid_t child = fork();
    if (child < 0) abort();
    if (child) return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (dup2(to, STDOUT_FILENO) < 0 || dup2(err, STDERR_FILENO) < 0) abort();
    snprintf(words, sizeof words, "%s", line);
    while ((argv[argc] = strtok_r(rest, " ", &rest))) argc++;
    fail_at = at, fail_on = on;
    exit(__real_main(argc, argv));
}

/* Reads a file from its beginning, and returns its bytes; none if it could not be opened. */
static size_t read_file(int file, char text[MOST_TEXT])
{
    const ssize_t bytes = pread(file, text, MOST_TEXT - 1, 0);
    if (bytes == MOST_TEXT - 1) abort();
    text[bytes > 0 ? bytes : 0] = '\0';
    return bytes > 0 ? (size_t)bytes : 0;
}

static size_t read_path(const char *path, char text[MOST_TEXT])
{
    const int file = open(path, O_RDONLY);
    const size_t bytes = read_file(file, text);
    close(file);
    return bytes;
}

/* Returns true for lines that differ between runs: times, and the reason why a driver could not be loaded. */
static bool differs_anyhow(const char *line)
{
    static const char *const parts[] = {"FLOP/s", "there is no NVIDIA driver", "\"us\":"};
    bool differs = !strncmp(line, "time", 4);
    for (int i = 0; i < 3; i++) differs |= strstr(line, parts[i]) != NULL;
    return differs;
}

/* Returns the next line that is the same in every run; NULL at the end. Indented lines continue the one before
 * them. */
static char *next_line(char **rest)
{
    bool differs = false;
    for (;;) {
        char *const line = strtok_r(*rest, "\n", rest);
        if (!line || (!differs_anyhow(line) && !(differs && *line == ' '))) return line;
        differs = true;
    }
}

static bool same_text(int a, int b)
{
    static char texts[2][MOST_TEXT];
    char *rest[2] = {texts[0], texts[1]}, *lines[2];
    read_file(a, texts[0]), read_file(b, texts[1]);
    do lines[0] = next_line(&rest[0]), lines[1] = next_line(&rest[1]);
    while (lines[0] && lines[1] && !strcmp(lines[0], lines[1]));
    return !lines[0] && !lines[1];
}

/* Returns true if the files in made/, of which there may be one, equal `bytes` of `made`; -1: there must
 * be none. */
static bool made_is(const char *made, long bytes)
{
    static char text[MOST_TEXT];
    char path[512];
    int files = 0;
    bool same = true;
    DIR *folder = opendir("made");
    if (!folder) abort();
    for (struct dirent *entry; (entry = readdir(folder));) {
        if (entry->d_name[0] == '.' && strspn(entry->d_name, ".") == strlen(entry->d_name)) continue;
        snprintf(path, sizeof path, "made/%s", entry->d_name);
        same &= bytes >= 0 && read_path(path, text) == (size_t)bytes && !memcmp(text, made, (size_t)bytes);
        files++;
        unlink(path);
    }
    closedir(folder);
    return same && files == (bytes >= 0);
}

static void wrong(const char *line, long at, bool on, const char *what, int status)
{
    static char said[MOST_TEXT];
    read_file(err, said);
    printf("FAILED: flashmla %s: allocation %ld fails (%d): exit %d: %s: %s\n", line, at, on, status, what,
           said);
    failures++;
}

/* The command lines, and the file that each makes in made/. */
static const struct {
    const char *words, *makes;
} lines[] = {
#define MAKE_DENSE(file) "make-input " file " --seq-lens 5,70 --heads 2"
/* Without an extra cache: jansson 2.14 itself crashes if it has no memory for a string as long as that
 * cache's names. */
#define MAKE_LISTS(file, op) "make-input " file " --op " op " --seq-len 70 --topk 20 --short-lists"
#define MAKE_MHA(file)       "make-input " file " --op mha_forward --varlen --seq-lens 5,0,70 --heads 2"
#define RUN(file)            "run " file " --check --out made/result --repeat 1 --threads 1"
    {MAKE_DENSE("batch") " --sink", NULL},
    {MAKE_LISTS("sparse", "sparse_decode --batch 2") " --heads 2 --cache fp8_584 --sink", NULL},
    {MAKE_LISTS("prefill", "sparse_prefill --query-tokens 2") " --heads 2 --cache fp8_584 --sink", NULL},
    {MAKE_MHA("mha") " --used --sink", NULL},
    {"info", NULL},
    {"info --all", NULL},
    {"info --json -", NULL},
    {"plan --seq-lens 5,700 --partitions 3 --json -", NULL},
    {"plan batch --partitions 2 --svg made/plan.svg", "made/plan.svg"},
    {"layout mma-c --svg made/layout.svg", "made/layout.svg"},
    {MAKE_DENSE("made/dense"), "made/dense"},
    {RUN("batch") " --json -", "made/result"},
    {MAKE_DENSE("bytes") " --cache fp8_576", NULL},
    {MAKE_DENSE("made/bytes") " --cache fp8_584", "made/bytes"},
    {RUN("bytes"), "made/result"},
    {MAKE_LISTS("made/sparse", "sparse_decode --batch 1") " --cache fp8_656", "made/sparse"},
    {RUN("sparse"), "made/result"},
    {MAKE_LISTS("made/prefill", "sparse_prefill --query-tokens 2") " --cache fp8_656", "made/prefill"},
    {RUN("prefill"), "made/result"},
    {MAKE_MHA("made/mha") " --causal", "made/mha"},
    {RUN("mha"), "made/result"},
};

static void each(const char *line, const char *file)
{
    static char made[MOST_TEXT], said[MOST_TEXT];
    int status = run(line, whole, 0, false);
    const long bytes = file ? (long)read_path(file, made) : -1;
    if (status || (file && bytes <= 0)) wrong(line, 0, false, "the whole run", status);
    for (int on = 0; on < 2; on++)
        for (long at = 1;; at++) {
            made_is(NULL, -1); /* output of the last run */
            status = run(line, out, at, on);
            if (!atomic_load(reached)) {
                if (at == 1) wrong(line, at, on, "no allocation could be made to fail", status);
                break;
            }
            checks++;
            read_file(err, said);
            const char *end = strchr(said, '\n');
            if (!status && (*said || !same_text(whole, out) || !made_is(made, bytes)))
                wrong(line, at, on, "the work is not done", status);
            else if (status < 0 || status >= 126)
                wrong(line, at, on, "it crashes", status);
            else if (status && (!end || end[1]))
                wrong(line, at, on, "not one line", status);
            else if (status && !made_is(NULL, -1))
                wrong(line, at, on, "leaves a file", status);
        }
}

int __wrap_main(int argc, char **argv)
{
    (void)argc, (void)argv;
    reached = mmap(NULL, sizeof *reached, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    whole = memfd_create("whole", 0), out = memfd_create("out", 0), err = memfd_create("err", 0);
    if (reached == MAP_FAILED || whole < 0 || out < 0 || err < 0 ||
        (mkdir("short_of_memory", 0700) && errno != EEXIST) || chdir("short_of_memory") ||
        (mkdir("made", 0700) && errno != EEXIST))
        abort();
    made_is(NULL, -1); /* left by an earlier run */
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) each(lines[i].words, lines[i].makes);
    printf("%d checks, %d failed\n", checks, failures);
    return failures || !checks;
}
