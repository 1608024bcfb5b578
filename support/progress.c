/* SPDX-License-Identifier: MIT */
#include "progress.h"

#include "timing.h"

#include <stdio.h>
#include <unistd.h>

void progress_begin(struct progress *progress, const char *what)
{
    *progress = (struct progress){.what = what, .start = timing_now()};
}

void progress_update(struct progress *progress, int64_t done, int64_t total)
{
    const double now = timing_now();
    if (now - progress->start < 2.0 || now - progress->shown < 0.2 || !isatty(STDERR_FILENO)) return;
    progress->shown = now;
    fprintf(stderr, "\r%s: %3.0f %%, %.0f s\033[K", progress->what,
            total > 0 ? 100.0 * (double)done / (double)total : 0.0, now - progress->start);
}

void progress_wipe(struct progress *progress)
{
    if (progress->shown > 0.0) fputs("\r\033[K", stderr);
    progress->shown = 0.0;
}
