"""Transcripts of coding agents with the role of each call written down by hand, and agents whose rows must stay."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from leyden.adapter import (
    LlmProxyTraceToTriplet,
    TraceToMessages,
    TraceToTrajectory,
    TraceToTriplet,
    call_roles,
    count_roles,
)
from leyden.adapter.calls import model_calls
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts, RolloutReader
from leyden.errors import ConfigError
from leyden.types import Span, SpanStatus, TokenRecord, semconv
from tests.adapter.traces import reward, span

SYSTEM = {"role": "system", "content": "You are a coding agent."}
TASK = {"role": "user", "content": "Fix the failing test in parser.py"}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {}}}
SEND = {"type": "function", "function": {"name": "task", "parameters": {}}}
TITLE = {"role": "system", "content": "You are a title generator. Answer with a short title for the conversation."}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(name: str, id: str = "c1", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]}


def result(text: str, id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def trained(adapter: TraceToTrajectory, spans: list[Span]) -> list[int]:
    """The ids that are trained on, each as often as it is."""
    rows = adapter.adapt(spans)
    return sorted(id for row in rows for id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)


class Transcript:
    """An attempt's calls, each with its role written down."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.truth: list[str] = []

    def call(
        self,
        role: str,
        asked: list[Any],
        answered: Any,
        tools: Any = (BASH, SEND),
        *,
        during: float | None = None,
        failed: bool = False,
        **more: Any,
    ) -> None:
        number = len(self.spans)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps(asked),
            "gen_ai.output.messages": json.dumps([answered]),
            semconv.CALL_INDEX: number,
            **more,
        }
        if tools:
            attributes["gen_ai.tool.definitions"] = json.dumps(tools)
        tokens = TokenRecord(prompt_ids=[1, number], response_ids=[100 + number], logprobs=[-1.0])
        start = float(number) if during is None else during
        status = SpanStatus(status_code="ERROR" if failed else "OK")
        made = span(semconv.MODEL_CALL, start, start + 0.5, id=number + 1, tokens=tokens, **attributes)
        self.spans.append(made.model_copy(update={"status": status}))
        self.truth.append(role)

    def check(self) -> None:
        views = model_calls(self.spans)
        found = call_roles(views, self.spans)
        assert [each.role for each in found] == self.truth
        kept = [100 + n for n, role in enumerate(self.truth) if role == "agent"]
        for adapter in (TraceToTriplet(), LlmProxyTraceToTriplet()):
            assert [each.response.token_ids[0] for each in adapter.adapt(self.spans)] == kept
        assert trained(TraceToTrajectory(), self.spans) == kept
        assert len(TraceToMessages().every_answer(self.spans)) == len(kept)


def test_a_title_call_is_auxiliary_before_beside_and_after_the_agents_first_call() -> None:
    for place in (0, 1, 2):
        attempt = Transcript()
        turns: list[tuple[str, list[Any], Any, Any]] = [
            ("agent", [SYSTEM, TASK], calls("bash", command="ls"), (BASH,)),
            ("agent", [SYSTEM, TASK, calls("bash", command="ls"), result("parser.py")], said("Done."), (BASH,)),
        ]
        turns.insert(place, ("auxiliary", [TITLE, TASK], said("Fixing the parser test"), None))
        for role, asked, answered, tools in turns:
            attempt.call(role, asked, answered, tools)
        attempt.check()


@pytest.mark.parametrize(
    "instructions",
    [
        "Summarize this coding conversation in under 50 characters.",
        "Analyze if this message indicates a new conversation topic. Answer with JSON.",
        "Generate a concise, descriptive name for the session.",
        "Write a branch name for this change.",
        "You will generate a short title based on the first message a user begins a conversation with",
        "You are coming up with a succinct title for a coding session based on the provided description.",
        "Please reply with a title for the chat that is 3-4 words in length.",
        "Generate a short, descriptive title (3-7 words) for a conversation that starts with the following exchange.",
    ],
)
def test_a_summary_a_topic_and_a_name_are_auxiliary(instructions: str) -> None:
    attempt = Transcript()
    attempt.call("auxiliary", [{"role": "system", "content": instructions}, TASK], said("parser"), None)
    attempt.call("agent", [SYSTEM, TASK], said("Done."))
    attempt.check()


def test_a_program_may_name_its_auxiliary_calls_and_any_call_its_role() -> None:
    attempt = Transcript()
    odd = {"role": "system", "content": "Rate the risk of this request from 1 to 9."}
    attempt.call("auxiliary", [odd, TASK], said("3"), None)
    attempt.call("agent", [SYSTEM, TASK], said("Done."))
    attempt.call("subagent", [SYSTEM, {"role": "user", "content": "more"}], said("Yes."), **{semconv.ROLE: "subagent"})
    attempt.spans.append(span(semconv.PROCESS, 0.0, 9.0, id=90, **{semconv.AUXILIARY: ["^Rate the risk"]}))
    attempt.check()


def test_a_subagent_is_known_by_what_it_was_asked_and_whom_it_answered() -> None:
    attempt = Transcript()
    ask = calls("task", prompt="Find where tokens are split in parser.py")
    helper = [
        {"role": "system", "content": "You are a search agent."},
        {"role": "user", "content": "Find where tokens are split in parser.py"},
    ]
    attempt.call("agent", [SYSTEM, TASK], ask)
    attempt.call("subagent", helper, calls("bash", command="grep split parser.py"))
    attempt.call(
        "subagent",
        [*helper, calls("bash", command="grep split parser.py"), result("12: split")],
        said("They are split in line 12 of parser.py."),
    )
    attempt.call("agent", [SYSTEM, TASK, ask, result("They are split in line 12 of parser.py.")], said("Done."))
    attempt.check()
    found = call_roles(model_calls(attempt.spans), attempt.spans)
    assert found[1].parent == found[2].parent == attempt.spans[0].span_id
    both = TraceToTriplet(roles=["agent", "subagent"]).adapt(attempt.spans)
    assert len(both) == 4


def test_a_reward_after_the_last_call_is_the_agents_and_one_that_names_a_call_is_no_others() -> None:
    attempt = Transcript()
    attempt.call("agent", [SYSTEM, TASK], calls("bash", command="ls"))
    attempt.call("agent", [SYSTEM, TASK, calls("bash", command="ls"), result("x")], said("It is done."))
    attempt.call("auxiliary", [TITLE, TASK], said("Fix parser"), None)
    title = {"leyden.link.0.key_match": "span_id", "leyden.link.0.value_match": attempt.spans[2].span_id}
    spans = [*attempt.spans, reward(0.25, 8, id=50, **title), reward(1.0, 9, id=51)]
    for adapter in (TraceToTriplet(), LlmProxyTraceToTriplet()):
        assert [each.reward for each in adapter.adapt(spans)] == [None, 1.0]
    every = TraceToTriplet(roles=["agent", "auxiliary"]).adapt(spans)
    assert [each.reward for each in every] == [None, 1.0, 0.25]


def test_an_agent_that_is_chosen_by_its_name_is_trained_though_it_is_another_ones_tool() -> None:
    attempt = Transcript()
    ask = calls("task", prompt="Find where tokens are split")
    helper = [{"role": "system", "content": "You search."}, {"role": "user", "content": "Find where tokens are split"}]
    attempt.call("agent", [SYSTEM, TASK], ask)
    attempt.call("subagent", helper, said("In line 12 of parser.py."), **{"gen_ai.agent.name": "searcher"})
    attempt.call("agent", [SYSTEM, TASK, ask, result("In line 12 of parser.py.")], said("Done."))
    attempt.check()
    assert [each.response.token_ids for each in TraceToTriplet(agent_match="searcher").adapt(attempt.spans)] == [[101]]
    assert trained(TraceToTrajectory(agent_match="searcher"), attempt.spans) == [101]
    assert len(TraceToMessages("searcher").every_answer(attempt.spans)) == 1
    assert TraceToTriplet(agent_match="searcher", roles=["agent"]).adapt(attempt.spans) == []
    for adapter, rows, told in (
        (TraceToTriplet(roles=["agent", "subagent"]), 1, ""),
        (TraceToTriplet(), 0, "subagents need"),
    ):
        counts = RolloutCounts()
        reader = RolloutReader(adapter, None, None, re.compile("searcher"))
        assert len(reader.trajectories(attempt.spans, counts)) == rows
        assert told in "".join(counts.refused_calls)


def test_subagents_of_subagents_and_two_beside_each_other() -> None:
    attempt = Transcript()

    def tell(text: str) -> list[Any]:
        return [{"role": "system", "content": "You are a helper."}, {"role": "user", "content": text}]

    def ask(id: str, text: str) -> dict[str, Any]:
        return calls("task", id, prompt=text)

    left, right, deep = "Read the left half of it", "Read the right half of it", "Count the lines of the file"
    two = {**ask("l", left), "tool_calls": [*ask("l", left)["tool_calls"], *ask("r", right)["tool_calls"]]}
    attempt.call("agent", [SYSTEM, TASK], two)
    attempt.call("subagent", tell(left), ask("d", deep))
    attempt.call("subagent", tell(right), said("The right half is fine."))
    attempt.call("subagent", tell(deep), said("It has 4711 lines."))
    attempt.call(
        "subagent", [*tell(left), ask("d", deep), result("It has 4711 lines.", "d")], said("The left half is long.")
    )
    answers = [result("The left half is long.", "l"), result("The right half is fine.", "r")]
    attempt.call("agent", [SYSTEM, TASK, two, *answers], said("Done."))
    attempt.check()
    parents = [each.parent for each in call_roles(model_calls(attempt.spans), attempt.spans)]
    ids = [each.span_id for each in attempt.spans]
    assert parents == [None, ids[0], ids[0], ids[1], ids[0], None]


def test_a_call_that_was_sent_again_is_discarded_and_so_is_one_that_failed() -> None:
    attempt = Transcript()
    attempt.call("discarded", [SYSTEM, TASK], said(""), failed=True)
    attempt.call("discarded", [SYSTEM, TASK], said("I will look into it at once."))
    attempt.call("agent", [SYSTEM, TASK], calls("bash", command="ls"))
    attempt.call("agent", [SYSTEM, TASK, calls("bash", command="ls"), result("x")], said("Done."))
    attempt.check()


SUMMARY = "The user wants the failing test in parser.py fixed. Line 12 splits wrongly; the fix is half done."


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_compaction_is_an_edge_from_the_turns_to_the_summary_and_to_the_new_context(tags: bool, as_text: bool) -> None:
    attempt = Transcript()
    turn = [calls("bash", command="ls"), result("parser.py and a long listing of files")]
    first = calls("bash", command="cat parser.py")
    answer = said(f"<analysis>Hm.</analysis>\n<summary>\n{SUMMARY}\n</summary>" if tags else SUMMARY)
    please = {"role": "user", "content": "Summarize the conversation so far."}
    whole = {
        "role": "user",
        "content": f"Summarize the conversation:\n{json.dumps(TASK)}\nparser.py\nI look at the listing first.",
    }
    attempt.call("agent", [SYSTEM, TASK], turn[0])
    attempt.call("agent", [SYSTEM, TASK, *turn], {**first, "content": "I look at the listing first."})
    if as_text:
        attempt.call("compaction", [{"role": "system", "content": "You summarize."}, whole], answer, None)
    else:
        attempt.call(
            "compaction",
            [SYSTEM, TASK, *turn, {**first, "content": "I look at the listing first."}, result("code"), please],
            answer,
        )
    new = [SYSTEM, {"role": "user", "content": f"This session continues an earlier one:\n{SUMMARY}"}]
    attempt.call("agent", new, calls("bash", command="sed"))
    attempt.call("agent", [*new, calls("bash", command="sed"), result("ok")], said("Done."))
    attempt.check()
    found = call_roles(model_calls(attempt.spans), attempt.spans)
    assert found[2].parent == attempt.spans[1].span_id
    assert trained(TraceToTrajectory(roles=["agent", "compaction"]), attempt.spans) == [100, 101, 102, 103, 104]


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("n_kept", [1, 2, 4])
def test_a_compaction_may_keep_the_first_messages_and_have_seen_subagents(role: str, n_kept: int) -> None:
    attempt = Transcript()
    sends = calls("task", prompt="SUB: count the lines of parser.py")
    history: list[dict[str, Any]] = [SYSTEM, TASK]
    for asked, got in (
        (calls("bash", command="ls parser.py"), result("parser.py")),
        (sends, result("It has 12 lines.")),
    ):
        attempt.call("agent", list(history), asked)
        if asked is sends:
            sub = [
                {"role": "system", "content": "You count."},
                {"role": "user", "content": "SUB: count the lines of parser.py"},
            ]
            attempt.call("subagent", sub, said("It has 12 lines."))
        history += [asked, got]
    reads = [calls("bash", command="cat parser.py"), result("x" * 100)]
    attempt.call("agent", list(history), reads[0])
    text = "Summarize the conversation below:\nls parser.py\nSUB: count the lines of parser.py\nIt has 12 lines."
    attempt.call("compaction", [{"role": "user", "content": text}], said(SUMMARY), None)
    kept = [*history[:n_kept], {"role": role, "content": f"Earlier turns, summed up:\n{SUMMARY}"}, *reads]
    attempt.call("agent", kept, said("Done."))
    attempt.check()


def test_a_prompt_that_is_nothing_but_the_agents_own_summary_is_a_compaction() -> None:
    attempt = Transcript()
    turn = [calls("bash", command="ls"), result("parser.py and a long listing of files")]
    please = {"role": "user", "content": "Sum up the conversation: it is your last message before its compaction."}
    attempt.call("agent", [SYSTEM, TASK], turn[0])
    attempt.call("compaction", [SYSTEM, TASK, *turn, please], said(SUMMARY))
    attempt.call("agent", [SYSTEM, said(SUMMARY)], calls("bash", command="sed"))
    attempt.call("agent", [SYSTEM, said(SUMMARY), calls("bash", command="sed"), result("ok")], said("Done."))
    attempt.check()


def test_two_compactions_in_a_row_are_known_though_the_system_prompt_has_the_time_in_it() -> None:
    def system(time: str) -> dict[str, Any]:
        return {"role": "system", "content": f"You are a coding agent. It is {time}."}

    def tagged(text: str) -> dict[str, Any]:
        return said(f"<analysis>Hm.</analysis><summary>{text}</summary>")

    please = {"role": "user", "content": "Fasse zusammen: your task is to create a summary."}
    attempt = Transcript()
    turn = [calls("bash", command="ls"), result("parser.py")]
    attempt.call("agent", [system("9:00"), TASK], turn[0])
    attempt.call("compaction", [system("9:01"), TASK, *turn, please], tagged(SUMMARY))
    once = {"role": "user", "content": f"Continue:\n{SUMMARY}"}
    attempt.call("compaction", [system("9:02"), once, please], tagged(f"Shorter. {SUMMARY[20:]}"))
    attempt.call("agent", [system("9:03"), {"role": "user", "content": f"Shorter. {SUMMARY[20:]}"}], said("Done."))
    attempt.check()


def test_a_title_call_may_have_the_conversation_as_its_messages_or_its_instructions_as_a_users() -> None:
    attempt = Transcript()
    plain = [{"role": "user", "content": "You are a coding agent."}, TASK]
    title = {"role": "user", "content": "Write a 5-word title for the following conversation:\nFix the failing test"}
    attempt.call("agent", [SYSTEM, TASK], said("It is fixed: line 12 was wrong."))
    asked = [TITLE, TASK, said("It is fixed: line 12 was wrong."), {"role": "user", "content": "The title, please."}]
    attempt.call("auxiliary", asked, said("Parser test repaired"), None)
    attempt.call("auxiliary", [title], said("Parser repair"), [])
    attempt.call("agent", plain, said("Nothing else is left to do."))
    attempt.check()


@pytest.mark.parametrize(
    "shown",
    [
        'The file says "a < b".\nNothing else.',
        json.dumps({"output": 'The file says "a < b".\nNothing else.'}),
        "<result>The file says &quot;a &lt; b&quot;.\nNothing else.</result>",
    ],
)
@pytest.mark.parametrize("in_system", [False, True])
def test_a_subagents_answer_may_be_wrapped_and_its_prompt_in_a_template(shown: str, in_system: bool) -> None:
    attempt = Transcript()
    ask = calls("task", prompt="Read what the file says")
    text = "Your task:\nRead what the file says\nAnswer briefly."
    helper = (
        [{"role": "system", "content": text}, {"role": "user", "content": "Begin."}]
        if in_system
        else [{"role": "user", "content": text}]
    )
    attempt.call("agent", [SYSTEM, TASK], ask)
    attempt.call("subagent", helper, said('The file says "a < b".\nNothing else.'))
    attempt.call("agent", [SYSTEM, TASK, ask, result(shown)], said("Done."))
    attempt.check()


@pytest.mark.parametrize("by_tool", [False, True])
def test_a_subagent_may_work_in_the_background_and_answer_with_a_tool_call(by_tool: bool) -> None:
    attempt = Transcript()
    ask, poll = calls("task", prompt="Read what the file says"), calls("task_output", "c2", task=5)
    answer = "The file has 4711 lines."
    attempt.call("agent", [SYSTEM, TASK], ask)
    attempt.call("agent", [SYSTEM, TASK, ask, result("started as 5")], poll)
    helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Read what the file says"}]
    attempt.call("subagent", helper, calls("finish", result=answer) if by_tool else said(answer))
    attempt.call("agent", [SYSTEM, TASK, ask, result("started as 5"), poll, result(answer, "c2")], said("Done."))
    attempt.check()


def test_an_expression_of_the_record_that_is_none_is_left_out() -> None:
    attempt = Transcript()
    attempt.call("agent", [SYSTEM, TASK], said("Done."))
    attempt.spans.append(span("anything", 0.0, 9.0, id=90, **{semconv.AUXILIARY: ["("]}))
    attempt.check()


def test_the_roles_of_300_calls_of_200_messages_take_at_most_four_seconds_of_processor_time() -> None:
    attempt = Transcript()
    system = {"role": "system", "content": "You are a coding agent. " * 800}
    for n in range(300):
        task = {"role": "user", "content": f"Task {n}: look at the listing"}
        ask = [calls("task", f"c{k}", prompt=f"Task {n + 1}: look at the listing") for k in range(99)]
        turns = [each for k in range(99) for each in (ask[k], result(f"{n} {k}" + "x" * 500, f"c{k}"))]
        attempt.call("agent", [system, task, *turns], {**ask[0], "content": f"An answer, long enough: {n}" + "y" * 40})
    views = model_calls(attempt.spans)
    begun = time.process_time()
    call_roles(views, attempt.spans)
    assert time.process_time() - begun < 4


# ---- agents whose rows stay ----------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "What is the capital of France, in one word?"}


def ordinary() -> dict[str, Transcript]:
    agents = {
        name: Transcript()
        for name in (
            "debate",
            "parallel",
            "router",
            "critic",
            "planner",
            "writer",
            "best of n",
            "handoff",
            "tools only",
            "topic router",
            "report",
            "query",
            "phases",
            "retrieval",
            "findings",
            "answer of findings",
            "trimmed",
            "extract",
            "two in one chat",
            "committee",
        )
    }
    for text in ("Argue for it.", "Argue against it.", "Summarize the debate."):  # no tools anywhere
        agents["debate"].call("agent", [{"role": "system", "content": text}, USER], said("x"), None)
    for n in range(4):
        agents["parallel"].call("agent", [SYSTEM, USER], said(f"guess {n}"), during=0.0)
    agents["router"].call(
        "agent", [{"role": "system", "content": "Choose maths or history."}, USER], said("maths"), None
    )
    agents["router"].call("agent", [SYSTEM, USER], said("Paris"))
    agents["critic"].call("agent", [SYSTEM, USER], said("Paris"))
    agents["critic"].call(
        "agent",
        [{"role": "system", "content": "Is the answer right? yes or no"}, USER, said("Paris")],
        said("yes"),
        None,
    )
    agents["planner"].call(
        "agent", [{"role": "system", "content": "Write the title of each step."}, USER], said("1. look it up"), None
    )
    agents["planner"].call("agent", [SYSTEM, {"role": "user", "content": "Do: 1. look it up"}], said("Paris"))
    agents["writer"].call("agent", [SYSTEM, USER], said("Paris is the capital"))
    agents["writer"].call(
        "agent",
        [{"role": "system", "content": "Polish."}, {"role": "user", "content": "Paris is the capital"}],
        said("Paris."),
        None,
    )
    for n in range(3):
        agents["best of n"].call("agent", [SYSTEM, USER], said(f"candidate {n}"))
    agents["handoff"].call("agent", [SYSTEM, USER], calls("transfer_to_history"))
    agents["handoff"].call(
        "agent",
        [{"role": "system", "content": "You know history."}, USER, calls("transfer_to_history"), result("ok")],
        said("Paris"),
    )
    agents["tools only"].call("agent", [SYSTEM, USER], calls("bash", command="x"))
    agents["tools only"].call("agent", [SYSTEM, USER, calls("bash", command="x"), result("x")], said("x"))
    agents["topic router"].call(
        "agent",
        [{"role": "system", "content": "Which topic has the question: maths or history?"}, USER],
        said("maths"),
        [],
    )
    agents["topic router"].call("agent", [SYSTEM, USER], said("Paris"))
    article = {"role": "system", "content": "Write a catchy title for an article about chat apps and thread pools."}
    agents["report"].call("agent", [article, USER], said("Chat!"), None)
    agents["report"].call("agent", [SYSTEM, USER], said("Paris is the capital"))
    agents["report"].call(
        "agent",
        [{"role": "system", "content": "Write a summary of the findings, with a title."}, USER],
        said("# Capital\nIt is Paris."),
        None,
    )
    agents["query"].call(
        "agent",
        [{"role": "system", "content": "Summarize the question as a short search query."}, USER],
        said("capital France"),
        None,
    )
    agents["query"].call(
        "agent", [SYSTEM, {"role": "user", "content": f"{USER['content']}\nFound: Paris"}], said("Paris")
    )
    look = [calls("bash", command="ls"), result("atlas")]
    plan = "First open the atlas, then find France, and then read the name of its capital."
    agents["phases"].call("agent", [SYSTEM, USER], look[0])
    agents["phases"].call("agent", [SYSTEM, USER, *look], said(plan))
    agents["phases"].call(
        "agent", [SYSTEM, {"role": "user", "content": f"Carry out this plan:\n{plan}"}], said("Paris")
    )
    search = calls("search", query="the capital of France")
    for n in range(2):
        agents["retrieval"].call(
            "agent", [SYSTEM, USER], search if n == 0 else said("Paris, on the Seine"), during=0.1 * n
        )
    agents["retrieval"].call(
        "agent", [SYSTEM, USER, search, result("Paris, on the Seine, is it.")], said("It is Paris.")
    )
    found = [calls("search", query="the capital of France"), result("Paris, on the Seine")]
    summary = "The capital of France is Paris, which lies on the Seine, as two sources say."
    summarizer = {"role": "system", "content": "You summarize findings. Condense them to one sentence."}
    report = {"role": "user", "content": f"Write the report from this summary:\n{summary}"}
    for name, answer in (
        ("findings", calls("search", query="a second source")),
        ("answer of findings", said("It is Paris, I think.")),
    ):
        whole = f"{USER['content']}\nthe capital of France\na second source\nParis, on the Seine\nIt is Paris, I think."
        agents[name].call("agent", [SYSTEM, USER], found[0])
        agents[name].call("agent", [SYSTEM, USER, *found], answer)
        agents[name].call("agent", [summarizer, {"role": "user", "content": whole}], said(summary), None)
        agents[name].call("agent", [SYSTEM, report], said("Paris."))
    please = {"role": "user", "content": "Summarize the conversation, please."}
    agents["trimmed"].call("agent", [SYSTEM, USER], found[0])
    agents["trimmed"].call("agent", [SYSTEM, USER, *found], said("It is Paris."))
    agents["trimmed"].call("agent", [SYSTEM, USER, *found, said("It is Paris."), please], said(summary))
    agents["trimmed"].call("agent", [SYSTEM, said(summary), {"role": "user", "content": "And Peru?"}], said("Lima."))
    extract = {"role": "system", "content": "Extract the question from the conversation as JSON."}
    agents["extract"].call("agent", [extract, USER], said('{"question": "capital of France"}'), None)
    agents["extract"].call("agent", [SYSTEM, USER], said("Paris"))
    for text in ("What is the capital of Peru, in one word?", "And of Chile, in one word?"):
        agents["two in one chat"].call("agent", [SYSTEM, {"role": "user", "content": text}], said("I look it up."))
    for text in ("the north of the country", "the south of the country"):
        agents["committee"].call("agent", [{"role": "system", "content": f"You speak for {text}."}, USER], said(text))
    votes = {"role": "user", "content": "the north of the country\nthe south of the country"}
    agents["committee"].call("agent", [SYSTEM, votes], said("Paris"))
    return agents


@pytest.mark.parametrize("name", sorted(ordinary()))
def test_an_ordinary_agents_calls_are_all_the_agents(name: str) -> None:
    ordinary()[name].check()


def test_a_doubt_is_counted() -> None:
    attempt = ordinary()["router"]
    assert count_roles(call_roles(model_calls(attempt.spans), attempt.spans)) == {"agent": 2, "doubtful": 1}


def test_a_role_of_the_record_that_is_none_is_a_doubt() -> None:
    attempt = Transcript()
    attempt.call("agent", [SYSTEM, TASK], said("Done."), **{semconv.ROLE: "title"})
    attempt.check()
    (found,) = call_roles(model_calls(attempt.spans), attempt.spans)
    assert found.doubt == "its record says leyden.role='title', which is none"


def test_roles_that_are_none_are_refused() -> None:
    for roles in (["agents"], [], "agent"):
        with pytest.raises(ConfigError, match="give a list of 'agent', 'subagent'"):
            TraceToTriplet(roles=roles)
    with pytest.raises(ConfigError, match="roles"):
        TraceToTrajectory(TraceToTriplet(), roles=["agent"])
    with pytest.raises(ConfigError, match="give a list of"):
        TraceToTrajectory(roles=[])
