"""Each token is kept once, each sampled token is trained on once, in its exact context."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.adapter import TokenGraph, TokenNode, merge_triplets
from leyden.gateway.prefixes import Prefixes
from leyden.types import Triplet, TripletPrompt, TripletResponse


def call(prompt: list[int], response: list[int], *, version: int = 0, mask: list[int] | None = None) -> Triplet:
    return Triplet(
        prompt=TripletPrompt(token_ids=prompt),
        response=TripletResponse(
            token_ids=response,
            logprobs=[-(token + number / 8) for number, token in enumerate(response)],
            policy_versions=[version] * len(response),
            loss_mask=mask,
        ),
        reward=float(version),
    )


def graph_of(*calls: Triplet) -> TokenGraph:
    graph = TokenGraph()
    for one in calls:
        graph.add(one)
    return graph


def own(graph: TokenGraph) -> list[list[int]]:
    return [node.token_ids for node in graph.nodes()]


def test_a_conversation_keeps_only_what_each_turn_added():
    graph = TokenGraph()
    assert graph.add(call([1, 2], [3])) == 0
    assert graph.add(call([1, 2, 3, 4], [5])) == 3
    assert graph.add(call([1, 2, 3, 4, 5], [6])) == 5, "nothing was observed in between"
    assert own(graph) == [[1, 2], [3], [4], [5], [6]]
    (trajectory,) = graph.trajectories(reward=1.0)
    assert trajectory.token_ids == [1, 2, 3, 4, 5, 6]
    assert trajectory.loss_mask == [0, 0, 1, 0, 1, 1]
    assert trajectory.call_spans == [(2, 3), (4, 5), (5, 6)]
    assert trajectory.reward == 1.0


def test_branches_share_what_they_have_in_common_and_train_it_once():
    graph = graph_of(
        call([1], [2, 3], version=1), call([1, 2, 3, 4], [5], version=2), call([1, 2, 3, 6], [7], version=3)
    )
    assert own(graph) == [[1], [2, 3], [4], [5], [6], [7]]
    first, second = graph.trajectories()
    assert (first.token_ids, first.loss_mask) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    assert (second.token_ids, second.loss_mask) == ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1])
    assert (first.call_rewards, second.call_rewards) == ([1.0, 2.0], [3.0])
    assert (first.policy_versions, second.policy_versions) == ((1, 2), (3, 3))
    assert second.logprobs == [0, 0, 0, 0, -7]


def test_a_context_rewritten_within_an_answer_splits_it_and_trains_it_whole():
    graph = graph_of(call([1], [2, 3, 4]), call([1, 2, 3, 9], [8]), call([1, 2, 3, 4, 5], [6]))
    assert own(graph) == [[1], [2, 3], [4], [5], [6], [9], [8]]
    first, second = graph.trajectories()
    assert (first.token_ids, first.loss_mask) == ([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 0, 1])
    assert first.call_spans == [(1, 4), (5, 6)], "one call, though it is two nodes"
    assert (second.token_ids, second.loss_mask) == ([1, 2, 3, 9, 8], [0, 0, 0, 0, 1])


def test_equal_samples_of_one_prompt_are_both_trained_on():
    graph = graph_of(call([1], [2]), call([1], [2]), call([1, 2, 3], [4]))
    assert [one.token_ids for one in graph.trajectories()] == [[1, 2], [1, 2, 3, 4]]
    assert sum(one.n_trained for one in graph.trajectories()) == 3


def test_a_conversation_goes_on_at_its_end_and_not_where_an_equal_one_branched():
    graph = graph_of(call([1], [2]), call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6]))
    assert len(graph.trajectories()) == 2


def test_tokens_that_were_not_sampled_stay_untrained_when_their_node_is_split():
    graph = graph_of(call([1], [2, 3, 4], mask=[1, 0, 1]), call([1, 2, 3, 9], [8]))
    first, _ = graph.trajectories()
    assert (first.loss_mask, first.logprobs) == ([0, 1, 0, 1], [0, -2, 0, -4.25])


def test_how_much_of_a_prompt_is_known_can_be_asked_without_adding_it():
    graph = graph_of(call([1, 2, 3], [4, 5]))
    known = [graph.known(prompt) for prompt in ([], [9], [1], [1, 2, 3], [1, 2, 9], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])]
    assert known == [0, 0, 1, 3, 2, 4, 5]
    assert own(graph) == [[1, 2, 3], [4, 5]]


def named(
    number: int, calls: list[tuple[list[int], list[int]]], goes_on_from: object = None, known_prefix: object = None
) -> Triplet:
    """Call `number` of several, with its claim of which call its prompt goes on from, and for how many ids."""
    metadata = {"span_id": str(number), "goes_on_from": goes_on_from, "known_prefix": known_prefix}
    return call(*calls[number], version=number).model_copy(update={"metadata": metadata})


def shape(graph: TokenGraph) -> list[object]:
    """Everything that a graph holds, with each node's place among its parent's children."""
    numbers = {id(node): number for number, node in enumerate(graph.nodes())}
    nodes = [
        (numbers.get(id(node.parent)), node.token_ids, node.loss_mask, node.logprobs, node.call)
        for node in graph.nodes()
    ]
    return [nodes, graph.trajectories(reward=1.0)]


def test_a_call_that_names_the_one_it_goes_on_from_is_not_looked_for_from_the_root(monkeypatch: pytest.MonkeyPatch):
    starts: list[int] = []
    longest = TokenGraph._longest

    def watched(graph: TokenGraph, prompt_ids: list[int], start: TokenNode, depth: int) -> tuple[TokenNode, int, int]:
        starts.append(depth)
        return longest(graph, prompt_ids, start, depth)

    monkeypatch.setattr(TokenGraph, "_longest", watched)
    calls = [([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 9], [8]), ([1], [2])]
    claims = [(None, None), ("0", 3), ("1", 6), ("1", 5), ("0", 1)]
    graph = graph_of(*(named(number, calls, *claim) for number, claim in enumerate(claims)))
    assert starts == [0, 3, 6, 4, 0], "the last whole node before the place"
    assert own(graph) == [[1], [2], [3], [4], [5], [6], [7], [9], [8], [2]]
    graph.add(named(0, [([1, 2, 3, 5], [1])], "0", 3))
    assert starts[-1] == 0, "equal ids are on two paths by now"


@pytest.mark.parametrize("twin", ["0", "1"])
def test_a_claim_does_not_choose_between_equal_samples(twin: str):
    calls = [([1], [2]), ([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6])]
    claims = [(None, None), ("0", 1), (twin, 2), (twin, 2)]
    claiming = graph_of(*(named(number, calls, *claim) for number, claim in enumerate(claims)))
    assert shape(claiming) == shape(graph_of(*(named(number, calls) for number in range(4))))


tokens = st.integers(0, 2)
any_calls = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, min_size=1, max_size=4)), max_size=10
)


@st.composite
def conversations(draw: st.DrawFn, distinct: bool = False) -> list[tuple[list[int], list[int]]]:
    """Calls most of which go on from, or branch off, what was said before. distinct: no two responses have an id in common."""
    calls: list[tuple[list[int], list[int]]] = []
    for prompt, response in draw(any_calls):
        if calls and draw(st.booleans()):
            asked, answered = draw(st.sampled_from(calls))
            before = asked + answered
            prompt = before[: draw(st.integers(1, len(before)))] + prompt
        if distinct:
            response = [3 * len(calls) + 3 + token for token in response]
        calls.append((prompt, response))
    return calls


@given(conversations())
@settings(max_examples=60)
def test_each_sampled_token_is_trained_once_in_its_exact_context(calls: list[tuple[list[int], list[int]]]):
    """Merged and unmerged give the same (context, token, log-probability), each as often."""
    triplets = [call(prompt, response) for prompt, response in calls]

    def trained(trajectories):  # type: ignore[no-untyped-def]
        return Counter(
            (tuple(one.token_ids[:at]), one.token_ids[at], one.logprobs[at])
            for one in trajectories
            for at, mask in enumerate(one.loss_mask)
            if mask
        )

    merged = merge_triplets(triplets)
    unmerged = [one for triplet in triplets for one in merge_triplets([triplet])]
    assert trained(merged) == trained(unmerged)
    assert sum(trained(merged).values()) == sum(len(response) for _, response in calls)
    spans = [(tuple(one.token_ids[:a]), tuple(one.token_ids[a:b])) for one in merged for a, b in one.call_spans]
    assert sorted(spans) == sorted((tuple(prompt), tuple(response)) for prompt, response in calls)
    assert all(lp == 0 for one in merged for lp, mask in zip(one.logprobs, one.loss_mask, strict=True) if not mask)


@given(conversations(), st.lists(tokens, max_size=8))
@settings(max_examples=60)
def test_what_is_known_of_a_prompt_is_the_longest_beginning_of_anything_said(
    calls: list[tuple[list[int], list[int]]], prompt: list[int]
):
    graph = graph_of(*(call(*one) for one in calls))
    said = [given + response for given, response in calls]
    longest = max(
        (n for one in said for n in range(len(one) + 1) if one[:n] == prompt[:n] and n <= len(prompt)), default=0
    )
    assert graph.known(prompt) == longest


@given(conversations())
@settings(max_examples=60)
def test_a_prompts_token_is_stored_once_for_each_context(calls: list[tuple[list[int], list[int]]]):
    """What is kept is what is new: the beginnings that no earlier call had, and each response."""
    graph = graph_of(*(call(*one) for one in calls))
    said: set[tuple[int, ...]] = set()
    new = 0
    for prompt, response in calls:
        beginnings = {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
        new += len(beginnings - said) + len(response)
        said |= beginnings | {tuple(prompt + response[:n]) for n in range(1, len(response) + 1)}
    assert sum(len(node.token_ids) for node in graph.nodes()) == new


@given(conversations() | conversations(distinct=True))
@settings(max_examples=150)
def test_the_graph_from_what_the_gateway_found_is_the_graph_from_searching(calls: list[tuple[list[int], list[int]]]):
    prefixes, found = Prefixes(), []
    for number, (prompt, response) in enumerate(calls):
        known, earlier = prefixes.add(("ro", "at"), str(number), prompt, response)
        found.append(named(number, calls, earlier, known))
    searched = [named(number, calls) for number in range(len(calls))]
    assert shape(graph_of(*found)) == shape(graph_of(*searched))


@given(conversations() | conversations(distinct=True), st.data())
@settings(max_examples=150)
def test_no_claim_changes_the_graph(calls: list[tuple[list[int], list[int]]], data: st.DataObject):
    """Claims name any call, also itself, later ones and nobody, and any length, often nearly the right one."""
    claiming: list[Triplet] = []
    for number, (prompt, _) in enumerate(calls):
        name = data.draw(st.integers(0, len(calls)))
        said = calls[name][0] + calls[name][1] if name < len(calls) else []
        agreed = next((n for n in range(len(said)) if said[n : n + 1] != prompt[n : n + 1]), len(said))
        near = st.sampled_from([agreed, agreed + 1, agreed - 1])
        length = data.draw(near | near | st.integers(-2, 30) | st.sampled_from([None, "1", 1.0, True]))
        claiming.append(named(number, calls, data.draw(st.sampled_from([str(name)] * 5 + [name, None])), length))
    left_out = data.draw(st.sets(st.integers(0, 10)))
    kept = [number for number in range(len(calls)) if number not in left_out]
    searched = [named(number, calls) for number in kept]
    assert shape(graph_of(*(claiming[number] for number in kept))) == shape(graph_of(*searched))
