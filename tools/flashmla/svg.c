/* SPDX-License-Identifier: MIT */
#include "svg.h"

const char *const svg_colours[SVG_COLOURS] = {"#7fb0dd", "#f3b562", "#8ccb8f", "#e58b88", "#b7a3dc",
                                              "#6fc6c4", "#d8c25a", "#e3a0cb", "#a9b4c2"};

bool svg_open(struct svg *svg, const char *path, double width, double height, const char *styles,
              struct fault *fault)
{
    *svg = (struct svg){.out = outfile_open(path, 0, fault), .fault = fault, .good = true};
    if (!svg->out) return false;
    SVG_DRAW(svg,
             "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f "
             "%.0f\">\n"
             "<style>text { font-family: 'DejaVu Sans', Arial, sans-serif; font-size: 11px; fill: #334 }\n"
             ".title { font-size: 18px; font-weight: bold } .end { text-anchor: end } .mid { text-anchor: "
             "middle }\n"
             ".note { fill: #667 } .head { font-size: 13px; font-weight: bold }\n"
             "%s</style>\n"
             "<rect width=\"100%%\" height=\"100%%\" fill=\"#fcfcfa\"/>\n",
             width, height, width, height, styles);
    return true;
}

bool svg_close(struct svg *svg)
{
    SVG_DRAW(svg, "</svg>\n");
    if (svg->good) return outfile_commit(svg->out, svg->fault);
    outfile_abandon(svg->out);
    return false;
}
