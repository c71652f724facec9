/* Owns the tests of what a training answers while it falls asleep on request, and while it wakes.
 * Seeds: none. */
#include "device/device.h"
#include "integration/yield_common.h"

TestSuite(yield_sleep, .init = enter, .fini = leave);

static struct {
    struct rbi_device_ops ops;
    rebatch_status (*copy)(void *self, void *to, const void *from, size_t bytes, rebatch_stream);
    char status[1024], give[512];
} asked;

/* rebatch_ask() itself waits two seconds, which a busy machine may need. */
static rebatch_status ask_and_copy(void *self, void *to, const void *from, size_t bytes,
                                   rebatch_stream stream)
{
    for (int i = 0; i < 30 && !asked.status[0]; i++)
        (void)!rebatch_ask(asked.status, sizeof asked.status, path, "status");
    if (asked.status[0] && !asked.give[0])
        (void)!rebatch_ask(asked.give, sizeof asked.give, path, "give 4MiB");
    return asked.copy(self, to, from, bytes, stream);
}

Test(yield_sleep, a_training_that_falls_asleep_or_wakes_answers)
{
    char text[512];
    OPEN(rig, rig, path);
    asked.ops = *rig.device->ops;
    asked.copy = asked.ops.copy;
    asked.ops.copy = ask_and_copy;
    rig.device->ops = &asked.ops;
    rig_train(&rig);
    ASK(text, "sleep");
    HAS(text, "ok: asleep after ");
    HAS(asked.status, "\"state\": \"asleep\"");
    cr_expect_geq(number_in(asked.status, "held_bytes"), WEIGHTS, "as before");
    cr_expect_str_eq(asked.give, "no: it sleeps: expected wake");
    asked.status[0] = '\0';
    ASK(text, "wake");
    HAS(text, "ok: ");
    HAS(asked.status, "\"state\": \"asleep\"");
    cr_expect_eq(number_in(asked.status, "held_bytes"), 0, "as before");
    wait_for_updates(&rig, 3);
    rig_stop(&rig);
    cr_expect_eq(rig.lost, 0);
}
