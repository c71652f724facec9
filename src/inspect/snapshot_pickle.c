/* Owns the layout of a snapshot as PyTorch's memory viewer reads it: the dictionary that
 * torch.cuda.memory._snapshot() gives (torch/csrc/cuda/memory_snapshot.cpp), and what rebatch adds.
 * Must not know how it comes to bytes.
 *
 * The viewer goes back from the segments through the events, so these must agree: a segment is
 * memory without a gap, "segment_map" and "segment_unmap" are pieces of one, and all of them are
 * said to be on stream 0, as one segment can have blocks of several streams. */
#include <string.h>

#include "device/device.h"
#include "inspect/inspect.h"
#include "rebatch/cuda.h"
#include "rebatch/version.h"

/* ---- words ---- */

/* Written out once, and referred to after that. */
#define WORDS(X)                                                                                   \
    X(segments)                                                                                    \
    X(device_traces)                                                                               \
    X(allocator_settings)                                                                          \
    X(external_annotations)                                                                        \
    X(rebatch)                                                                                     \
    X(device)                                                                                      \
    X(address)                                                                                     \
    X(total_size)                                                                                  \
    X(allocated_size)                                                                              \
    X(active_size)                                                                                 \
    X(requested_size)                                                                              \
    X(stream)                                                                                      \
    X(segment_type)                                                                                \
    X(segment_pool_id)                                                                             \
    X(large)                                                                                       \
    X(small)                                                                                       \
    X(is_expandable)                                                                               \
    X(frames)                                                                                      \
    X(blocks)                                                                                      \
    X(size)                                                                                        \
    X(state)                                                                                       \
    X(active_allocated)                                                                            \
    X(active_pending_free)                                                                         \
    X(inactive)                                                                                    \
    X(action)                                                                                      \
    X(addr)                                                                                        \
    X(device_free)                                                                                 \
    X(time_us)                                                                                     \
    X(alloc)                                                                                       \
    X(free_requested)                                                                              \
    X(free_completed)                                                                              \
    X(segment_alloc)                                                                               \
    X(segment_free)                                                                                \
    X(segment_map)                                                                                 \
    X(segment_unmap)                                                                               \
    X(oom)                                                                                         \
    X(rollback)                                                                                    \
    X(name)                                                                                        \
    X(filename)                                                                                    \
    X(line)                                                                                        \
    X(PYTORCH_CUDA_ALLOC_CONF)                                                                     \
    X(max_split_size)                                                                              \
    X(garbage_collection_threshold)                                                                \
    X(expandable_segments)                                                                         \
    X(roundup_power2_divisions)                                                                    \
    X(version)                                                                                     \
    X(statistics)                                                                                  \
    X(tags)                                                                                        \
    X(live_bytes)                                                                                  \
    X(peak_bytes)                                                                                  \
    X(at_peak_bytes)                                                                               \
    X(spare_bytes)

enum word {
#define WORD_ID(name) WORD_##name,
    WORDS(WORD_ID)
#undef WORD_ID
        WORD_COUNT
};
_Static_assert(WORD_COUNT <= 256, "a word's number is one byte");
/* Numbers of the tags' frames follow those of the words. */
#define FIRST_FRAMES 256

struct pickle {
    struct rbi_sink *sink;
    const rebatch_pool *pool;
    struct rbi_view_facts facts;
    int64_t epoch_us;
    unsigned device; /* as CUDA counts; 0 for what is no GPU */
    bool has_word[WORD_COUNT];
    bool has_frames[RBI_POOL_TAGS];
};

static void put_word(struct pickle *p, enum word word)
{
    static const char *const words[] = {
#define WORD_TEXT(name) #name,
        WORDS(WORD_TEXT)
#undef WORD_TEXT
    };
    if (p->has_word[word]) {
        rbi_pickle_again(p->sink, word);
        return;
    }
    rbi_pickle_text(p->sink, words[word]);
    rbi_pickle_keep(p->sink, word);
    p->has_word[word] = true;
}

static void put_count(struct pickle *p, enum word key, uint64_t value)
{
    put_word(p, key);
    rbi_pickle_unsigned(p->sink, value);
}

static void put_address(struct pickle *p, enum word key, const void *address)
{
    put_count(p, key, (uintptr_t)address);
}

static void put_words(struct pickle *p, enum word key, enum word value)
{
    put_word(p, key);
    put_word(p, value);
}

static void put_bool(struct pickle *p, enum word key, bool value)
{
    put_word(p, key);
    rbi_pickle_bool(p->sink, value);
}

/* ---- frames ---- */

static void put_frame(struct pickle *p, const char *name)
{
    rbi_pickle_list(p->sink);
    rbi_pickle_begin_dict(p->sink);
    put_words(p, WORD_filename, WORD_rebatch);
    put_count(p, WORD_line, 0);
    put_word(p, WORD_name);
    rbi_pickle_text(p->sink, name);
    rbi_pickle_end_dict(p->sink);
    rbi_pickle_append(p->sink);
}

/* Where PyTorch has who allocated: the tag. */
static void put_frames(struct pickle *p, rebatch_tag tag)
{
    put_word(p, WORD_frames);
    if (p->has_frames[tag]) {
        rbi_pickle_again(p->sink, FIRST_FRAMES + tag);
        return;
    }
    put_frame(p, rbi_view_tag_name(p->pool, tag));
    rbi_pickle_keep(p->sink, FIRST_FRAMES + tag);
    p->has_frames[tag] = true;
}

static void put_no_frames(struct pickle *p)
{
    put_word(p, WORD_frames);
    rbi_pickle_list(p->sink);
}

/* ---- segments ---- */

static void put_block(struct pickle *p, const struct rbi_view_piece *piece)
{
    const bool live = rbi_view_is_in_use(piece);
    const bool pending = piece->state == RBI_VIEW_PENDING;
    rbi_pickle_begin_dict(p->sink);
    put_address(p, WORD_address, piece->address);
    put_count(p, WORD_size, piece->bytes);
    /* What was asked for is not kept of a block that waits for its end. */
    put_count(p, WORD_requested_size, pending ? piece->bytes : piece->requested_bytes);
    put_words(p, WORD_state,
              live      ? WORD_active_allocated
              : pending ? WORD_active_pending_free
                        : WORD_inactive);
    put_address(p, WORD_stream, piece->stream);
    if (live || pending)
        put_frames(p, piece->tag);
    else
        put_no_frames(p);
    rbi_pickle_end_dict(p->sink);
}

static void put_segment(struct pickle *p, const struct rbi_segment *segment)
{
    rbi_pickle_begin_dict(p->sink);
    put_count(p, WORD_device, p->device);
    put_address(p, WORD_address, segment->address);
    put_count(p, WORD_total_size, segment->bytes);
    put_count(p, WORD_allocated_size, segment->live_bytes);
    put_count(p, WORD_active_size, segment->live_bytes + segment->pending_bytes);
    put_count(p, WORD_requested_size, segment->requested_bytes + segment->pending_bytes);
    put_count(p, WORD_stream, 0);
    put_words(p, WORD_segment_type, segment->pieces.is_small ? WORD_small : WORD_large);
    put_word(p, WORD_segment_pool_id);
    rbi_pickle_unsigned(p->sink, 0);
    rbi_pickle_unsigned(p->sink, 0);
    rbi_pickle_pair(p->sink);
    put_bool(p, WORD_is_expandable, segment->pieces.is_mapped);
    put_no_frames(p);
    put_word(p, WORD_blocks);
    rbi_pickle_list(p->sink);
    struct rbi_view_walk pieces = segment->pieces;
    struct rbi_view_piece piece;
    for (size_t i = 0; i < segment->count && rbi_view_next(&piece, &pieces); i++) {
        put_block(p, &piece);
        rbi_pickle_append(p->sink);
    }
    rbi_pickle_end_dict(p->sink);
}

static void put_segments(struct pickle *p)
{
    put_word(p, WORD_segments);
    rbi_pickle_list(p->sink);
    struct rbi_view_walk walk = rbi_view_ranges(p->pool);
    struct rbi_segment segment;
    while (rbi_segment_next(&segment, &walk)) {
        put_segment(p, &segment);
        rbi_pickle_append(p->sink);
    }
}

/* ---- events ---- */

static void put_action(struct pickle *p, const struct rbi_pool_event *event, enum word action)
{
    rbi_pickle_begin_dict(p->sink);
    put_words(p, WORD_action, action);
    if (action == WORD_oom)
        put_count(p, WORD_device_free, event->free_bytes);
    else
        put_address(p, WORD_addr, event->address);
    const bool mapped = action == WORD_segment_map || action == WORD_segment_unmap ||
                        action == WORD_segment_alloc || action == WORD_segment_free;
    put_count(p, WORD_size, action == WORD_rollback ? 0 : event->bytes);
    put_address(p, WORD_stream, mapped ? NULL : event->stream);
    put_word(p, WORD_time_us);
    rbi_pickle_integer(p->sink, p->epoch_us + (int64_t)(event->time_ns / 1000));
    if (action == WORD_rollback) {
        char text[64];
        struct rbi_text t = {text, sizeof text, 0};
        rbi_text_add(&t, "%zu blocks taken back", event->bytes);
        put_word(p, WORD_frames);
        put_frame(p, text);
    } else if (mapped) {
        put_no_frames(p);
    } else {
        put_frames(p, event->tag);
    }
    rbi_pickle_end_dict(p->sink);
    rbi_pickle_append(p->sink);
}

static void put_event(struct pickle *p, const struct rbi_pool_event *event)
{
    const bool space = p->facts.is_mapped;
    switch (event->kind) {
    case RBI_POOL_EVENT_ALLOC:
        put_action(p, event, WORD_alloc);
        break;
    case RBI_POOL_EVENT_FREE: /* PyTorch says it twice, and the viewer makes it one again */
        put_action(p, event, WORD_free_requested);
        put_action(p, event, WORD_free_completed);
        break;
    case RBI_POOL_EVENT_FREE_REQUESTED:
        put_action(p, event, WORD_free_requested);
        break;
    case RBI_POOL_EVENT_FREE_COMPLETED:
        put_action(p, event, WORD_free_completed);
        break;
    case RBI_POOL_EVENT_MAP:
        put_action(p, event, space ? WORD_segment_map : WORD_segment_alloc);
        break;
    case RBI_POOL_EVENT_UNMAP:
        put_action(p, event, space ? WORD_segment_unmap : WORD_segment_free);
        break;
    case RBI_POOL_EVENT_OOM:
        put_action(p, event, WORD_oom);
        break;
    default:
        put_action(p, event, WORD_rollback);
    }
}

/* A list for each device up to ours. */
static void put_events(struct pickle *p)
{
    put_word(p, WORD_device_traces);
    rbi_pickle_list(p->sink);
    for (unsigned i = 0; i < p->device; i++) {
        rbi_pickle_list(p->sink);
        rbi_pickle_append(p->sink);
    }
    rbi_pickle_list(p->sink);
    const struct rbi_event_log *log = p->facts.log;
    for (uint64_t n = rbi_event_log_first(log); n < log->count; n++)
        put_event(p, rbi_event_log_at(log, n));
    rbi_pickle_append(p->sink);
}

/* ---- settings, and what is ours ---- */

/* PyTorch has a number for each of 16 powers of two. */
static void put_rounding(struct pickle *p)
{
    put_word(p, WORD_roundup_power2_divisions);
    rbi_pickle_begin_dict(p->sink);
    for (unsigned i = 0; i < 16 && p->facts.rounding_divisions; i++) {
        char text[16];
        struct rbi_text t = {text, sizeof text, 0};
        rbi_text_add(&t, "%u", 1u << i);
        rbi_pickle_text(p->sink, text);
        rbi_pickle_unsigned(p->sink, p->facts.rounding_divisions);
    }
    rbi_pickle_end_dict(p->sink);
}

static void put_settings(struct pickle *p)
{
    const struct rbi_view_facts *facts = &p->facts;
    put_word(p, WORD_allocator_settings);
    rbi_pickle_begin_dict(p->sink);
    put_word(p, WORD_PYTORCH_CUDA_ALLOC_CONF);
    rbi_pickle_text(p->sink, "");
    put_word(p, WORD_max_split_size);
    rbi_pickle_integer(p->sink, -1);
    put_word(p, WORD_garbage_collection_threshold);
    rbi_pickle_float(p->sink, 0.0);
    put_bool(p, WORD_expandable_segments, facts->is_mapped);
    put_rounding(p);
    rbi_pickle_end_dict(p->sink);
}

static void put_tag(struct pickle *p, size_t tag)
{
    rebatch_tag_usage usage;
    rbi_tag_get_usage(p->pool, tag, &usage);
    rbi_pickle_begin_dict(p->sink);
    put_word(p, WORD_name);
    rbi_pickle_text(p->sink, usage.name);
    put_count(p, WORD_live_bytes, usage.live_bytes);
    put_count(p, WORD_peak_bytes, usage.peak_bytes);
    put_count(p, WORD_at_peak_bytes, usage.at_peak_bytes);
    rbi_pickle_end_dict(p->sink);
}

/* What PyTorch's layout has no place for. */
static void put_rebatch(struct pickle *p)
{
    const rebatch_pool *pool = p->pool;
    rebatch_pool_stats stats;
    rbi_pool_get_stats(&stats, pool);
    put_word(p, WORD_rebatch);
    rbi_pickle_begin_dict(p->sink);
    put_word(p, WORD_version);
    rbi_pickle_text(p->sink, REBATCH_VERSION);
    put_word(p, WORD_statistics);
    rbi_pickle_begin_dict(p->sink);
#define PUT_STATISTIC(name, unit, what)                                                            \
    rbi_pickle_text(p->sink, #name);                                                               \
    rbi_pickle_unsigned(p->sink, stats.name);
    REBATCH_POOL_STATISTICS(PUT_STATISTIC)
#undef PUT_STATISTIC
    rbi_pickle_end_dict(p->sink);
    put_count(p, WORD_spare_bytes, p->facts.spare_bytes);
    put_word(p, WORD_tags);
    rbi_pickle_list(p->sink);
    for (size_t i = 0; i < rbi_view_tag_count(pool); i++) {
        put_tag(p, i);
        rbi_pickle_append(p->sink);
    }
    rbi_pickle_end_dict(p->sink);
}

static unsigned number_of(const rebatch_device *device)
{
    int ordinal = 0;
    if (device->ops->ordinal && rebatch_device_ordinal(&ordinal, device) != REBATCH_OK)
        ordinal = 0;
    return (unsigned)ordinal;
}

void rbi_snapshot_pickle(struct rbi_sink *sink, const rebatch_pool *pool)
{
    struct pickle p;
    memset(&p, 0, sizeof p);
    p.sink = sink;
    p.pool = pool;
    p.epoch_us = rbi_snapshot_epoch_us();
    p.device = number_of(rebatch_pool_device(pool));
    rbi_view_get_facts(&p.facts, pool);
    rbi_pickle_begin(sink);
    rbi_pickle_begin_dict(sink);
    put_segments(&p);
    put_events(&p);
    put_settings(&p);
    put_word(&p, WORD_external_annotations);
    rbi_pickle_list(sink);
    put_rebatch(&p);
    rbi_pickle_end_dict(sink);
    rbi_pickle_end(sink);
}
