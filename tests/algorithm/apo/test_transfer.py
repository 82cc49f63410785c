"""An edit of one prompt is made in another one as a commit is cherry-picked, and never loses a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.algorithm.apo.transfer import transfer_edit

SENTENCES = [f"Sentence {letter}." for letter in "abcdefgh"]


@pytest.mark.parametrize(
    ("before", "after", "target", "found"),
    [
        ("Help. {x}", "Help. {x}\nBe kind.", "Help. {x}\nBe brief.", "Help. {x}\nBe brief.\nBe kind."),
        ("Help. {x}", "Be kind. Help. {x}", "Help. Be brief. {x}", "Be kind. Help. Be brief. {x}"),
        ("Help.\nBe rude.\n\n{x}", "Help.\n\n{x}", "Help.\nBe rude.\n\n{x}\nBe brief.", "Help.\n{x}\nBe brief."),
        ("Help. Be rude. {x}", "Help. Be kind. {x}", "Help. Be rude. Now. {x}", "Help. Be kind. Now. {x}"),
        ("Help.", "Help.\nBe kind.", "Help.\nBe kind.", "Help.\nBe kind."),
        ("Help. {x}", "Help. {x}\nBe kind.", "Entirely different: {x}", "Entirely different: {x}\nBe kind."),
    ],
)
def test_what_an_edit_has_changed_is_changed_in_another_prompt(
    before: str, after: str, target: str, found: str
) -> None:
    assert transfer_edit(before, after, target) == found


def test_two_edits_of_the_same_sentence_do_not_fit() -> None:
    assert transfer_edit("Be rude. {x}", "Be kind. {x}", "Be quick. {x}") is None
    assert transfer_edit("Be rude. Now. {x}", "Be kind. Now. {x}", "Well. {x}") is None


@given(st.sets(st.sampled_from(SENTENCES)), st.sets(st.sampled_from(SENTENCES)), st.sampled_from(["\n", "\n\n"]))
def test_sentences_that_both_have_added_are_there_once_each(one: set[str], other: set[str], between: str) -> None:
    first, second = (between.join(["Help. {x}", *sorted(added)]) for added in (one, other))
    found = transfer_edit("Help. {x}", first, second)
    assert found is not None and found.startswith("Help. {x}")
    assert all(found.count(sentence) == 1 for sentence in one | other)
    assert sum(map(found.count, SENTENCES)) == len(one | other)


@given(st.text(max_size=30), st.text(max_size=30))
def test_an_edit_fits_its_own_prompt_and_no_edit_changes_nothing(before: str, after: str) -> None:
    same = transfer_edit(before, after, before)
    assert same is not None and same.split() == after.split()
    kept = transfer_edit(before, before, after)
    assert kept is not None and kept.split() == after.split()
