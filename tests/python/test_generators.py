"""The states of random generators at the points of a step."""

from rebatch._library import GuardPoint
from rebatch.torch.undo.generators import Generators


def test_a_batch_that_begins_again_after_two_failures_has_drawn_nothing(recwarn):
    """The state of an attempt that begins again is compared with its own."""
    generators = Generators(())
    for _ in range(5):
        for point in (GuardPoint.STEP, GuardPoint.ATTEMPT):
            generators.save(point)
        generators.succeeded()
    generators.save(GuardPoint.STEP)
    for failed in (GuardPoint.ATTEMPT, GuardPoint.ATTEMPT, GuardPoint.STEP):
        generators.save(GuardPoint.ATTEMPT)
        generators.restore(failed)
    generators.save(GuardPoint.ATTEMPT)
    generators.succeeded()
    assert not recwarn
