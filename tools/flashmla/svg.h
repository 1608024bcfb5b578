/* SPDX-License-Identifier: MIT
 *
 * Shared by the command's pictures: the file, complete or absent, the styles, the colours.
 */
#ifndef FLASHMLA_TOOL_SVG_H
#define FLASHMLA_TOOL_SVG_H

#include "outfile.h"

/* Elements have no colours of their own, but classes of python/flash_mla/picture.css, which has each colour for
 * light and for dark screens: text is title, head or note, and end or mid set the anchor of x; cN fills. */
struct svg {
    struct outfile *out;
    struct reason *reason;
    bool good; /* false after a failed write; later writes are skipped */
};

/* The text of picture.css, which CMake makes a C file of. */
extern const char svg_style[];

/* Opens the file and writes head, style and background. */
bool svg_open(struct svg *svg, const char *path, double width, double height, struct reason *reason);

/* The file appears under its name if everything was written; else nothing remains. */
bool svg_close(struct svg *svg);

#define SVG_DRAW(svg, ...)                                                                                   \
    ((svg)->good = (svg)->good && outfile_printf((svg)->out, (svg)->reason, __VA_ARGS__))

/* Classes c0 to c8: neighbours differ, and text is readable on all of them. */
enum { SVG_COLOURS = 9 };

#endif
