import pytest
from hypothesis import given
from hypothesis import strategies as st

from legorl.share import Share


@given(st.lists(st.integers()), st.integers(1, 12))
def test_parts_are_disjoint_and_together_the_list(items: list[int], count: int) -> None:
    places = list(enumerate(items))
    parts = [Share(index, count).of(places) for index in range(1, count + 1)]
    assert sorted(place for part in parts for place in part) == places
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for index, part in enumerate(parts, 1):
        share = Share.parse(f"{index}/{count}")
        assert part == share.of(places) == [place for place in places if share.holds(place[0])]


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1 <= i <= n"):
        Share.parse(text)


def test_a_folder_remembers_its_part_only_if_there_are_several() -> None:
    assert Share().setting is None
    assert Share(2, 8).setting == "2/8"
