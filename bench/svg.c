/* Owns how a plot is written as SVG. Must not know what is plotted. */
#include "svg.h"

#define LEFT 62.0
#define WIDTH 760.0
#define RIGHT 18.0

/* Half way between black and white: 4.5 to 1 on either (WCAG 2 AA). */
#define INK "#767676"

static double x_of(const struct svg *svg, double time)
{
    return LEFT + WIDTH * time / svg->time_end;
}

static double y_of(const struct svg_panel *panel, double value)
{
    return panel->top + panel->height * (1 - value / panel->most);
}

void svg_begin(struct svg *svg, FILE *file, double time_end, double height, const char *title)
{
    *svg = (struct svg){file, time_end};
    const double width = LEFT + WIDTH + RIGHT;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" role=\"img\" font-family=\"system-ui, sans-serif\" font-size=\"12\" "
            "fill=\"" INK "\">\n<title>%s</title>\n",
            width, height, width, height, title);
    fprintf(file, "<text x=\"%.1f\" y=\"18\" font-size=\"15\">%s</text>\n", LEFT, title);
}

void svg_panel(const struct svg *svg, const struct svg_panel *panel)
{
    for (double value = 0; value <= panel->most + panel->step / 1000; value += panel->step) {
        const double y = y_of(panel, value);
        fprintf(svg->file,
                "<path d=\"M%.1f %.1fh%.1f\" stroke=\"" INK "\" stroke-opacity=\"%s\"/>\n", LEFT, y,
                WIDTH, value == 0 ? ".8" : ".2");
        fprintf(svg->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%.0f</text>\n",
                LEFT - 7, y + 4, value);
    }
    fprintf(svg->file,
            "<text transform=\"translate(14 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
            panel->top + panel->height / 2, panel->title);
}

static void steps(const struct svg *svg, const struct svg_panel *panel,
                  const struct svg_point *points, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const double x = x_of(svg, points[i].time);
        const double y = y_of(panel, points[i].value);
        if (i == 0)
            fprintf(svg->file, "M%.1f %.1f", x, y);
        else if (points[i].value != points[i - 1].value)
            fprintf(svg->file, "H%.1fV%.1f", x, y);
    }
    fprintf(svg->file, "H%.1f", x_of(svg, svg->time_end));
}

void svg_steps(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *points,
               size_t count, const struct svg_line *line)
{
    fprintf(svg->file, "<path d=\"");
    steps(svg, panel, points, count);
    fprintf(svg->file, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"%.1f\"", line->colour,
            line->width);
    if (line->dashes[0])
        fprintf(svg->file, " stroke-dasharray=\"%s\"", line->dashes);
    fprintf(svg->file, "/>\n");
}

void svg_area_above(const struct svg *svg, const struct svg_panel *panel,
                    const struct svg_point *points, size_t count, const char *colour)
{
    fprintf(svg->file, "<path d=\"");
    steps(svg, panel, points, count);
    fprintf(svg->file, "V%.1fH%.1fZ\" fill=\"%s\" fill-opacity=\".22\"/>\n", panel->top,
            x_of(svg, points[0].time), colour);
}

void svg_cross(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *at,
               const char *colour)
{
    fprintf(svg->file,
            "<path d=\"M%.1f %.1fm-4 -4l8 8m0 -8l-8 8\" stroke=\"%s\" stroke-width=\"1.8\"/>\n",
            x_of(svg, at->time), y_of(panel, at->value), colour);
}

void svg_label(const struct svg *svg, const struct svg_panel *panel, const struct svg_point *at,
               const char *colour, const char *text)
{
    fprintf(svg->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\" fill=\"%s\">%s</text>\n",
            x_of(svg, at->time), y_of(panel, at->value), colour, text);
}

void svg_legend(const struct svg *svg, double left, double top, const struct svg_line *line,
                const char *text)
{
    const double x = LEFT + left;
    fprintf(svg->file, "<path d=\"M%.1f %.1fh22\" stroke=\"%s\" stroke-width=\"%.1f\"", x, top - 4,
            line->colour, line->width);
    if (line->dashes[0])
        fprintf(svg->file, " stroke-dasharray=\"%s\"", line->dashes);
    fprintf(svg->file, "/>\n<text x=\"%.1f\" y=\"%.1f\">%s</text>\n", x + 28, top, text);
}

void svg_legend_cross(const struct svg *svg, double left, double top, const char *colour,
                      const char *text)
{
    const double x = LEFT + left;
    fprintf(svg->file,
            "<path d=\"M%.1f %.1fm-4 -4l8 8m0 -8l-8 8\" stroke=\"%s\" stroke-width=\"1.8\"/>\n"
            "<text x=\"%.1f\" y=\"%.1f\">%s</text>\n",
            x + 11, top - 4, colour, x + 22, top, text);
}

void svg_time_axis(const struct svg *svg, double top, double step, double unit, const char *title)
{
    for (double time = 0; time <= svg->time_end + step / 1000; time += step)
        fprintf(svg->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.0f</text>\n",
                x_of(svg, time), top, time / unit);
    fprintf(svg->file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n",
            LEFT + WIDTH / 2, top + 17, title);
}

void svg_end(const struct svg *svg)
{
    fprintf(svg->file, "</svg>\n");
}
