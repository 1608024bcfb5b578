/* SPDX-License-Identifier: MIT
 *
 * The picture from the top: title, requests, axis, loads, notes. Its width is fixed; the bars of
 * requests become lower as their number grows. If they are too many to read, each bar is the longest of
 * several requests.
 */
#include "plan_view.h"
#include "svg.h"

#include <inttypes.h>
#include <math.h>

enum { WIDTH = 1080, LEFT = 84, RIGHT = 96, PLOT = WIDTH - LEFT - RIGHT, TOP = 76, LOADS = 150 };
enum { MOST_BARS = 128, MOST_LOADS = PLOT / 3 };

struct drawing {
    const struct plan_picture *picture;
    struct svg svg;
    double row_height, bar_height;
    int64_t bars, each;       /* bars, and requests per bar */
    int64_t shown[MOST_BARS]; /* the longest request of each bar */
    double keys_scale;        /* pixels per key */
    int64_t longest;
};

#define DRAW(d, ...) SVG_DRAW(&(d)->svg, __VA_ARGS__)

static int colour_of(int64_t partition)
{
    return (int)(partition % SVG_COLOURS);
}

static double bar_y(const struct drawing *d, int64_t bar)
{
    return TOP + (double)bar * d->row_height;
}

static double bars_end(const struct drawing *d)
{
    return bar_y(d, d->bars);
}

static void choose_bars(struct drawing *d)
{
    const int64_t batch = d->picture->view.batch;
    const int32_t *lengths = d->picture->lengths;
    d->each = batch > MOST_BARS ? (batch + MOST_BARS - 1) / MOST_BARS : 1;
    for (int64_t r = 0; r < batch; r++) {
        int64_t *shown = &d->shown[r / d->each];
        if (r % d->each == 0 || lengths[r] > lengths[*shown]) *shown = r;
    }
    d->bars = (batch + d->each - 1) / d->each;
    d->row_height = d->bars <= 60 ? 22.0 : 1320.0 / (double)d->bars;
    d->bar_height = 0.78 * d->row_height;
}

static void text(struct drawing *d, double x, double y, const char *style, const char *format, int64_t value)
{
    DRAW(d, "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">", x, y, style);
    DRAW(d, format, value);
    DRAW(d, "</text>\n");
}

static void draw_title(struct drawing *d)
{
    const fmla_plan_view *view = &d->picture->view;
    DRAW(d,
         "<text x=\"%d\" y=\"32\" class=\"title\">Split plan: %" PRId64 " request%s on %" PRId64
         " partition%s</text>\n",
         LEFT, view->batch, view->batch == 1 ? "" : "s", view->num_partitions,
         view->num_partitions == 1 ? "" : "s");
    DRAW(d,
         "<text x=\"%d\" y=\"52\" class=\"note\">A bar is a request, its length the keys; a colour (and "
         "number) is the partition that works on them; a line across a bar is a boundary between "
         "splits.</text>\n",
         LEFT);
    if (d->each > 1)
        DRAW(d,
             "<text x=\"%d\" y=\"67\" class=\"note\">Bars are thinned: of every %" PRId64
             " requests the longest one is drawn, %" PRId64 " of %" PRId64 ".</text>\n",
             LEFT, d->each, d->bars, view->batch);
    if (!view->batch)
        DRAW(d, "<text x=\"%d\" y=\"%d\" class=\"head\">%s</text>\n", LEFT, TOP + 14, PLAN_EMPTY);
}

/* Returns a round number of keys between grid lines, for about eight lines. */
static int64_t grid_step(int64_t longest)
{
    int64_t step = BLOCK_KEYS;
    while (longest / step > 8) step *= 2;
    return step;
}

static void draw_axis(struct drawing *d)
{
    const double bottom = bars_end(d) + 4;
    const int64_t step = grid_step(d->longest);
    for (int64_t key = 0; key <= d->longest; key += step) {
        const double x = LEFT + (double)key * d->keys_scale;
        DRAW(d, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%.1f\" class=\"grid\"/>\n", x, x, TOP - 6,
             bottom);
        text(d, x, bottom + 14, "mid note", "%" PRId64, key);
    }
    DRAW(d, "<text x=\"%d\" y=\"%.1f\" class=\"note\">keys</text>\n", WIDTH - RIGHT + 28, bottom + 14);
}

/* Draws keys [begin, end) of a request in the partition's colour. */
static void draw_part(struct drawing *d, int64_t bar, int64_t begin, int64_t end, int64_t partition)
{
    const double x = LEFT + (double)begin * d->keys_scale, y = bar_y(d, bar);
    const double full = (double)(end - begin) * d->keys_scale;
    const double width = full > 1.0 ? full : 1.0; /* show requests without keys: they are work too */
    DRAW(d,
         "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" class=\"c%d\"><title>request %" PRId64
         ", keys %" PRId64 " to %" PRId64 ": partition %" PRId64 "</title></rect>\n",
         x, y, width, d->bar_height, colour_of(partition), d->shown[bar], begin, end, partition);
    if (begin > 0)
        DRAW(d, "<line x1=\"%.2f\" x2=\"%.2f\" y1=\"%.2f\" y2=\"%.2f\" class=\"mark\"/>\n", x, x, y - 1,
             y + d->bar_height + 1);
    if (d->bar_height >= 10 && width >= 26)
        text(d, x + width / 2, y + d->bar_height / 2 + 4, "mid", "%" PRId64, partition);
}

static void draw_requests(struct drawing *d)
{
    const struct plan_picture *picture = d->picture;
    for (int64_t p = 0; p < picture->view.num_partitions; p++) {
        const struct plan_row row = plan_row_of(picture, p);
        for (int64_t bar = row.begin_request / d->each; bar < d->bars; bar++) {
            const int64_t r = d->shown[bar];
            if (r > row.end_request) break;
            if (r >= row.begin_request)
                draw_part(d, bar, r == row.begin_request ? row.begin_key : 0,
                          r == row.end_request ? row.end_key : picture->lengths[r], p);
        }
    }
    /* Labels as dense as possible without overlap. */
    const int64_t step = d->row_height >= 12 ? 1 : (int64_t)ceil(14.0 / d->row_height);
    for (int64_t bar = 0; bar < d->bars; bar += step) {
        const int64_t r = d->shown[bar];
        const double y = bar_y(d, bar) + d->bar_height / 2 + 4;
        text(d, LEFT - 8, y, "end", picture->view.batch > 10000 ? "%" PRId64 : "request %" PRId64, r);
        if (step == 1)
            text(d, LEFT + (double)picture->lengths[r] * d->keys_scale + 7, y, "note", "%" PRId64,
                 picture->lengths[r]);
    }
}

/* Returns the partition with the largest load among `count` from `first` on. */
static int64_t largest_load(const struct plan_picture *picture, int64_t first, int64_t count)
{
    int64_t largest = first, most = plan_row_of(picture, first).load;
    for (int64_t p = first + 1; p < first + count && p < picture->view.num_partitions; p++) {
        const int64_t load = plan_row_of(picture, p).load;
        if (load > most) most = load, largest = p;
    }
    return largest;
}

static void draw_loads(struct drawing *d, double top)
{
    const struct plan_picture *picture = d->picture;
    const fmla_plan_view *view = &picture->view;
    const int64_t each = (view->num_partitions + MOST_LOADS - 1) / MOST_LOADS;
    const int64_t columns = (view->num_partitions + each - 1) / each;
    const double base = top + LOADS, pitch = (double)PLOT / (double)columns;
    const double scale = (LOADS - 34.0) / (double)view->payload;
    const double slot = pitch > 120.0 ? 120.0 : pitch;
    const double width = slot > 4.0 ? slot * 0.84 : slot;
    const double limit = base - (double)view->payload * scale;
    const int64_t step = (int64_t)ceil((view->num_partitions > 1000 ? 44.0 : 30.0) / slot);
    DRAW(d, "<text x=\"%d\" y=\"%.1f\" class=\"head\">Load of each partition", LEFT, top + 2);
    if (each > 1) DRAW(d, ": thinned, of every %" PRId64 " the largest", each);
    DRAW(d, "</text>\n");
    for (int64_t column = 0; column < columns; column++) {
        const int64_t p = largest_load(picture, column * each, each);
        const struct plan_row row = plan_row_of(picture, p);
        const double height = (double)row.load * scale, x = LEFT + (double)column * slot;
        DRAW(d,
             "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" class=\"c%d\"><title>partition "
             "%" PRId64 ": load %" PRId64 "</title></rect>\n",
             x, base - height, width, height, colour_of(p), p, row.load);
        if (column % step == 0) text(d, x + width / 2, base + 14, "mid", "%" PRId64, p);
        if (slot >= 30 && row.load > 0)
            text(d, x + width / 2, base - height + 13, "mid", "%" PRId64, row.load);
        if (slot >= 30 && row.load == 0)
            DRAW(d, "<text x=\"%.1f\" y=\"%.1f\" class=\"mid note\">idle</text>\n", x + width / 2, base - 4);
    }
    DRAW(d, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" class=\"limit\"/>\n", LEFT, WIDTH - RIGHT,
         limit, limit);
    text(d, WIDTH - RIGHT + 6, limit + 4, "note", "payload %" PRId64, view->payload);
    DRAW(d, "<line x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\" class=\"axis\"/>\n", LEFT, WIDTH - RIGHT, base,
         base);
    DRAW(d, "<text x=\"%d\" y=\"%.1f\" class=\"note\">partition</text>\n", WIDTH - RIGHT + 6, base + 14);
    DRAW(d,
         "<text x=\"%d\" y=\"%.1f\" class=\"note\">Load counts blocks of %d keys, and %d more for every "
         "request "
         "touched. Largest %" PRId64 ", mean %.1f: imbalance %.3f.%s</text>\n",
         LEFT, base + 36, BLOCK_KEYS, REQUEST_OVERHEAD, picture->max_load, picture->mean_load,
         picture->mean_load > 0 ? (double)picture->max_load / picture->mean_load : 1.0,
         view->num_partitions > SVG_COLOURS ? " Colours repeat." : "");
}

bool plan_svg_write(const char *path, const struct plan_picture *picture, struct reason *reason)
{
    struct drawing d = {.picture = picture, .longest = 1};
    const int64_t batch = picture->view.batch;
    for (int64_t r = 0; r < batch; r++)
        if (picture->lengths[r] > d.longest) d.longest = picture->lengths[r];
    d.keys_scale = (double)PLOT / (double)d.longest;
    choose_bars(&d);
    const double loads_top = bars_end(&d) + 50;
    if (!svg_open(&d.svg, path, WIDTH, loads_top + LOADS + 52, reason)) return false;
    draw_title(&d);
    if (batch) draw_axis(&d);
    draw_requests(&d);
    draw_loads(&d, loads_top);
    return svg_close(&d.svg);
}
