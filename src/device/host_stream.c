/* Owns the streams and events of the host device: a thread and a queue each.
 * Must not know memory or capacities. */
#include "device/host_stream.h"

#include <pthread.h>
#include <string.h>

struct rbi_event_object {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t under_way; /* records that are enqueued and have not run; 0: the event is reached */
};

enum task_kind { TASK_CALL, TASK_COPY, TASK_FILL, TASK_RECORD, TASK_END };

struct task {
    struct task *next;
    enum task_kind kind;
    void (*function)(void *);
    void *to; /* also the user pointer of a call */
    const void *from;
    size_t bytes;
    uint8_t value;
    rbi_event event;
};

struct rebatch_stream_object {
    rebatch_stream next; /* in the device's list */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t added; /* the queue is no longer empty */
    pthread_cond_t idle;  /* the queue is empty and nothing runs */
    struct task *head, **tail;
    struct task *spare; /* nodes to use again, so that a steady state needs no heap */
    bool running;       /* a task is being run */
};

rebatch_stream *rbi_host_stream_next(rebatch_stream stream)
{
    return &stream->next;
}

/* ---- events ---- */

rebatch_status rbi_host_event_create(rbi_event *out)
{
    rbi_event event = rbi_heap_calloc(1, sizeof *event);
    if (!event)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for an event");
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    *out = event;
    return REBATCH_OK;
}

void rbi_host_event_destroy(rbi_event event)
{
    rbi_host_event_synchronize(event); /* a stream may still be about to mark it */
    pthread_cond_destroy(&event->changed);
    pthread_mutex_destroy(&event->lock);
    rbi_heap_free(event);
}

static void begin_record(rbi_event event)
{
    pthread_mutex_lock(&event->lock);
    event->under_way++;
    pthread_mutex_unlock(&event->lock);
}

static void end_record(rbi_event event)
{
    pthread_mutex_lock(&event->lock);
    rbi_assert(event->under_way > 0);
    event->under_way--;
    pthread_cond_broadcast(&event->changed);
    pthread_mutex_unlock(&event->lock);
}

bool rbi_host_event_is_done(rbi_event event)
{
    pthread_mutex_lock(&event->lock);
    const bool done = event->under_way == 0;
    pthread_mutex_unlock(&event->lock);
    return done;
}

void rbi_host_event_synchronize(rbi_event event)
{
    pthread_mutex_lock(&event->lock);
    while (event->under_way != 0)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

/* ---- running ---- */

static void run_task(const struct task *task)
{
    switch (task->kind) {
    case TASK_CALL:
        task->function(task->to);
        break;
    case TASK_COPY:
        memcpy(task->to, task->from, task->bytes);
        break;
    case TASK_FILL:
        memset(task->to, task->value, task->bytes);
        break;
    case TASK_RECORD:
        end_record(task->event);
        break;
    case TASK_END:
        break;
    }
}

static void *run_queue(void *argument)
{
    rebatch_stream stream = argument;
    enum task_kind kind;
    do {
        pthread_mutex_lock(&stream->lock);
        while (!stream->head)
            pthread_cond_wait(&stream->added, &stream->lock);
        struct task *task = stream->head;
        stream->head = task->next;
        if (!stream->head)
            stream->tail = &stream->head;
        rbi_assert(!stream->running);
        stream->running = true;
        pthread_mutex_unlock(&stream->lock);

        kind = task->kind;
        run_task(task);

        pthread_mutex_lock(&stream->lock);
        task->next = stream->spare;
        stream->spare = task;
        stream->running = false;
        if (!stream->head)
            pthread_cond_broadcast(&stream->idle);
        pthread_mutex_unlock(&stream->lock);
    } while (kind != TASK_END);
    return NULL;
}

/* Runs the task at once on the default stream, else puts a copy of it in the queue. */
static rebatch_status enqueue(rebatch_stream stream, const struct task *what)
{
    if (!stream) {
        run_task(what);
        return REBATCH_OK;
    }
    pthread_mutex_lock(&stream->lock);
    struct task *task = stream->spare;
    if (task)
        stream->spare = task->next;
    pthread_mutex_unlock(&stream->lock);
    if (!task)
        task = rbi_heap_calloc(1, sizeof *task);
    if (!task)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory to enqueue work on a stream");
    *task = *what;
    task->next = NULL;

    pthread_mutex_lock(&stream->lock);
    rbi_assert(*stream->tail == NULL && (stream->head || stream->tail == &stream->head));
    *stream->tail = task;
    stream->tail = &task->next;
    pthread_cond_signal(&stream->added);
    pthread_mutex_unlock(&stream->lock);
    return REBATCH_OK;
}

rebatch_status rbi_host_stream_call(rebatch_stream stream, void (*function)(void *), void *user)
{
    return enqueue(stream, &(struct task){.kind = TASK_CALL, .function = function, .to = user});
}

rebatch_status rbi_host_stream_copy(rebatch_stream stream, void *to, const void *from, size_t bytes)
{
    return enqueue(stream,
                   &(struct task){.kind = TASK_COPY, .to = to, .from = from, .bytes = bytes});
}

rebatch_status rbi_host_stream_fill(rebatch_stream stream, void *to, uint8_t value, size_t bytes)
{
    return enqueue(stream,
                   &(struct task){.kind = TASK_FILL, .to = to, .value = value, .bytes = bytes});
}

rebatch_status rbi_host_event_record(rbi_event event, rebatch_stream stream)
{
    begin_record(event);
    const rebatch_status status =
        enqueue(stream, &(struct task){.kind = TASK_RECORD, .event = event});
    if (status)
        end_record(event); /* else waiting for it would never end */
    return status;
}

/* ---- life ---- */

static void release(rebatch_stream stream)
{
    rbi_assert(!stream->head && !stream->running);
    while (stream->spare) {
        struct task *task = stream->spare;
        stream->spare = task->next;
        rbi_heap_free(task);
    }
    pthread_cond_destroy(&stream->idle);
    pthread_cond_destroy(&stream->added);
    pthread_mutex_destroy(&stream->lock);
    rbi_heap_free(stream);
}

rebatch_status rbi_host_stream_create(rebatch_stream *out)
{
    rebatch_stream stream = rbi_heap_calloc(1, sizeof *stream);
    if (!stream)
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for a stream");
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->added, NULL);
    pthread_cond_init(&stream->idle, NULL);
    stream->tail = &stream->head;
    /* The node of the task that will end the thread: destroying a stream must not fail. */
    stream->spare = rbi_heap_calloc(1, sizeof *stream->spare);
    if (!stream->spare || pthread_create(&stream->thread, NULL, run_queue, stream) != 0) {
        release(stream);
        return rbi_error(REBATCH_E_HOST_OOM, "no host memory for the thread of a stream");
    }
    *out = stream;
    return REBATCH_OK;
}

rebatch_status rbi_host_stream_synchronize(rebatch_stream stream)
{
    if (!stream)
        return REBATCH_OK; /* the default stream never lags */
    pthread_mutex_lock(&stream->lock);
    while (stream->head || stream->running)
        pthread_cond_wait(&stream->idle, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return REBATCH_OK;
}

void rbi_host_stream_destroy(rebatch_stream stream)
{
    (void)rbi_host_stream_synchronize(stream);
    rbi_assert(stream->spare && !stream->head);
    (void)enqueue(stream, &(struct task){.kind = TASK_END});
    pthread_join(stream->thread, NULL);
    release(stream);
}
