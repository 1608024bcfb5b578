/* SPDX-License-Identifier: MIT
 *
 * flashmla: the command line: kernels and devices, generated inputs, attention over tensor files, the
 * split plan, benchmarks, verification and the layouts of fragments.
 */
#include "help.h"
#include "options.h"

#include "infile.h"
#include "outfile.h"

#include "flashmla/flashmla.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int command_help(int argc, char **argv);
static int command_version(int argc, char **argv);

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", command_info, "list the kernels that run on this machine"},
    {"make-input", command_make_input, "write a decode batch over a paged cache to a file"},
    {"run", command_run, "compute attention from such a file; check and time it"},
    {"plan", command_plan, "print the split plan of a batch, and draw it"},
    {"bench", command_bench, "time the kernels of this machine beside its measured peaks"},
    {"verify", command_verify, "compare this machine's kernels with the oracle"},
    {"layout", command_layout, "print and draw which lane holds which element of a fragment"},
    {"help", command_help, "print this text, or the help of a command"},
    {"version", command_version, "print the version"},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static const char *command_names[COMMANDS + 1]; /* filled by main */

static const struct command flashmla = {.name = ""};

static const struct command help = {
    "help",
    "[COMMAND]",
    "print the help of all commands, or of one",
    "\n"
    "--as man prints the whole manual page; --as bash or --as zsh prints a completion for that shell. make "
    "install puts them where man and the shells look for them.\n"
    "\n"
    "Examples\n"
    "  flashmla help run\n"
    "  source <(flashmla help --as bash)\n",
    OPERAND_WORD,
    command_names};

static const struct command version = {"version", NULL, "print the version", "", OPERAND_WORD, NULL};

/* ---- Help ------------------------------------------------------------------------------------ */

static const char title[] = "attention kernels for multi-head latent attention (MLA)";

static const char conventions[] =
    "Results go to standard output, messages to standard error. A FILE to read or write may be -, "
    "standard input or output; where a file goes to standard output, nothing else does. --json of info, "
    "run, plan, bench and verify writes the results, one JSON object per line.\n"
    "\n"
    "A file is written whole or not at all, except with --json, which keeps each line written. An output "
    "file must not be the input file.\n";

static const struct {
    int code;
    const char *text;
} exit_codes[] = {
    {EXIT_GOOD, "success"},
    {EXIT_FAILED, "failure: a file, input or output failed, or a check found a wrong result"},
    {EXIT_USAGE, "the command line is wrong"},
    {EXIT_UNSUPPORTED, "not supported by this build or on this machine"},
};
enum { EXIT_CODES = sizeof exit_codes / sizeof *exit_codes };

static const char examples[] = "  flashmla make-input batch.safetensors --batch 4 --max-len 2000\n"
                               "  flashmla run batch.safetensors --check --out result.safetensors\n"
                               "  flashmla make-input - | flashmla run - --check\n"
                               "  flashmla plan batch.safetensors --partitions 8 --svg plan.svg\n"
                               "  flashmla bench --heads 128 --seq-len 4096\n";

static void print_help(void)
{
    printf("flashmla - %s\n\nUsage: flashmla COMMAND [options]\n\n", title);
    for (int i = 0; i < COMMANDS; i++) printf("  %-12s %s\n", commands[i].name, commands[i].summary);
    puts("\nflashmla help COMMAND or flashmla COMMAND --help prints the help of a command.\n");
    help_fill(conventions);
    puts("\nExit codes");
    for (int i = 0; i < EXIT_CODES; i++) printf("  %d  %s\n", exit_codes[i].code, exit_codes[i].text);
    printf("\nExamples\n%s", examples);
}

static int command_says(int index)
{
    char name[32], argument[] = "--help";
    snprintf(name, sizeof name, "%s", commands[index].name);
    return commands[index].run(2, (char *[]){name, argument, NULL});
}

static void print_man(void)
{
    printf(".\\\" Made by: flashmla help --as man\n.TH FLASHMLA 1 \"\" \"flashmla %s\" \"User Commands\"\n",
           fmla_version_string());
    printf(".ad l\n.nh\n.SH NAME\nflashmla \\- ");
    help_man_word(title);
    puts("\n.SH SYNOPSIS\n\\fBflashmla\\fR \\fICOMMAND\\fR [options]\n.SH DESCRIPTION");
    for (int i = 0; i < COMMANDS; i++) {
        printf(".TP 14\n\\fB");
        help_man_word(commands[i].name);
        puts("\\fR");
        help_man_word(commands[i].summary);
        putchar('\n');
    }
    help_man_text(conventions);
    puts(".SH COMMANDS");
    for (int i = 0; i < COMMANDS; i++) command_says(i);
    puts(".SH EXIT STATUS");
    for (int i = 0; i < EXIT_CODES; i++) {
        printf(".TP 4\n%d\n", exit_codes[i].code);
        help_man_word(exit_codes[i].text);
        putchar('\n');
    }
    puts(".SH ENVIRONMENT\n.TP\n\\fBFLASHMLA_KERNEL\\fR");
    puts("names the kernel of calls that name none.\n.TP\n\\fBOMP_NUM_THREADS\\fR");
    puts("is the number of threads without \\-\\-threads.\n.SH EXAMPLES");
    help_man_text(examples);
}

static void print_bash(void)
{
    completion_bash_begin();
    for (int i = 0; i < COMMANDS; i++) command_says(i);
    completion_bash_end(command_names);
}

static void print_zsh(void)
{
    const char *summaries[COMMANDS];
    completion_zsh_begin();
    for (int i = 0; i < COMMANDS; i++) summaries[i] = commands[i].summary, command_says(i);
    completion_zsh_end(command_names, summaries);
}

/* ---- Commands -------------------------------------------------------------------------------- */

static int find_command(const char *name)
{
    for (int i = 0; i < COMMANDS; i++)
        if (!strcmp(commands[i].name, name)) return i;
    return -1;
}

static int command_help(int argc, char **argv)
{
    int as = HELP_TEXT;
    const char *name = NULL;
    const struct option options[] = {OPTION_ONE_OF("--as", &as, "FORM",
                                                   "text (the default), man, bash or zsh", NULL, "text",
                                                   "man", "bash", "zsh"),
                                     {0}};
    const int done = options_parse(&help, options, argc, argv, &name);
    if (done >= 0) return done;
    if (name && as != HELP_TEXT)
        return complain(&help, EXIT_USAGE, "--as: cannot be combined with a COMMAND, '%s'", name);
    if (name && find_command(name) < 0) return no_such(&help, "command", name, command_names, "");
    if (name) return command_says(find_command(name));
    help_form = (enum help_form)as;
    switch (help_form) {
    case HELP_TEXT: print_help(); break;
    case HELP_MAN: print_man(); break;
    case HELP_BASH: print_bash(); break;
    case HELP_ZSH: print_zsh(); break;
    }
    return EXIT_GOOD;
}

static int print_version(void)
{
    printf("flashmla %s\n", fmla_version_string());
    return EXIT_GOOD;
}

static int command_version(int argc, char **argv)
{
    const struct option none[] = {{0}};
    const int done = options_parse(&version, none, argc, argv, NULL);
    return done >= 0 ? done : print_version();
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2)
        return complain(&flashmla, EXIT_USAGE,
                        "a command is missing: info, make-input, run, plan, bench, verify or layout; see "
                        "flashmla --help");
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return print_help(), EXIT_GOOD;
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) return print_version();
    const int found = find_command(argv[1]);
    if (found < 0) return no_such(&flashmla, "command", argv[1], command_names, ", --help, --version");
    return commands[found].run(argc - 1, argv + 1);
}

/* A file opened later must not take the place of a closed standard stream: what is printed would go into it.
 * The stream stays unusable, as it was. */
static void keep_standard_streams(void)
{
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++)
        if (fcntl(stream, F_GETFD) < 0) open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

int main(int argc, char **argv)
{
    static char program[32]; /* the prefix of complain's line */
    const int named = argc > 1 ? find_command(argv[1]) : -1;
    const struct command *self = named < 0 ? &flashmla : &(struct command){.name = commands[named].name};
    snprintf(program, sizeof program, "flashmla%s%s", *self->name ? " " : "", self->name);
    keep_standard_streams();
    for (int i = 0; i < COMMANDS; i++) command_names[i] = commands[i].name;
    outfile_handle_signals();
    infile_handle_signals(program);
    const int status = dispatch(argc, argv);
    /* Output is buffered: a full disk may fail only here. */
    errno = 0;
    const int flushed = fflush(stdout);
    if ((flushed || ferror(stdout)) && status == EXIT_GOOD)
        return complain(self, EXIT_FAILED, "cannot write to standard output: %s",
                        errno ? strerror(errno) : "an earlier write failed");
    return status;
}
