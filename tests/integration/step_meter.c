/* Owns the tests of sessions that go by the figures of another allocator (rebatch_meter).
 * Must not know more of the library than its public headers say. */
#include "rig.h"

/* A program with an allocator of its own, of which rebatch sees the figures alone. */
struct program {
    rebatch *rb;
    rebatch_device *device;
    uint64_t capacity, live, peak, asked, cached;
    uint64_t base_bytes, sample_bytes;
    size_t smooth; /* micro-batches of more samples need cliff_bytes more; 0: none does */
    uint64_t cliff_bytes;
    uint64_t piece_bytes; /* that a sample's memory wastes between blocks, until release() */
    uint64_t reserved, reserved_peak;
    size_t calls, updates, releases, most;
    size_t dirty; /* micro-batches larger than any before, that found something cached */
    size_t sizes[REBATCH_PHASE_COUNT]; /* with which begin() was called last */
    uint64_t update_bytes;             /* that the update takes and gives back */
    uint64_t hole;        /* the largest request that is served, but after release(); 0: any */
    bool is_whole;        /* release() was called, and no micro-batch has run since */
    bool is_blind;        /* read() measures nothing */
    bool hides_request;   /* read() does not say what failed */
    size_t retries_above; /* larger micro-batches are served after memory is returned; 0: none is */
    uint64_t retries;
    bool overstates;      /* what is reserved is an eighth more than is needed */
    size_t begins, reads; /* calls of these */
    size_t settled_size;
    rebatch_meter_reading settled;
};

static rebatch_status take(struct program *p, uint64_t bytes)
{
    const bool is_cut = p->hole && bytes > p->hole && !p->is_whole;
    if (is_cut || bytes > p->capacity - p->live) {
        p->asked = bytes;
        return REBATCH_OOM;
    }
    p->live += bytes;
    p->peak = p->live > p->peak ? p->live : p->peak;
    return REBATCH_OK;
}

/* Takes from the device what a micro-batch's blocks and the room between them need. */
static rebatch_status reserve(struct program *p, size_t samples)
{
    uint64_t bytes = p->live + samples * p->piece_bytes;
    if (bytes > p->capacity)
        return REBATCH_OOM;
    p->retries += p->retries_above && samples > p->retries_above;
    if (p->overstates)
        bytes = bytes + bytes / 8 < p->capacity ? bytes + bytes / 8 : p->capacity;
    p->reserved = bytes > p->reserved ? bytes : p->reserved;
    p->reserved_peak = p->reserved > p->reserved_peak ? p->reserved : p->reserved_peak;
    return REBATCH_OK;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    struct program *p = user;
    p->calls++;
    rebatch_status status = take(p, p->base_bytes);
    if (status)
        return status;
    const uint64_t bytes =
        mb->count * p->sample_bytes + (p->smooth && mb->count > p->smooth ? p->cliff_bytes : 0);
    status = take(p, bytes);
    if (!status && p->piece_bytes && reserve(p, mb->count)) {
        p->live -= bytes;
        status = REBATCH_OOM;
    }
    if (!status) {
        rebatch_mutating(p->rb);
        p->live -= bytes;
        p->most = mb->count > p->most ? mb->count : p->most;
    }
    p->live -= p->base_bytes;
    p->is_whole &= status != REBATCH_OK;
    return status;
}

static rebatch_status optimizer_step(void *user)
{
    struct program *p = user;
    rebatch_mutating(p->rb);
    const rebatch_status status = take(p, p->update_bytes);
    if (status)
        return status;
    p->live -= p->update_bytes;
    p->updates++;
    return REBATCH_OK;
}

static void begin(rebatch_phase phase, size_t size, void *user)
{
    struct program *p = user;
    p->begins++;
    p->sizes[phase] = size;
    p->peak = p->live;
    p->asked = 0;
    p->reserved_peak = p->reserved;
    p->retries = 0;
    if (phase == REBATCH_PHASE_FORWARD && size > p->most)
        p->dirty += p->reserved > p->live;
}

static rebatch_status read_figures(rebatch_meter_reading *out, void *user)
{
    struct program *p = user;
    p->reads++;
    *out = (rebatch_meter_reading){.live_bytes = p->live,
                                   .peak_bytes = p->is_blind ? 0 : p->peak,
                                   .reserved_bytes = p->live + p->cached,
                                   .asked_bytes = p->hides_request ? 0 : p->asked,
                                   .reserved_peak_bytes = p->reserved_peak,
                                   .retries = p->retries};
    return REBATCH_OK;
}

static rebatch_status available(uint64_t *out, void *user)
{
    const struct program *p = user;
    *out = p->capacity - p->live;
    return REBATCH_OK;
}

static uint64_t release(void *user)
{
    struct program *p = user;
    const uint64_t cached = p->cached;
    p->releases++;
    p->cached = 0;
    p->reserved = p->live;
    p->is_whole = true;
    return cached;
}

static const rebatch_step_ops ops =
    OPS(nothing_to_do, forward_backward, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);

static rebatch_meter meter_of(struct program *p)
{
    return (rebatch_meter){.struct_size = sizeof(rebatch_meter),
                           .begin = begin,
                           .read = read_figures,
                           .available = available,
                           .release = release,
                           .user = p,
                           .settled_size = &p->settled_size,
                           .settled = &p->settled};
}

static void program_open(struct program *p, const struct program *looks, bool learns)
{
    *p = *looks;
    p->base_bytes = MIB(2);
    p->sample_bytes = MIB(1);
    const rebatch_meter meter = meter_of(p);
    OK(rebatch_device_open_dry(&p->device, REBATCH_UNLIMITED, 0));
    OK(rebatch_open(&p->rb, p->device,
                    &OPTIONS(.reclaim = REBATCH_OFF, .meter = &meter,
                             .log_level = REBATCH_LOG_QUIET,
                             .learn = learns ? REBATCH_ON : REBATCH_OFF, .grow_after = 4)));
}
/* With other things set. */
#define PROGRAM(...) (&(const struct program){__VA_ARGS__})

CLOSE_BOTH(program)

static rebatch_step_report step(struct program *p, size_t batch)
{
    rebatch_step_report report;
    const rebatch_status status = rebatch_step(p->rb, &ops, batch, p, &report);
    cr_assert_eq(status, REBATCH_OK, "%s: %s", rebatch_status_name(status), rebatch_last_error());
    return report;
}

Test(step_meter, reports_have_its_figures)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(100), .live = MIB(10), .cached = MIB(5)), false);
    const rebatch_step_report report = step(&p, 8);
    cr_expect_eq(report.peak_bytes, MIB(20));
    cr_expect_eq(report.reserved_bytes, MIB(15));
    cr_expect_eq(p.sizes[REBATCH_PHASE_FORWARD], 8);
    cr_expect_eq(p.sizes[REBATCH_PHASE_OPTIMIZER], 0);
}

Test(step_meter, an_oom_is_followed_by_a_smaller_size)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(12), .cached = MIB(3)), false);
    const rebatch_step_report report = step(&p, 16);
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(report.micro, 8);
    cr_expect_eq(p.releases, 1);
    cr_expect_eq(p.updates, 1);
}

/* A request that would fit now is tried once more: memory was in pieces, or somebody else's. */
Test(step_meter, what_fits_after_all_runs_again_at_its_size)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(12), .cached = MIB(1), .hides_request = true), false);
    const rebatch_step_report report = step(&p, 16);
    cr_expect_eq(report.ooms, 2, "%u", report.ooms); /* once more, and then smaller */
    cr_expect_eq(report.micro, 8);
}

Test(step_meter, admission_refuses_what_is_known_not_to_fit)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    (void)step(&p, 16);
    p.live = MIB(30);
    const size_t calls = p.calls;
    const rebatch_step_report report = step(&p, 16);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], report.ooms);
    cr_expect_geq(report.ooms, 1);
    cr_expect_eq(p.calls - calls, report.microbatches);
    cr_expect_eq(report.micro, 8);
}

/* How many OOMs there were in so many steps, and the size at their end. */
static size_t learn_for(struct program *p, size_t steps, size_t *micro)
{
    size_t ooms = 0;
    for (size_t i = 0; i < steps; i++) {
        const rebatch_step_report report = step(p, 64);
        ooms += report.ooms;
        *micro = report.micro;
    }
    return ooms;
}

Test(step_meter, learning_finds_a_size_that_holds_with_few_ooms)
{
    static const struct {
        const char *what;
        struct program looks;
        struct {
            size_t steps, least_ooms, most_ooms, least, most;
            size_t later; /* steps without an OOM after these */
            size_t dirty; /* sizes that are measured with something cached */
        } is;
    } rows[] = {
        {"the largest that fits", {.capacity = MIB(21)}, {6, 0, 0, 19, 19, 0, 0}},
        {"a size that fails is followed by the one that ran",
         {.capacity = MIB(13), .smooth = 8, .cliff_bytes = MIB(4)},
         {1, 1, 1, 8, 8, 2, 0}},
        {"by what is reserved",
         {.capacity = MIB(64), .piece_bytes = MIB(1)},
         {16, 0, 1, 31, 31, 4, 0}},
        /* Each stride comes after a whole step, so an OOM leads back to a size that holds. */
        {"beyond what is reserved until one OOM",
         {.capacity = MIB(64), .piece_bytes = MIB(1), .overstates = true},
         {30, 1, 1, 30, 31, 0, 0}},
        {"not beyond where the allocator returns memory",
         {.capacity = MIB(64), .piece_bytes = MIB(1), .overstates = true, .retries_above = 28},
         {16, 0, 0, 29, 29, 0, 0}},
        {"a size that failed is not grown to again",
         {.capacity = MIB(64), .piece_bytes = MIB(1), .smooth = 24, .cliff_bytes = MIB(40)},
         {12, 0, 12, 1, 64, 24, 1}},
        {"a size that fails far from the last is halved once more",
         {.capacity = MIB(64), .piece_bytes = MIB(1), .smooth = 20, .cliff_bytes = MIB(40)},
         {5, 0, 2, 16, 20, 0, 0}},
        {"without figures it ends with the batch",
         {.capacity = MIB(100), .is_blind = true},
         {2, 0, 0, 64, 64, 0, 0}},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *const what = rows[i].what;
        size_t micro = 0;
        OPEN(program, p, &rows[i].looks, true);
        const size_t ooms = learn_for(&p, rows[i].is.steps, &micro);
        cr_expect(rows[i].is.least_ooms <= ooms && ooms <= rows[i].is.most_ooms, "%s: %zu OOMs",
                  what, ooms);
        cr_expect_eq(p.dirty, rows[i].is.dirty, "%s: %zu measured with a cache", what, p.dirty);
        const size_t releases = p.releases;
        cr_expect_eq(learn_for(&p, rows[i].is.later, &micro), 0, "%s: an OOM later", what);
        cr_expect(rows[i].is.least <= micro && micro <= rows[i].is.most, "%s: %zu", what, micro);
        cr_expect_eq(p.releases, releases, "%s: the cache is emptied again and again", what);
    }
}

Test(step_meter, the_micro_batch_grows_when_there_is_room)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(12)), false);
    (void)step(&p, 32);
    p.capacity = MIB(100);
    rebatch_step_report report = {0};
    for (int i = 0; i < 20; i++)
        report = step(&p, 32);
    cr_expect_eq(report.micro, 32);
}

/* What is there lies in pieces, of which the figures say nothing. */
Test(step_meter, a_size_grows_halfway_to_one_that_failed)
{
    static const size_t sizes[] = {48, 72, 84, 90};
    OPEN(program, p, PROGRAM(.capacity = MIB(100), .smooth = 90, .cliff_bytes = MIB(50)), false);
    cr_expect_eq(step(&p, 96).ooms, 1);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t clean = 0; clean < 4; clean++) {
            cr_expect_eq(rebatch_get_micro(p.rb, 96), sizes[i]);
            cr_expect_eq(step(&p, 96).ooms, 0);
        }
}

/* Whatever it was, it was not the size. */
Test(step_meter, a_size_that_failed_with_much_memory_left_is_tried_again)
{
    OPEN(
        program, p,
        PROGRAM(.capacity = MIB(200), .smooth = 48, .cliff_bytes = MIB(150), .hides_request = true),
        false);
    (void)step(&p, 96);
    cr_expect_eq(rebatch_get_micro(p.rb, 96), 48);
    p.smooth = 0;
    for (size_t clean = 0; clean < 4; clean++)
        cr_expect_eq(step(&p, 96).ooms, 0);
    cr_expect_eq(rebatch_get_micro(p.rb, 96), 96);
}

Test(step_meter, more_memory_than_there_was_is_used_at_once)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(90)), false);
    cr_expect_eq(step(&p, 96).ooms, 1);
    p.capacity = MIB(110);
    for (size_t clean = 0; clean < 4; clean++)
        (void)step(&p, 96);
    cr_expect_eq(rebatch_get_micro(p.rb, 96), 96);
}

static uint64_t two_a_sample(size_t first, size_t count, void *user)
{
    (void)first;
    (void)user;
    return 2 * count;
}

Test(step_meter, by_cost_what_is_not_measured_is_not_learned)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(100), .is_blind = true), true);
    rebatch_step_ops by_cost = ops;
    rebatch_step_report report;
    by_cost.cost = two_a_sample;
    OK(rebatch_step(p.rb, &by_cost, 64, &p, &report));
    cr_expect_eq(report.microbatches, 2);
    OK(rebatch_step(p.rb, &by_cost, 64, &p, &report));
    cr_expect(report.microbatches == 1 && report.cost_after == 0);
}

Test(step_meter, what_is_not_measured_is_not_learned)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40), .is_blind = true), false);
    (void)step(&p, 16);
    p.live = MIB(30);
    const rebatch_step_report report = step(&p, 16);
    cr_expect_eq(report.ooms_in[REBATCH_PHASE_ADMISSION], 0);
    cr_expect_eq(report.micro, 8);
}

/* The micro-batches of a step to which learning has come, after an OOM in step `at` and a step of
 * another batch, which is measured or not. */
static size_t learn_by(size_t at, size_t batch, bool by_cost, bool is_blind)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(42)), true);
    rebatch_step_ops each = ops;
    rebatch_step_report report = {0};
    each.cost = by_cost ? two_a_sample : NULL;
    for (size_t i = 0; i < at + 31; i++) {
        p.hole = i == at ? MIB(5) : 0;
        p.is_blind = is_blind && i == at + 1;
        OK(rebatch_step(p.rb, &each, i == at + 1 ? batch : 93, &p, &report));
    }
    return report.microbatches;
}

Test(step_meter, one_step_without_figures_changes_nothing_later)
{
    static const size_t batches[] = {3, 93, 200};
    for (size_t i = 0; i < sizeof batches / sizeof *batches; i++)
        for (size_t at = 0; at < 12; at++)
            for (int by_cost = 0; by_cost < 2; by_cost++)
                cr_expect_eq(learn_by(at, batches[i], by_cost, true),
                             learn_by(at, batches[i], by_cost, false),
                             "an OOM in step %zu, then %zu samples without figures, by cost: %d",
                             at, batches[i], by_cost);
}

/* Measures all callbacks but the first of the step. */
static rebatch_status forward_then_measured(const rebatch_microbatch *mb, void *user)
{
    struct program *p = user;
    p->is_blind = mb->first == 0;
    return forward_backward(mb, user);
}

Test(step_meter, a_step_that_is_measured_in_part_has_no_peak)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(16), .live = MIB(1)), false);
    cr_expect_eq(step(&p, 8).peak_bytes, MIB(11));
    rebatch_step_ops in_part = ops;
    in_part.forward_backward = forward_then_measured;
    for (size_t batch = 8; batch <= 24; batch += 16) { /* one micro-batch, and several */
        rebatch_step_report report;
        OK(rebatch_step(p.rb, &in_part, batch, &p, &report));
        cr_expect_eq(report.peak_bytes, 0, "%zu samples", batch);
    }
    p.is_blind = false;
    cr_expect_gt(step(&p, 8).peak_bytes, MIB(3));
}

static rebatch_status reserve_too_much(void *user)
{
    struct program *p = user;
    return rebatch_reserve(p->rb, (size_t)MIB(50));
}

Test(step_meter, reserve_goes_by_what_is_available)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    rebatch_step_ops greedy = ops;
    greedy.optimizer_step = reserve_too_much;
    cr_expect_eq(rebatch_step(p.rb, &greedy, 8, &p, NULL), REBATCH_E_EXHAUSTED);
    p.capacity = MIB(60);
    cr_expect_eq(rebatch_step(p.rb, &greedy, 8, &p, NULL), REBATCH_OK);
}

Test(step_meter, memory_that_grows_is_noticed)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    for (int i = 0; i < 6; i++) {
        (void)step(&p, 8);
        p.live += MIB(1);
    }
    p.capacity = p.live + MIB(1);
    FAILS(rebatch_step(p.rb, &ops, 8, &p, NULL), REBATCH_E_EXHAUSTED, "left more memory allocated");
}

/* The limit is the other allocator's to name. */
Test(step_meter, exhausted_says_what_was_in_use_before_the_step)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40), .live = MIB(30)), false);
    rebatch_step_ops greedy = ops;
    greedy.optimizer_step = reserve_too_much;
    FAILS(rebatch_step(p.rb, &greedy, 8, &p, NULL), REBATCH_E_EXHAUSTED,
          " available; 30.0 MiB were in use before the step; ");
}

/* Memory in pieces: the figures say that the size fits, and each step finds that it does not. */
Test(step_meter, a_size_that_needs_once_more_in_each_step_is_given_up)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40), .hole = MIB(10)), false);
    rebatch_step_report report = {0};
    for (int i = 0; i < 4; i++)
        report = step(&p, 16);
    cr_expect_eq(report.micro, 8, "%zu", report.micro);
    cr_expect_eq(step(&p, 16).ooms, 0);
}

/* Two in a step are enough: the micro-batches that are left run at a size that holds. */
Test(step_meter, a_size_that_needs_once_more_in_each_micro_batch_is_given_up_within_the_step)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40), .hole = MIB(10)), false);
    (void)step(&p, 16);
    const rebatch_step_report report = step(&p, 128);
    /* Of 128 and 64; of 32 twice once more, and then given up; of 16, too. */
    cr_expect_eq(report.ooms, 2 + 3 + 1, "%u", report.ooms);
    cr_expect_eq(report.micro_after, 8, "%zu", report.micro_after);
    cr_expect_eq(step(&p, 16).ooms, 0);
}

/* First the one before it, which ran as well, and then a little less than that. */
Test(step_meter, a_learned_size_that_fails_later_becomes_a_little_smaller)
{
    size_t micro;
    OPEN(program, p, PROGRAM(.capacity = MIB(21)), true);
    (void)learn_for(&p, 12, &micro);
    cr_expect_eq(micro, 19, "%zu", micro);
    p.hole = MIB(15);
    (void)learn_for(&p, 3, &micro);
    cr_expect_eq(micro, 15, "%zu", micro);
}

/* Within it an OOM would tear the parameters. */
Test(step_meter, an_update_whose_memory_is_gone_does_not_begin)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40), .update_bytes = MIB(20)), false);
    (void)step(&p, 8);
    p.capacity = MIB(15);
    cr_expect_eq(rebatch_step(p.rb, &ops, 8, &p, NULL), REBATCH_E_EXHAUSTED, "%s",
                 rebatch_last_error());
    cr_expect_eq(p.updates, 1);
    p.capacity = MIB(40);
    (void)step(&p, 8);
    cr_expect_eq(p.updates, 2);
}

Test(step_meter, what_is_settled_is_neither_begun_nor_read)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(100), .live = MIB(10), .cached = MIB(5)), false);
    (void)step(&p, 8);
    const size_t begins = p.begins, reads = p.reads;
    cr_expect_eq(begins, 3);
    p.settled = (rebatch_meter_reading){.live_bytes = MIB(10), .reserved_bytes = MIB(17)};
    for (p.settled_size = 8;; p.settled_size = SIZE_MAX) {
        const rebatch_step_report report = step(&p, 8);
        cr_expect_eq(report.peak_bytes, 0);
        cr_expect_eq(report.reserved_bytes, MIB(17));
        if (p.settled_size == SIZE_MAX)
            break;
    }
    cr_expect(p.begins == begins && p.reads == reads, "%zu, %zu", p.begins, p.reads);
    p.settled_size = 16;
    (void)step(&p, 8);
    cr_expect_eq(p.begins, begins + 1, "another size is begun");
    cr_expect_eq(p.sizes[REBATCH_PHASE_FORWARD], 8);
    cr_expect_eq(p.reads, reads + 2);
}

static rebatch_status fails_and_unsettles(const rebatch_microbatch *mb, void *user)
{
    struct program *p = user;
    const rebatch_status status = forward_backward(mb, user);
    if (status)
        p->settled_size = 0;
    return status;
}

/* What failed is read, if the program says so before it returns. */
Test(step_meter, an_oom_ends_what_is_settled)
{
    static const rebatch_step_ops unsettling =
        OPS(nothing_to_do, fails_and_unsettles, optimizer_step, .flags = REBATCH_DECLARES_MUTATION);
    OPEN(program, p, PROGRAM(.capacity = MIB(12), .settled_size = 16), false);
    rebatch_step_report report;
    OK(rebatch_step(p.rb, &unsettling, 16, &p, &report));
    cr_expect_eq(report.ooms, 1);
    cr_expect_eq(report.micro, 8);
    cr_expect_eq(report.peak_bytes, 0); /* not of a part of the step */
    cr_expect_gt(p.reads, 0);
    cr_expect_eq(p.sizes[REBATCH_PHASE_FORWARD], 8);
}

Test(step_meter, a_probe_is_refused)
{
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    FAILS(rebatch_probe(p.rb, &ops, 8, &p, NULL, NULL), REBATCH_E_UNSUPPORTED, "has a meter");
}

Test(step_meter, a_wrong_meter_is_refused)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch *rb;
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    rebatch_meter meter = meter_of(&p);
    options.meter = &meter;
    FAILS(rebatch_open(&rb, p.device, &options), REBATCH_E_INVALID, "reclaim is on");
    options.reclaim = REBATCH_OFF;
    meter.read = NULL;
    FAILS(rebatch_open(&rb, p.device, &options), REBATCH_E_INVALID, "meter->read is NULL");
    meter = (rebatch_meter)REBATCH_METER_INIT;
    meter.struct_size = 8;
    FAILS(rebatch_open(&rb, p.device, &options), REBATCH_E_INVALID, "struct_size is 8");
}

/* Of a program that was built before the table had that function: what is behind it is not read. */
Test(step_meter, a_table_without_its_last_function_is_taken)
{
    rebatch_options options = REBATCH_OPTIONS_INIT;
    rebatch *rb;
    OPEN(program, p, PROGRAM(.capacity = MIB(40)), false);
    rebatch_meter meter = meter_of(&p);
    meter.struct_size = offsetof(rebatch_meter, outside);
    meter.outside = NULL;
    options.meter = &meter;
    options.reclaim = REBATCH_OFF;
    OK(rebatch_open(&rb, p.device, &options));
    rebatch_close(rb);
}
