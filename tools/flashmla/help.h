/* SPDX-License-Identifier: MIT
 *
 * Describes a command and its options as terminal help, a section of the manual page, a case of the bash
 * completion or a function of the zsh completion. All are generated from the same table and go to standard
 * output.
 */
#ifndef FLASHMLA_TOOL_HELP_H
#define FLASHMLA_TOOL_HELP_H

#include "options.h"

enum help_form { HELP_TEXT, HELP_MAN, HELP_BASH, HELP_ZSH };

/* The form of all help. */
extern enum help_form help_form;

void help_print(const struct command *command, const struct option *options);

/* Print paragraphs, filled, as text or for the manual page. Lines that begin with a space are kept; a line
 * before such a line is its heading. */
void help_fill(const char *text);
void help_man_text(const char *text);

/* Prints `text` with troff's special characters escaped; hyphens become minus signs, as in options. */
void help_man_word(const char *text);

/* ---- Completions (completion.c) -------------------------------------------------------------- */

/* Print one command of a completion. */
void completion_bash(const struct command *command, const struct option *options);
void completion_zsh(const struct command *command, const struct option *options);

/* Print the parts before and after the commands, whose names end with NULL. */
void completion_bash_begin(void);
void completion_bash_end(const char *const *names);
void completion_zsh_begin(void);
void completion_zsh_end(const char *const *names, const char *const *summaries);

#endif
