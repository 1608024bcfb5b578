/* SPDX-License-Identifier: MIT
 *
 * flashmla: what runs here, made inputs, attention over tensor files, the split plan,
 * benchmarks, verification and the layouts of fragments, from the shell.
 */
#include "commands.h"
#include "options.h"

#include "outfile.h"

#include "flashmla/flashmla.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static const struct command flashmla = {.name = ""};

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", command_info, "what runs on this machine, on which kernel"},
    {"make-input", command_make_input, "write a decode batch over a paged cache to a file"},
    {"run", command_run, "compute attention from such a file; check and time it"},
    {"plan", command_plan, "print the split plan of a batch, and draw it"},
    {"bench", command_bench, "time the kernels of this machine beside its measured peaks"},
    {"verify", command_verify, "hold this machine's kernels to the oracle"},
    {"layout", command_layout, "print and draw which lane holds which element of a fragment"},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static int print_help(void)
{
    puts("flashmla - attention kernels for multi-head latent attention (MLA)\n\n"
         "Usage: flashmla COMMAND [options]\n");
    for (int i = 0; i < COMMANDS; i++) printf("  %-12s %s\n", commands[i].name, commands[i].summary);
    puts("\n"
         "flashmla COMMAND --help tells more about a command; flashmla --version prints the version.\n"
         "Results go to standard output, messages to standard error.\n"
         "\n"
         "Exit codes\n"
         "  0  success\n"
         "  1  failed: a file, input or output, or a check that found a wrong result\n"
         "  2  the command line is wrong\n"
         "  3  not supported by this build or on this machine\n"
         "\n"
         "Examples\n"
         "  flashmla make-input batch.safetensors --batch 4 --max-len 2000\n"
         "  flashmla run batch.safetensors --check --out result.safetensors\n"
         "  flashmla plan batch.safetensors --partitions 8 --svg plan.svg\n"
         "  flashmla bench --heads 128 --seq-len 4096");
    return EXIT_GOOD;
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2)
        return complain(&flashmla, EXIT_USAGE,
                        "a command is missing: info, make-input, run, plan, bench, verify or layout; see "
                        "flashmla --help");
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) return print_help();
    if (!strcmp(argv[1], "--version")) {
        printf("flashmla %s\n", fmla_version_string());
        return EXIT_GOOD;
    }
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(commands[i].name, argv[1])) return commands[i].run(argc - 1, argv + 1);
    return complain(&flashmla, EXIT_USAGE,
                    "%s: no such command; allowed are info, make-input, run, plan, bench, verify, layout, "
                    "--help, --version",
                    argv[1]);
}

int main(int argc, char **argv)
{
    outfile_handle_signals();
    const int status = dispatch(argc, argv);
    /* Output is buffered: a full disk shows no earlier than here. */
    errno = 0;
    const int flushed = fflush(stdout);
    if ((flushed || ferror(stdout)) && status == EXIT_GOOD)
        return complain(&flashmla, EXIT_FAILED, "cannot write to standard output: %s",
                        errno ? strerror(errno) : "an earlier write failed");
    return status;
}
