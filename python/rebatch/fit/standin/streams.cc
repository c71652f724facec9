/* Owns streams, events and graph capture. Must not know memory.
 *
 * Work is done when it is asked for, by the thread that asks; so a stream has nothing to wait for,
 * and an event is ready as soon as it is recorded. With STANDIN_LATE=1 it is ready only after the
 * host has waited for the GPU, as if every kernel took very long. */
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "standin.h"

namespace standin
{
namespace
{

using clock = std::chrono::steady_clock;

struct stream {
    int gpu, priority;
};

struct event {
    clock::time_point time;
    bool is_recorded;
    unsigned long long capture; /* in which it was recorded; 0: none */
    unsigned long long waits;   /* how often the host had waited by then */
    bool is_of_all;             /* it had waited for all streams */
};

struct capture {
    unsigned long long number;
    int mode; /* cudaStreamCaptureMode */
    std::thread::id thread;
};

struct state {
    std::mutex lock;
    uintptr_t last_handle = 0x1000;
    std::map<void *, stream> streams;
    std::map<void *, event> events;
    std::map<void *, capture> captures; /* by stream */
    unsigned long long last_capture = 0;
    const bool is_late = getenv("STANDIN_LATE") && *getenv("STANDIN_LATE") == '1';
    unsigned long long waits = 1;
    unsigned long long last_recorded = 0; /* `waits` then */
    unsigned long long waits_for_all = 1, watched = 0;
    size_t early_unmaps = 0;
};

/* Never destroyed: libraries use streams while the process ends. */
state &the_state(void)
{
    static state &s = *new state;
    return s;
}

bool is_default(void *stream)
{
    return !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

bool is_stream(const state &s, void *stream)
{
    return is_default(stream) || s.streams.count(stream);
}

/* What is called ends all captures. */
code refuse(state &s)
{
    s.captures.clear();
    return CAPTURE_UNSUPPORTED;
}

thread_local int thread_mode = cudaStreamCaptureModeGlobal;

/* Calls that CUDA calls potentially unsafe, by the mode of the thread and that of each capture. */
bool is_unsafe(const state &s)
{
    for (const auto &[stream, c] : s.captures)
        if (thread_mode != cudaStreamCaptureModeRelaxed &&
            ((c.thread == std::this_thread::get_id() && c.mode != cudaStreamCaptureModeRelaxed) ||
             (thread_mode == cudaStreamCaptureModeGlobal && c.mode == cudaStreamCaptureModeGlobal)))
            return true;
    return false;
}

} // namespace

/* ---- streams ---- */

code create_stream(void **out, int priority)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    *out = (void *)(s.last_handle += 16);
    s.streams[*out] = {current_gpu(), priority};
    return OK;
}

code destroy_stream(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.streams.erase(stream) ? OK : BAD_HANDLE;
}

code wait_stream(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.waits++;
    if (s.captures.count(stream))
        return refuse(s);
    return is_stream(s, stream) ? OK : BAD_HANDLE;
}

code check_unsafe(void)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return is_unsafe(s) ? refuse(s) : OK;
}

int exchange_mode(int mode)
{
    const int before = thread_mode;
    thread_mode = mode;
    return before;
}

code check_stream(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return is_stream(s, stream) ? OK : BAD_HANDLE;
}

int priority_of(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.streams.find(stream);
    return found == s.streams.end() ? 0 : found->second.priority;
}

int gpu_of_stream(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.streams.find(stream);
    return found == s.streams.end() ? current_gpu() : found->second.gpu;
}

/* ---- events ---- */

code create_event(void **out)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    *out = (void *)(s.last_handle += 16);
    s.events[*out] = {};
    return OK;
}

code destroy_event(void *event)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.events.erase(event) ? OK : BAD_HANDLE;
}

code check_event(void *event)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    return s.events.count(event) ? OK : BAD_HANDLE;
}

code record_event(void *handle, void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.events.find(handle);
    if (found == s.events.end() || !is_stream(s, stream))
        return BAD_HANDLE;
    const auto capture = s.captures.find(stream);
    found->second = {clock::now(), true, capture == s.captures.end() ? 0 : capture->second.number,
                     s.waits, false};
    s.last_recorded = s.waits;
    return OK;
}

code record_all(void *handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.events.find(handle);
    if (found == s.events.end())
        return BAD_HANDLE;
    if (!s.captures.empty())
        return refuse(s);
    found->second = {clock::now(), true, 0, s.waits_for_all, true};
    s.last_recorded = s.waits;
    return OK;
}

code query_event(void *handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.events.find(handle);
    if (found == s.events.end())
        return BAD_HANDLE;
    const event &e = found->second;
    if (e.capture || is_unsafe(s))
        return refuse(s);
    return s.is_late && e.waits == (e.is_of_all ? s.waits_for_all : s.waits) ? NOT_READY : OK;
}

code query_stream(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (!is_stream(s, stream))
        return BAD_HANDLE;
    if (s.captures.count(stream))
        return refuse(s);
    return s.is_late && s.last_recorded == s.waits ? NOT_READY : OK;
}

void wait_for_gpus(void)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.waits++;
}

code wait_for_all(int gpu)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.waits++;
    s.waits_for_all++;
    for (const auto &[stream, c] : s.captures)
        if (s.streams.count(stream) && s.streams.at(stream).gpu == gpu)
            return refuse(s);
    return OK;
}

void note_unmap(void)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    s.early_unmaps += s.watched == s.waits_for_all;
}

/* A stream that waits for what a captured stream did is captured too. */
code wait_event(void *stream, void *handle)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.events.find(handle);
    if (found == s.events.end() || !is_stream(s, stream))
        return BAD_HANDLE;
    const unsigned long long joined = found->second.capture;
    for (const auto &[other, c] : s.captures)
        if (c.number == joined) {
            s.captures[stream] = c;
            break;
        }
    return OK;
}

code elapsed(float *milliseconds, void *start, void *end)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto from = s.events.find(start), to = s.events.find(end);
    if (from == s.events.end() || to == s.events.end() || !from->second.is_recorded ||
        !to->second.is_recorded)
        return BAD_HANDLE;
    *milliseconds =
        std::chrono::duration<float, std::milli>(to->second.time - from->second.time).count();
    return OK;
}

/* ---- graph capture ---- */

unsigned long long capture_of(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.captures.find(stream);
    return found == s.captures.end() ? 0 : found->second.number;
}

code begin_capture(void *stream, int mode)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (is_default(stream) || !is_stream(s, stream) || s.captures.count(stream))
        return INVALID;
    s.captures[stream] = {++s.last_capture, mode, std::this_thread::get_id()};
    return OK;
}

code end_capture(void *stream)
{
    state &s = the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    const auto found = s.captures.find(stream);
    if (found == s.captures.end())
        return INVALID;
    const unsigned long long ended = found->second.number;
    for (auto i = s.captures.begin(); i != s.captures.end();)
        i = i->second.number == ended ? s.captures.erase(i) : ++i;
    /* An event of a capture that is over brings no stream into one. */
    for (auto &e : s.events)
        if (e.second.capture == ended)
            e.second.capture = 0;
    return OK;
}

} // namespace standin

/* How often memory was unmapped before the host waited for all streams, since `restart`. */
STANDIN_API size_t standin_early_unmaps(bool restart)
{
    auto &s = standin::the_state();
    const std::lock_guard<std::mutex> guard(s.lock);
    if (restart) {
        s.watched = s.waits_for_all;
        s.early_unmaps = 0;
    }
    return s.early_unmaps;
}
