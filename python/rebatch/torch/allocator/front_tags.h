// The tags of this process, which name what is allocated, and which of them a thread has.
// Must not know pools.
#ifndef REBATCH_FRONT_TAGS_H
#define REBATCH_FRONT_TAGS_H

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

namespace
{
constexpr int MOST_TAGS = 256; // as many as a pool has, the one for untagged memory included

// A tag of this process is an index into `tag_names`; each pool has its own number for it. 0:
// untagged.
std::mutex tags_lock;
std::vector<std::string> *const tag_names = new std::vector<std::string>{""};

// A thread within a `with tag()` block has the block's tag. All other threads, autograd's among
// them, have the tag of the leading thread: the main thread while it is within a block, otherwise
// the thread that first entered one.
constexpr int NO_TAG = -1;
#define FRONT_TLS __attribute__((tls_model("initial-exec")))
thread_local int thread_tag FRONT_TLS = NO_TAG;
std::atomic<int> common_tag{0};
std::atomic<pid_t> leading_thread{0}; // 0: none

int current_tag()
{
    return __builtin_expect(thread_tag != NO_TAG, 0) ? thread_tag
                                                     : common_tag.load(std::memory_order_relaxed);
}

pid_t this_thread()
{
    return static_cast<pid_t>(syscall(SYS_gettid));
}

// Begins a block with a tag: returns what leave_tag() takes at its end.
int enter_tag(int tag)
{
    const int before = thread_tag;
    const pid_t self = this_thread();
    thread_tag = tag;
    pid_t leader = 0;
    if (self == getpid()) // the main thread
        leading_thread = self;
    else
        leading_thread.compare_exchange_strong(leader, self);
    if (leading_thread == self)
        common_tag = tag;
    return before;
}

void leave_tag(int before)
{
    thread_tag = before;
    if (leading_thread != this_thread())
        return;
    common_tag = before == NO_TAG ? 0 : before;
    if (before == NO_TAG)
        leading_thread = 0;
}
} // namespace

#endif
