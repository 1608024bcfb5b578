/* SPDX-License-Identifier: MIT
 *
 * What the command's pictures share: the file, whole or absent, the styles, the colours.
 */
#ifndef FLASHMLA_TOOL_SVG_H
#define FLASHMLA_TOOL_SVG_H

#include "outfile.h"

/* Text of every picture: classes title, head, note; end and mid say which end of it x is. */
struct svg {
    struct outfile *out;
    struct fault *fault;
    bool good; /* false after a failed write: what follows is not tried */
};

/* Opens the file and writes head, styles and background; `styles` are those of this picture alone. */
bool svg_open(struct svg *svg, const char *path, double width, double height, const char *styles,
              struct fault *fault);

/* The file appears under its name if all was written, else nothing is left. */
bool svg_close(struct svg *svg);

#define SVG_DRAW(svg, ...)                                                                                   \
    ((svg)->good = (svg)->good && outfile_printf((svg)->out, (svg)->fault, __VA_ARGS__))

/* Neighbours differ, and all carry dark text. */
enum { SVG_COLOURS = 9 };
extern const char *const svg_colours[SVG_COLOURS];

#endif
