/* SPDX-License-Identifier: MIT
 *
 * The subcommands. Each is given the words after `flashmla`, its own name first, and returns an exit code.
 */
#ifndef FLASHMLA_TOOL_COMMANDS_H
#define FLASHMLA_TOOL_COMMANDS_H

int command_info(int argc, char **argv);
int command_make_input(int argc, char **argv);
int command_run(int argc, char **argv);
int command_plan(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_verify(int argc, char **argv);
int command_layout(int argc, char **argv);

#endif
