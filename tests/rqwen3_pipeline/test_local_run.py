import itertools

from hypothesis import given
from hypothesis import strategies as st

from rqwen3_pipeline.local_run import ranges


@given(st.lists(st.booleans(), max_size=30))
def test_ranges_cover_the_wanted_keys_and_no_other(flags):
    order = [f"{index:05d}" for index in range(len(flags))]
    wanted = {key for key, flag in zip(order, flags, strict=True) if flag}
    found = ranges(order, wanted)
    covered = [key for first, last in found for key in order if first <= key <= last]
    assert covered == sorted(wanted)
    for (_, last), (first, _) in itertools.pairwise(found):
        assert order.index(first) > order.index(last) + 1
