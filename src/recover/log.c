/* Owns where events go: to the callback, and as lines of text or of JSON to standard error or into
 * a file. Must not know why something happened. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "recover/recover.h"

/* A sentence is cut after SENTENCE_BYTES. Each may take six in JSON ("\u00NN"), and the fields
 * around it take less than 2,000. */
#define SENTENCE_BYTES 512
#define LINE_BYTES (6 * SENTENCE_BYTES + 2048)

/* ---- opening ---- */

static rebatch_status open_file(struct rbi_log *log, const char *path)
{
    log->file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (log->file >= 0)
        return REBATCH_OK;
    return rbi_error(REBATCH_E_IO, "the log file %.200s cannot be opened: %s", path,
                     strerror(errno));
}

rebatch_status rbi_log_open(struct rbi_log *log, const rebatch_options *options)
{
    const bool to_stderr = !options->log_file && !options->on_event;
    *log = (struct rbi_log){.file = -1, .to_stderr = to_stderr, .format = options->log_format};
    log->level = options->log_level ? options->log_level
                 : to_stderr        ? REBATCH_LOG_WARN
                                    : REBATCH_LOG_INFO;
    return options->log_file ? open_file(log, options->log_file) : REBATCH_OK;
}

void rbi_log_close(struct rbi_log *log)
{
    if (log->file >= 0)
        (void)close(log->file);
    log->file = -1;
}

/* ---- writing ---- */

/* A reader that has gone, of `./train 2>&1 | head`, is no reason to end a training: the SIGPIPE
 * that a write has caused is taken back. */
static void write_quietly(int file, const char *text, size_t length)
{
    sigset_t pipe, before, pending;
    (void)sigemptyset(&pipe);
    (void)sigaddset(&pipe, SIGPIPE);
    (void)sigpending(&pending);
    const bool was_pending = sigismember(&pending, SIGPIPE) == 1;
    (void)pthread_sigmask(SIG_BLOCK, &pipe, &before);
    if (!rbi_write_all(file, text, length) && errno == EPIPE && !was_pending)
        (void)sigtimedwait(&pipe, NULL, &(struct timespec){0});
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static const char *level_name(rebatch_log_level level)
{
    switch (level) {
    case REBATCH_LOG_ERROR:
        return "error";
    case REBATCH_LOG_WARN:
        return "warn";
    case REBATCH_LOG_INFO:
        return "info";
    default:
        return "debug";
    }
}

/* "shrink" */
static void add_kind(struct rbi_text *t, rebatch_event_kind kind)
{
    static const char *const names[] = {
#define NAME(name, level, text) #name,
        REBATCH_EVENTS(NAME)
#undef NAME
    };
    for (const char *at = names[kind]; *at; at++)
        rbi_text_add(t, "%c", *at >= 'A' && *at <= 'Z' ? *at - 'A' + 'a' : *at);
}

/* Members of an event, as they are named in JSON. */
#define NUMBERS(X)                                                                                 \
    X(attempt)                                                                                     \
    X(first)                                                                                       \
    X(count)                                                                                       \
    X(batch)                                                                                       \
    X(micro_before)                                                                                \
    X(micro_after)                                                                                 \
    X(lighten_before)                                                                              \
    X(lighten_after)                                                                               \
    X(redone_samples)                                                                              \
    X(lost_ns)                                                                                     \
    X(asked_bytes)                                                                                 \
    X(needed_bytes)                                                                                \
    X(available_bytes)                                                                             \
    X(peak_bytes)                                                                                  \
    X(cost)                                                                                        \
    X(cost_before)                                                                                 \
    X(cost_after)

/* A number that is not known is null. */
static void add_number(struct rbi_text *t, const char *name, uint64_t number)
{
    rbi_text_add(t, ",\"%s\":", name);
    if (number == UINT64_MAX)
        rbi_text_add(t, "null");
    else
        rbi_text_add(t, "%" PRIu64, number);
}

static void add_json(struct rbi_text *t, const rebatch_event *event, const char *sentence)
{
    rbi_text_add(t, "{\"time\":\"");
    rbi_text_add_time(t, rbi_clock_ms());
    rbi_text_add(t, "\",\"event\":\"");
    add_kind(t, event->kind);
    rbi_text_add(t, "\",\"level\":\"%s\",\"step\":%" PRIu64 ",\"phase\":", level_name(event->level),
                 event->step);
    if (rbi_event_is_oom(event->kind))
        rbi_text_add_json(t, rbi_phase_text(event->phase));
    else
        rbi_text_add(t, "null");
#define ADD(member) add_number(t, #member, (uint64_t)event->member);
    NUMBERS(ADD)
#undef ADD
    rbi_text_add(t, ",\"text\":");
    rbi_text_add_json(t, sentence);
    rbi_text_add(t, "}\n");
}

static void add_text(struct rbi_text *t, const struct rbi_log *log, const rebatch_event *event,
                     const char *sentence)
{
    if (log->to_stderr) {
        rbi_text_add(t, "rebatch: %s\n", sentence);
        return;
    }
    rbi_text_add_time(t, rbi_clock_ms());
    rbi_text_add(t, " %-5s %s\n", level_name(event->level), sentence);
}

/* In one piece, so that lines of several processes do not mix. */
static void write_event(const struct rbi_log *log, const rebatch_event *event)
{
    char line[LINE_BYTES], sentence[SENTENCE_BYTES];
    struct rbi_text t = {line, sizeof line, 0};
    if ((log->file < 0 && !log->to_stderr) || event->level > log->level)
        return;
    (void)rebatch_event_format(sentence, sizeof sentence, event);
    if (log->format == REBATCH_LOG_JSON)
        add_json(&t, event, sentence);
    else
        add_text(&t, log, event, sentence);
    rbi_assert(t.length < sizeof line);
    write_quietly(log->to_stderr ? STDERR_FILENO : log->file, line, t.length);
}

/* ---- to whom ---- */

void rbi_event_emit(const rebatch *rb, rebatch_event *event)
{
    static const rebatch_log_level levels[] = {
#define LEVEL(name, level, text) REBATCH_LOG_##level,
        REBATCH_EVENTS(LEVEL)
#undef LEVEL
    };
    rbi_assert((size_t)event->kind < sizeof levels / sizeof *levels);
    event->level = levels[event->kind];
    event->step = rb->step;
    const rebatch_log_level level =
        rb->options.log_level ? rb->options.log_level : REBATCH_LOG_INFO;
    if (rb->options.on_event && event->level <= level)
        rb->options.on_event(event, rb->options.on_event_user);
    write_event(&rb->log, event);
}

void rbi_event_redirect(rebatch *rb, void (*on_event)(const rebatch_event *event, void *user),
                        void *user)
{
    rb->options.on_event = on_event;
    rb->options.on_event_user = user;
    rb->log.to_stderr = false;
    if (rb->options.log_level && rb->options.log_level < REBATCH_LOG_INFO)
        rb->options.log_level = REBATCH_LOG_INFO;
}
