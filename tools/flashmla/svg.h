/* SPDX-License-Identifier: MIT
 *
 * Shared by the command's pictures: the file, complete or absent, the styles, the colours.
 */
#ifndef FLASHMLA_TOOL_SVG_H
#define FLASHMLA_TOOL_SVG_H

#include "outfile.h"

/* Text of every picture has the classes title, head and note; end and mid set the anchor of x. */
struct svg {
    struct outfile *out;
    struct fault *fault;
    bool good; /* false after a failed write; later writes are skipped */
};

/* Opens the file and writes head, styles and background; `styles` are this picture's own. */
bool svg_open(struct svg *svg, const char *path, double width, double height, const char *styles,
              struct fault *fault);

/* The file appears under its name if everything was written; else nothing remains. */
bool svg_close(struct svg *svg);

#define SVG_DRAW(svg, ...)                                                                                   \
    ((svg)->good = (svg)->good && outfile_printf((svg)->out, (svg)->fault, __VA_ARGS__))

/* Neighbouring colours differ, and all are readable under dark text. */
enum { SVG_COLOURS = 9 };
extern const char *const svg_colours[SVG_COLOURS];

#endif
