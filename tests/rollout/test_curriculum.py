"""Which level is played next (E9). Pure: no environment, no event loop."""

from rollwright.rollout.curriculum import Curriculum
from rollwright.rollout.settings import CurriculumConfig

RULES = CurriculumConfig(levels=3, raise_at=0.7, lower_at=0.2, window=4)


def curriculum() -> Curriculum:
    return Curriculum(RULES, ["bf", "logic"])


def play(book: Curriculum, tag: str, *rewards: float) -> None:
    for reward in rewards:
        book.observe(book.tag(tag), reward)


def test_a_level_is_left_when_its_last_groups_went_well_enough_and_each_tag_for_itself() -> None:
    book = curriculum()
    assert book.tag("bf") == "bf@0"
    play(book, "bf", 0.0, 1.0, 1.0)
    assert book.tag("bf") == "bf@0", "not enough groups yet"
    play(book, "bf", 1.0)
    assert (book.tag("bf"), book.tag("logic")) == ("bf@1", "logic@0")


def test_it_goes_down_again_but_not_below_the_first_nor_above_the_last() -> None:
    book = curriculum()
    play(book, "bf", *[1.0] * 20)
    assert book.tag("bf") == "bf@2"
    play(book, "bf", *[0.0] * 4)
    assert book.tag("bf") == "bf@1"
    play(book, "bf", *[0.0] * 40)
    assert book.tag("bf") == "bf@0"


def test_the_groups_of_another_level_say_nothing_about_this_one() -> None:
    book = curriculum()
    for _ in range(8):
        book.observe("bf@2", 1.0)
        book.observe("other", 1.0)
    assert book.tag("bf") == "bf@0"
    assert book.tag("other") == "other", "a tag without levels is played as it is"


def test_after_a_restart_it_goes_on_where_it_was() -> None:
    book = curriculum()
    play(book, "bf", 1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9)
    other = curriculum()
    other.restore(book.state())
    for each in (book, other):
        play(each, "bf", 0.9)
    assert other.state() == book.state()
    assert other.tag("bf") == "bf@2"
