"""Reads spans with the adapters of Agent Lightning, and prints what they return.

The tests run it with the original package and under the alias, and compare what it prints.
"""

import json
import logging

import agentlightning as agl
from agentlightning.emitter import get_rewards_from_span

TEXT = {"type": "text", "text": "what is it"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def span(number, name, attributes, parent=1):
    return agl.Span.from_attributes(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=number,
        name=name,
        attributes=attributes,
        span_id=f"{number:016x}",
        trace_id="1" * 32,
        parent_id=None if parent is None else f"{parent:016x}",
        start_time=float(number),
        end_time=number + 0.5,
    )


def call(number, messages, answer, response_id, prompt_ids, response_ids, **options):
    """One model call, under the attributes that AgentOps gives it."""
    attributes = {"gen_ai.request.model": "m", "gen_ai.response.id": response_id, "gen_ai.response.model": "m-1"}
    for place, (role, content) in enumerate(messages):
        attributes |= {f"gen_ai.prompt.{place}.role": role, f"gen_ai.prompt.{place}.content": content}
    attributes |= {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": answer}
    attributes |= {"prompt_token_ids": prompt_ids, "response_token_ids": response_ids}
    return span(number, options.get("name", "openai.chat.completion"), attributes, options.get("parent", 1))


def reward(number, **values):
    """One reward with values by name, the primary one first."""
    attributes = {}
    for place, (name, value) in enumerate(values.items()):
        attributes |= {f"agentlightning.reward.{place}.name": name, f"agentlightning.reward.{place}.value": value}
    return span(number, "agentlightning.annotation", attributes)


ROOT = span(1, "root", {}, parent=None)
FIRST = call(2, [("user", "q1")], "a1", "c1", [1, 2], [3])
TURNS = {
    "two turns": [
        ROOT,
        FIRST,
        call(3, [("user", "q1"), ("assistant", "a1"), ("user", "q2")], "a2", "c2", [1, 2, 3, 4], [5]),
        reward(4, primary=0.5, style=0.25),
    ],
    "an image": [
        ROOT,
        call(2, [("user", json.dumps([TEXT, IMAGE]))], "cat", "c1", [1, 2], [3]),
        reward(3, primary=1.0),
    ],
    "one answer in two spans": [
        ROOT,
        FIRST,
        call(3, [("user", "q1")], "a1", "c1", [1, 2], [3]),
        reward(4, primary=1.0),
    ],
}


def main():
    logging.disable(logging.CRITICAL)
    for title, spans in TURNS.items():
        print("#", title)
        for triplet in agl.TracerTraceToTriplet().adapt(spans):
            prompt, response, metadata = triplet.prompt, triplet.response, triplet.metadata
            shown = [prompt["token_ids"], prompt["raw_content"], prompt["image_urls"], response["token_ids"]]
            shown += [response["raw_content"], metadata["request"], metadata["response"], metadata["response_id"]]
            print(json.dumps([*shown, triplet.reward], sort_keys=True))
        print(agl.find_final_reward(spans), [each.model_dump() for each in get_rewards_from_span(spans[-1])])
    for entry in agl.TraceToMessages().adapt(TURNS["two turns"]):
        print([(message["role"], message["content"]) for message in entry["messages"]], entry["tools"])
    made = agl.emit_reward({"style": 0.25, "primary": 1}, primary_key="primary", propagate=False)
    print(made.name, sorted(made.attributes.items()), isinstance(made, agl.SpanCoreFields), made.status.status_code)
    for values in ({"a": 1.0}, {"primary": "x"}):
        try:
            agl.emit_reward(values, primary_key="primary", propagate=False)
        except ValueError:
            print("ValueError")


if __name__ == "__main__":
    main()
