/* SPDX-License-Identifier: MIT */
#include "svg.h"

#include <string.h>

bool svg_open(struct svg *svg, const char *path, double width, double height, struct reason *reason)
{
    *svg = (struct svg){.out = outfile_open(path, 0, reason), .reason = reason, .good = true};
    if (!svg->out) return false;
    SVG_DRAW(svg,
             "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
             "%.0f\">\n<style>\n",
             width, height, width, height);
    svg->good = svg->good && outfile_write(svg->out, svg_style, strlen(svg_style), reason);
    SVG_DRAW(svg, "</style>\n<rect width=\"100%%\" height=\"100%%\" class=\"ground\"/>\n");
    return true;
}

bool svg_close(struct svg *svg)
{
    SVG_DRAW(svg, "</svg>\n");
    if (svg->good) return outfile_commit(svg->out, svg->reason);
    outfile_abandon(svg->out);
    return false;
}
