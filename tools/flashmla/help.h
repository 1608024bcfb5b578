/* SPDX-License-Identifier: MIT
 *
 * What a command and its options are told as: help on a terminal, a section of the manual page, a case of a completion of
 * bash, a function of one of zsh. All on standard output, from the same table.
 */
#ifndef FLASHMLA_TOOL_HELP_H
#define FLASHMLA_TOOL_HELP_H

#include "options.h"

enum help_form { HELP_TEXT, HELP_MAN, HELP_BASH, HELP_ZSH };

/* What all help is told as. */
extern enum help_form help_form;

void help_print(const struct command *command, const struct option *options);

/* Paragraphs, filled: as text or as those of a manual page. Lines that begin with a space stay as they are; a line before
 * such a one is their heading. */
void help_fill(const char *text);
void help_man_text(const char *text);

/* `text` with what troff would take for its own made harmless; hyphens become minus signs, as in options. */
void help_man_word(const char *text);

/* ---- Completions (completion.c) -------------------------------------------------------------- */

/* One command of a completion. */
void completion_bash(const struct command *command, const struct option *options);
void completion_zsh(const struct command *command, const struct option *options);

/* Before and after the commands, whose names end with NULL. */
void completion_bash_begin(void);
void completion_bash_end(const char *const *names);
void completion_zsh_begin(void);
void completion_zsh_end(const char *const *names, const char *const *summaries);

#endif
