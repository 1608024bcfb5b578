/* SPDX-License-Identifier: MIT
 *
 * Generates shell completions from the option tables, so new options are completed too.
 */
#include "help.h"

#include <stdio.h>
#include <string.h>

static bool is_file_option(const struct option *option)
{
    return option->kind == OPTION_OUTPUT;
}

static void print_words(const char *const *words)
{
    for (int i = 0; words && words[i]; i++) printf("%s%s", i ? " " : "", words[i]);
}

/* ---- bash: a case of the function below ------------------------------------------------------ */

void completion_bash_begin(void)
{
    puts("# Completion of flashmla for bash, made by: flashmla help --as bash\n"
         "\n"
         "# What a command takes: options, whether its operand is a file, and else the words that it may be; "
         "and\n"
         "# what the option before the cursor takes: files, words, or a value that nothing is known of.\n"
         "_flashmla_table()\n"
         "{\n"
         "    case $1 in");
}

void completion_bash(const struct command *command, const struct option *options)
{
    printf("    %s)\n        options='", command->name);
    for (const struct option *option = options; option->name; option++) printf("%s ", option->name);
    printf("--help'\n        operand=%s\n        words='", !command->operand              ? "none"
                                                           : command->use == OPERAND_WORD ? "words"
                                                                                          : "files");
    print_words(command->words);
    puts("'\n        case $2 in");
    for (const struct option *option = options; option->name; option++) {
        if (!option->takes) continue;
        printf("        %s) value=%s values='", option->name,
               is_file_option(option) ? "files"
               : option->choices[0]   ? "words"
                                      : "any");
        print_words(option->choices);
        puts("' ;;");
    }
    puts("        esac\n        ;;");
}

void completion_bash_end(const char *const *names)
{
    puts("    esac\n"
         "}\n"
         "\n"
         "_flashmla()\n"
         "{\n"
         "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}\n"
         "    local options='' operand=none words='' value='' values=''\n"
         "    # --option=value comes as three words.\n"
         "    if [ \"$word\" = = ]; then\n"
         "        word=''\n"
         "    elif [ \"$before\" = = ]; then\n"
         "        before=${COMP_WORDS[COMP_CWORD - 2]}\n"
         "    fi\n"
         "    COMPREPLY=()\n"
         "    if [ \"$COMP_CWORD\" -eq 1 ]; then");
    printf("        value=words values='");
    print_words(names);
    puts(" --help --version'\n"
         "    else\n"
         "        _flashmla_table \"${COMP_WORDS[1]}\" \"$before\"\n"
         "    fi\n"
         "    if [ -z \"$value\" ]; then\n"
         "        case $word in\n"
         "        -?*) value=words values=$options ;;\n"
         "        *) value=$operand values=$words ;;\n"
         "        esac\n"
         "    fi\n"
         "    case $value in\n"
         "    files)\n"
         "        compopt -o filenames 2>/dev/null\n"
         "        mapfile -t COMPREPLY < <(compgen -f -- \"$word\")\n"
         "        ;;\n"
         "    words) mapfile -t COMPREPLY < <(compgen -W \"$values\" -- \"$word\") ;;\n"
         "    esac\n"
         "}\n"
         "\n"
         "complete -F _flashmla flashmla");
}

/* ---- zsh: a function a command --------------------------------------------------------------- */

/* Prints text quoted for '…' inside a specification of _arguments. */
static void zsh_text(const char *text)
{
    for (; *text; text++) {
        if (*text == '\'')
            fputs("'\\''", stdout);
        else if (strchr("[]:\\", *text))
            printf("\\%c", *text);
        else
            putchar(*text);
    }
}

static void zsh_words(const char *const *words)
{
    putchar('(');
    for (int i = 0; words && words[i]; i++) fputs(i ? " " : "", stdout), zsh_text(words[i]);
    putchar(')');
}

void completion_zsh_begin(void)
{
    puts("#compdef flashmla\n# Completion of flashmla for zsh, made by: flashmla help --as zsh");
}

void completion_zsh(const struct command *command, const struct option *options)
{
    printf("\n_flashmla_%s() {\n    _arguments -S", command->name);
    for (const struct option *option = options; option->name; option++) {
        printf(" \\\n        '%s%s[", option->name, option->takes ? "=" : "");
        zsh_text(option->help);
        putchar(']');
        if (option->takes) {
            printf(":%s:", option->takes);
            if (is_file_option(option))
                fputs("_files", stdout);
            else if (option->choices[0])
                zsh_words(option->choices);
        }
        putchar('\'');
    }
    fputs(" \\\n        '--help[this text]'", stdout);
    if (command->operand) {
        fputs(" \\\n        '1:", stdout);
        zsh_text(command->operand);
        putchar(':');
        if (command->use != OPERAND_WORD)
            fputs("_files", stdout);
        else
            zsh_words(command->words);
        putchar('\'');
    }
    puts("\n}");
}

void completion_zsh_end(const char *const *names, const char *const *summaries)
{
    puts("\n"
         "_flashmla() {\n"
         "    local -a commands\n"
         "    commands=(");
    for (int i = 0; names[i]; i++) {
        printf("        '%s:", names[i]);
        zsh_text(summaries[i]);
        puts("'");
    }
    puts("    )\n"
         "    if (( CURRENT == 2 )); then\n"
         "        _describe command commands\n"
         "    elif (( $+functions[_flashmla_$words[2]] )); then\n"
         "        local command=$words[2]\n"
         "        shift words\n"
         "        (( CURRENT-- ))\n"
         "        _flashmla_$command\n"
         "    fi\n"
         "}\n"
         "\n"
         "_flashmla \"$@\"");
}
