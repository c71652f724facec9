/* A plot over time as SVG: panels one below the other, lines, bands, marks. Colours and strokes are
 * such that it can be read on light and on dark. Must not know what is plotted. */
#ifndef BENCH_SVG_H
#define BENCH_SVG_H

#include <stdio.h>

struct svg {
    FILE *file;
    double time_end; /* of the axis, from 0 */
};

struct svg_panel {
    double top, height; /* in the picture */
    double most;        /* of the value axis, from 0 */
    double step;        /* between its marks */
    const char *title;
};

/* A value that holds from a time on. */
struct svg_point {
    double time, value;
};

struct svg_line {
    const char *colour;
    double width;
    const char *dashes; /* "": none */
};

void svg_begin(struct svg *svg, FILE *file, double time_end, double height, const char *title);
void svg_panel(const struct svg *svg, const struct svg_panel *panel);
/* A line in steps, up to the end of the axis. */
void svg_steps(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *points,
               size_t count, const struct svg_line *line);
/* What lies between the line in steps and `most`. */
void svg_area_above(const struct svg *svg, const struct svg_panel *panel,
                    const struct svg_point *points, size_t count, const char *colour);
void svg_cross(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *at,
               const char *colour);
/* Words within the panel. */
void svg_label(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *at,
               const char *colour, const char *text);
/* An entry of the legend under the title, from the left edge on. */
void svg_legend(const struct svg *svg, double left, double top, const struct svg_line *line,
                const char *text);
void svg_legend_cross(const struct svg *svg, double left, double top, const char *colour,
                      const char *text);
void svg_time_axis(const struct svg *svg, double top, double step, double unit, const char *title);
void svg_end(const struct svg *svg);

#endif
