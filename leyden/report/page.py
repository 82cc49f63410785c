"""The page of a report: `report_data` as one HTML document, with its style sheet and drawings in it.

The page has no script and loads nothing, which its content security policy enforces. Recorded text is never markup
(`leyden.report.html`). To show something more, write a function from data to `Html`, and call it in `_run`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from leyden._lib.formatting import duration, figure, size
from leyden._lib.json import Json
from leyden.report.drawing import advantage_bar, curves, histogram
from leyden.report.html import Html, html, tag
from leyden.training.runs.control import ControlLine, in_words
from leyden.training.runs.folder import REPORT_MARK
from leyden.training.runs.overview import part_of
from leyden.training.runs.run_options import value_text

LIMIT = 1_000_000
"""The most bytes of a page. Parts that would make it larger are left out and counted."""
_ROOM = 5_000
"""Bytes that are kept for what stands around the parts."""
_FIRST = [
    "success",
    "loss",
    "entropy",
    "kl",
    "grad_norm",
    "response_tokens",
    "clip_fraction",
    "flat_groups",
    "failed",
    "total_cost",
]
"""Metrics that are shown before the others."""
_MODES = {"train": "Training", "val": "Validation", "all": "All rollouts"}
_BROKEN = ("failed", "crashed")
_STATES = {"running": "◐", "succeeded": "●", "failed": "✕", "crashed": "✕", "stopped": "■"}


class _Body:
    """The sections of a page, up to its limit."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._left, self.left_out = LIMIT - _ROOM - len(_style().encode()), dict[str, int]()

    def add(self, what: str, part: Html) -> bool:
        """Add a part if there is room for it. Otherwise count it by what it is."""
        n_bytes = len(part.encode())
        fits = n_bytes <= self._left
        if fits:
            self.parts.append(part)
            self._left -= n_bytes
        else:
            self.left_out[what] = self.left_out.get(what, 0) + 1
        return fits

    def section(self, title: str, parts: Iterable[Html], *, what: str = "part") -> None:
        """Add a section with the parts that show something, unless there are none."""
        shown = [part for part in parts if part]
        if shown and self.add("section", Html(f"<section>{tag('h2', title)}")):
            for part in shown:
                self.add(what, part)
            self.parts.append("</section>\n")


@cache
def _style() -> str:
    return Path(__file__).with_name("report.css").read_text(encoding="utf-8")


def page(data: Json) -> str:
    """Return the document of `report_data`, in at most 1 MB."""
    runs: Sequence[Json] = data["runs"]
    body = _Body()
    if data["comparison"] is not None:
        _compare(body, runs, data["comparison"])
    for run in runs:
        _run(body, run)
    if body.left_out:
        counts = ", ".join(f"{count:,} × {what}" for what, count in body.left_out.items())
        body.parts.append(tag("p", f"Left out, because a report has at most 1 MB: {counts}.", class_="missing"))
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = ", ".join(str(run["head"]["name"]) for run in runs)[:200]
    footer = f"Leyden {data['version']}, written {_moment(data['written'])} UTC"
    return (
        f'{REPORT_MARK.decode()}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html(title)} · Leyden</title>\n<style>{_style()}</style>\n<body><main>\n{''.join(body.parts)}"
        f"{tag('footer', footer)}\n</main></body></html>\n"
    )


def _run(body: _Body, run: Json) -> None:
    body.add("head of a run", _opening(run))
    nothing = tag("p", f"The doctor found {'no cause' if run['head']['state'] in _BROKEN else 'nothing wrong'}.")
    body.section("What is wrong", [*map(_finding, run["findings"])] or [nothing], what="finding")
    body.section("Learning", _curves(run["curves"]), what="curve")
    body.section("Rewards and failures", _outcomes(run))
    body.section("One task, rollout by rollout", _group(run["group"]), what="rollout")
    for name, title in (("failed", "Newest failures"), ("best", "Highest rewards"), ("worst", "Lowest rewards")):
        body.section(title, map(_rollout, run["samples"].get(name, [])), what="rollout")
    body.section("Prompts", map(_prompt, run["prompts"]), what="version of a prompt")
    asked = [
        tag("li", f"{_moment(each['time'])} by {each['by']}: {in_words(ControlLine(**each))}")
        for each in run["control"]
    ]
    body.section("Changed while it ran", [tag("ul", asked)] if asked else [])
    body.section("Set-up", _setup(run))


# ---- the head ------------------------------------------------------------------------------------


def _moment(seconds: Any) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if isinstance(seconds, int | float) else "unknown"


def _opening(run: Json) -> Html:
    head, outcomes, state = run["head"], part_of(run, "outcomes"), run["head"]["state"]
    about = [value_text(head[key]).rpartition("/")[2] for key in ("algorithm", "model") if head.get(key)]
    about += [f"{_moment(head['start_time'])} UTC", *head.get("tags", [])]
    facts: list[tuple[str, str, str]] = []
    for name, key in (("Training reward", "reward"), ("Validation reward", "val_reward")):
        of = head.get(key)
        if of is not None and (key == "val_reward" or of != head.get("val_reward")):
            best = f"best {figure(of['best'], 3)} at step {of['best_iteration']:,}" if len(of["values"]) > 1 else ""
            facts.append((name, _course(of), best))
    if head.get("iterations"):
        facts.append(("Steps", f"{head['iterations']:,}", ""))
    if outcomes.get("finished"):
        facts.append(("Rollouts", f"{outcomes['finished']:,}", f"{outcomes['failed']:,} failed"))
    if (tokens := outcomes.get("tokens")) is not None and tokens["mean"]:
        in_all = figure(round(tokens["count"] * tokens["mean"]))
        facts.append(("Tokens", in_all, f"{figure(tokens['mean'], 3)} a rollout"))
    if (cost := outcomes.get("cost")) is not None:
        known = "" if cost["count"] == outcomes["finished"] else f"of {cost['count']:,} rollouts; unknown of others"
        facts.append(("Cost", figure(cost["count"] * cost["mean"], 3), known))
    if "seconds" in head:
        paused = f"{duration(run['paused_seconds'])} of it paused" if run["paused_seconds"] >= 1 else ""
        facts.append(("Time", duration(head["seconds"]), paused))
    return tag(
        "header",
        tag("p", " · ".join(about), class_="eyebrow"),
        tag("h1", head["name"], " ", tag("span", f"{_STATES[state]} {state}", class_=f"state {state}")),
        _headline(run["learned"], run["findings"]),
        tag("p", head["cause"], class_="cause") if head.get("cause") else None,
        [tag("p", note["text"], class_="note") for note in head.get("notes", [])[-3:]],
        tag("dl", [tag("div", tag("dt", name), tag("dd", value), tag("dd", note)) for name, value, note in facts]),
        [tag("p", f"Not shown: {each}", class_="missing") for each in run["left_out"]],
    )


def _course(of: Json) -> str:
    last = figure(of["last"], 3)
    return last if len(of.get("values", (1, 2))) < 2 else f"{figure(of['first'], 3)} → {last}"


def _headline(learned: Json, findings: Sequence[Json]) -> Html:
    """Return whether the reward rose, how sure that is, and what is most wrong."""
    said, proof, found = "No reward was recorded.", None, learned["difference"]
    if learned["basis"] is not None:
        first, last = learned["first"][1], learned["last"][1]
        name = "validation reward" if learned["basis"] == "val" else "training reward"
        best = learned["best"]
        peak = f", after {figure(best[1], 3)} at step {best[0]:,}" if best[1] > max(first, last) else ""
        went = f"{'rose' if last > first else 'fell'} from {figure(first, 3)} to"
        if first == last:
            went, peak = "is", peak or ("" if learned["first"] == learned["last"] else ", as at the start")
        said = f"The {name} {went} {figure(last, 3)}{peak}."
        proof = f"No interval: {learned['reason']}." if learned["reason"] is not None else None
    if found is not None and found["low"] is not None:
        interval = f"95 % interval {figure(found['low'], 3)} to {figure(found['high'], 3)}"
        chance = "" if found["low"] > 0 or found["high"] < 0 else "It may be chance: "
        proof = f"{chance}{found['mean']:+.3g} on the same {found['tasks']:,} tasks ({interval}, {found['method']})."
    worst = next((each["cause"] for each in findings if each["severity"] == "critical"), None)
    trouble = "" if worst is None else f" {worst[:1].upper()}{worst[1:]}."
    return tag("div", tag("p", said, trouble), tag("small", proof) if proof else None, class_="headline")


def _finding(finding: Json) -> Html:
    severity, cause = finding["severity"], finding["cause"]
    return tag(
        "article",
        tag("h3", tag("span", severity), f"{cause[:1].upper()}{cause[1:]}."),
        tag("ul", [tag("li", each) for each in finding["evidence"]]),
        tag("p", [tag("code", part) if n % 2 else part for n, part in enumerate(finding["remedy"].split("`"))]),
        tag("pre", finding["command"]) if finding["command"] else None,
        class_=f"finding {severity}",
    )


# ---- curves and outcomes -------------------------------------------------------------------------


def _large(lines: Sequence[tuple[str, Json]], caption: Any) -> Html:
    sizes = (("wide", 940, 300), ("narrow", 320, 220))
    drawn = [tag("div", curves(lines, width=w, height=h, title="reward"), class_=name) for name, w, h in sizes]
    return tag("figure", drawn, tag("figcaption", caption))


def _curves(found: Sequence[Json]) -> Iterable[Html]:
    if found and found[0]["name"] == "reward":
        reward, *found = found
        caption: list[Any] = ["Mean reward by step. ", tag("span", "training", class_="key c0")]
        caption += [f", smoothed over {reward['window']} steps; each step thin"] if reward["smooth"] else []
        if reward["val"]:
            has_intervals = any(low is not None for _, _, low, _ in reward["val"])
            caption += [". ", tag("span", "validation", class_="key val c0")]
            caption += [" with its 95 % interval over tasks"] if has_intervals else []
        if reward["points"] > 1:
            yield _large([("c0", reward)], [*caption, "."])
    ranks = {name: rank for rank, name in enumerate(_FIRST)}
    cards = [_card(each) for each in sorted(found, key=lambda each: ranks.get(each["name"], len(ranks)))]
    if cards:
        yield tag("div", cards[:6], class_="cards")
    if cards[6:]:
        summary = tag("summary", f"{len(cards) - 6} more metrics")
        yield tag("details", summary, tag("div", cards[6:], class_="cards"))


def _card(curve: Json) -> Html:
    last = next((figure(points[-1][1], 3) for points in (curve["train"], curve["val"]) if points), None)
    if curve["train"] and curve["name"].partition("@")[0] not in ("success", "pass"):  # counts depend on the stage
        curve = {**curve, "val": []}
    lost = f"{curve['not_finite']:,} values are NaN or infinite" if curve["not_finite"] else None
    caption = tag("figcaption", tag("code", curve["name"]), tag("b", last))
    drawn = curves([("c0", curve)], width=290, height=120, title=curve["name"])
    return tag("figure", caption, drawn, tag("p", lost, class_="bad") if lost else None, class_="card")


def _outcomes(run: Json) -> Iterable[Html]:
    drawn: list[Html] = []
    for mode, of in part_of(part_of(run, "outcomes"), "rewards").items():
        caption = tag("figcaption", f"{_MODES[mode]}: mean ", tag("b", figure(of["mean"], 3)), f" of {of['count']:,}")
        colour = "val c0" if mode == "val" else "c0"
        drawn.append(tag("figure", caption, histogram(of, colour=colour, title=f"{mode} rewards"), class_="card"))
    yield tag("div", drawn, class_="cards") if drawn else Html()
    rows = [
        [f"{each['count']:,}", each["reason_kind"], [each["reason"][:400], tag("div", tag("code", each["example"]))]]
        for each in run["failures"]["groups"]
    ]
    if rows:
        yield tag("h3", f"{run['failures']['count']:,} failed rollouts by reason")
        yield _table(["count", "kind", "reason, and an example"], rows)


def _table(heads: Sequence[Any], rows: Iterable[Sequence[Any]]) -> Html:
    head = tag("thead", tag("tr", [tag("th", each) for each in heads])) if heads else None
    body = [tag("tr", tag("th", first), [tag("td", each) for each in others]) for first, *others in rows]
    return tag("div", tag("table", head, tag("tbody", body)), class_="scroll")


# ---- rollouts ------------------------------------------------------------------------------------


def _group(group: Json | None) -> Iterable[Html]:
    if group is None:
        return
    rollouts = group["rollouts"]
    shown = f"{len(rollouts)} of {group['size']}" if len(rollouts) < group["size"] else f"All {group['size']}"
    step = rollouts[0]["iteration"]
    lead = f"{shown} rollouts of one task{'' if step is None else f' in step {step:,}'}, which training compared. "
    if group["reason"] is None:
        lead += f"What the policy wrote has the colour of its advantage, as {group['estimator']} computed it."
        levels = [*(f"down{n}" for n in (4, 2)), *(f"up{n}" for n in (2, 4))]
        keys = [tag("span", "− ", [tag("i", "\u2003", class_=f"t {each}") for each in levels], " + advantage")]
    else:
        lead += f"Their advantages are not shown: {group['reason']}."
        keys = []
    probabilities = {"p < 0.5": "rare", "p < 0.1": "rarest", "⋯ not sampled": None}
    keys += [tag("span", text, class_=name) for text, name in probabilities.items()]
    largest = max((abs(each["advantage"] or 0.0) for each in rollouts), default=0.0)
    yield html([tag("p", lead), tag("blockquote", rollouts[0]["task"]), tag("p", keys, class_="legend")])
    for each in rollouts:
        advantage = each["advantage"]
        bar = None if advantage is None else [advantage_bar(advantage, largest), f"{advantage:+.3g}"]
        written = [piece for sequence in each["sequences"] for piece in _pieces(sequence, each, is_short=True)]
        text = tag("span", written or each["answer"], class_="tokens")
        summary = tag("summary", tag("b", _reward(each)), tag("span", bar, class_="bar"), text)
        yield tag("details", summary, _inside(each), class_="rollout line")


def _reward(rollout: Json) -> str:
    return str(rollout["status"]) if rollout["reward"] is None else figure(rollout["reward"], 3)


def _rollout(rollout: Json) -> Html:
    step = None if rollout["iteration"] is None else f"step {rollout['iteration']:,}"
    about = " · ".join(filter(None, (rollout["mode"], step)))
    texts = [tag("span", each) for each in (about, rollout["task"], rollout["answer"])]
    summary = tag("summary", tag("b", _reward(rollout)), texts)
    return tag("details", summary, _inside(rollout), class_="rollout")


def _inside(rollout: Json) -> Html:
    """Return a rollout in full: its figures, its conversation and its tokens."""
    seconds, cost, advantage = rollout["seconds"], rollout["cost"], rollout["advantage"]
    facts = [rollout["rollout_id"], *(f"{n} {figure(v, 3)}" for n, v in rollout["rewards"].items() if n != "primary")]
    facts += [f"{rollout['tokens']:,} tokens"] if rollout["tokens"] else []
    facts += [f"{seconds:.2f} s"] if seconds is not None else []
    facts += [f"cost {figure(cost, 3)}"] if cost is not None else []
    facts += [f"advantage {advantage:+.3g}"] if advantage is not None else []
    facts += [f"left out: {each}" for each in rollout["left_out"]]
    tokens = [] if advantage is not None else [tag("p", f"They have no colours: {rollout['reason']}.")]
    for sequence in rollout["sequences"]:
        more = f" and {sequence['left_out']:,} more tokens" if sequence["left_out"] else None
        tokens += [tag("p", f"{sequence['reason']}.")] if sequence["reason"] else []
        tokens += [tag("p", _pieces(sequence, rollout), tag("i", more), class_="tokens")]
    summary = tag("summary", "Tokens, as they were trained on")
    chat = tag("div", [_message(each) for each in rollout["messages"]], class_="chat")
    shown = [chat, tag("details", summary, tokens) if rollout["sequences"] else None]
    return tag("div", tag("p", " · ".join(facts)), shown, class_="inside")


def _message(message: Json) -> Html:
    role = f"{message['role']} ({message['call']})" if message["call"] else message["role"]
    said = tag("div", message["text"]) if message["text"] else None
    calls = [tag("code", tag("b", each["name"]), " ", each["arguments"]) for each in message["tool_calls"]]
    kind = message["role"] if message["role"] in ("system", "assistant", "tool", "error") else ""
    return tag("div", tag("span", role), tag("div", said, calls), class_=f"message {kind}")


def _pieces(sequence: Json, rollout: Json, *, is_short: bool = False) -> list[Html]:
    """Return a sequence of tokens. Those that were trained on have the colour of the rollout's advantage.

    is_short: leave out what the policy did not sample.
    """
    advantage = 0.0 if sequence["reason"] else rollout["advantage"] or 0.0
    level = min(4, 1 + int(4 * abs(advantage) / (rollout["largest"] or 1.0)))
    colour = "" if not advantage else f" up{level}" if advantage > 0 else f" down{level}"
    found: list[Html] = []
    for piece in sequence["pieces"]:
        shown, p = piece["text"].replace("\n", "↵ " if is_short else "↵\n"), piece["probability"]
        if piece["kind"] == "context":
            if is_short and not found:
                continue
            known = f"{piece['tokens']:,} tokens that were not sampled"
            found.append(tag("i", " ⋯ " if is_short else piece["text"], title=known))
        else:
            kind = (
                " masked" if p is None else f"{colour} rarest" if p < 0.1 else f"{colour} rare" if p < 0.5 else colour
            )
            known = f"id {piece['id']}, {'masked' if p is None else f'p {figure(p, 3)}'}"
            found.append(tag("span", shown, class_=f"t{kind}", title=known))
    return found


# ---- prompts and set-up --------------------------------------------------------------------------


def _prompt(version: Json) -> Html:
    tags = {"same": "span", "added": "ins", "removed": "del"}
    changes = [tag(tags[kind], text) for kind, text in version["changes"]]
    return tag(
        "div", tag("h3", f"{version['name']}, {version['id']} version {version['version']}"), tag("pre", changes)
    )


def _setup(run: Json) -> Iterable[Html]:
    head, found = run["head"], run["configuration"]
    if head.get("command"):
        yield tag("pre", head["command"])
    git, data, versions = (part_of(found, name) for name in ("git", "data", "versions"))
    if git.get("commit"):
        versions["git commit"] = git["commit"][:12] + (" and changes" if git.get("dirty") else "")
    about: Json = {
        **{f"{name} tasks": of["length"] for name, of in data.items() if of},
        "seed": found["seed"],
        "id": head["run_id"],
        "folder": head.get("directory"),
        "size": size(sum(head["bytes"].values())) if head.get("bytes") else None,
    }
    options = {name: value_text(value)[:400] for name, value in part_of(head, "options").items()}
    titles = (("Options that are not defaults", options), ("Run", about), ("Versions", versions))
    tables = [
        tag("div", tag("h3", title), _table([], [item for item in of.items() if item[1] is not None]))
        for title, of in titles
        if of
    ]
    yield tag("div", tables, class_="columns")


# ---- several runs --------------------------------------------------------------------------------


def _compare(body: _Body, runs: Sequence[Json], found: Json) -> None:
    names = [tag("span", run["head"]["name"], class_=f"key k{n % 6}") for n, run in enumerate(runs)]
    lines = [(f"k{n % 6}", each) for n, run in enumerate(runs) for each in run["curves"] if each["name"] == "reward"]
    heads, totals = [run["head"] for run in runs], found["totals"]

    def row(name: str, values: Iterable[Any], shown: Callable[[Any], str] = value_text) -> list[Any]:
        return [name, *(None if value is None else shown(value) for value in values)]

    rows = [row("state", [each["state"] for each in heads])]
    rows += [row("reward", found["reward"], _course), row("validation reward", found["val_reward"], _course)]
    rows += [row("time", [each.get("seconds") for each in heads], duration)]
    rows += [
        row(name, [each.get(name) for each in totals], figure) for name in ("rollouts", "failed", "tokens", "cost")
    ]
    rows += [row(name, of) for name, of in {**found["configuration"], **found["versions"]}.items()]
    rows += [row(name, [digest and digest[:8] for digest in of]) for name, of in part_of(found, "code").items()]
    rows += [row("changed while it ran", [", ".join(of or []) or None for of in found["control"]])]
    table = _table([None, *names], [each for each in rows if any(value is not None for value in each[1:])])
    parts = [_large(lines, names) if lines else Html(), table]
    parts += [_against(names[0], names[n], each) for n, each in enumerate(found["against_first"], start=1)]
    body.section("Comparison", parts, what="comparison")


def _against(first: Html, second: Html, found: Json) -> Html:
    title = tag("h3", second, " against ", first, ", last validations")
    if found["reason"] is not None:
        return html([title, tag("p", f"Not compared: {found['reason']}")])
    difference, said = found["difference"], "No task has a reward in both."
    if difference is not None:
        ends = [figure(difference[name], 3) for name in ("low", "high") if difference[name] is not None]
        interval = (
            f"95 % interval {' to '.join(ends)}, {difference['method']}" if ends else "too few tasks for an interval"
        )
        said = f"Reward {difference['mean']:+.3g} ({interval}). {found['better']:,} tasks are better, {found['worse']:,} worse."
    flips: list[Html] = []
    for name, heading in (("solved", "Solved now, and not before"), ("lost", "Solved before, and not now")):
        rows = [[json.dumps(of["task"]), of["before"]["answer"], of["after"]["answer"]] for of in found[name][:10]]
        if rows:
            flips += [tag("h3", f"{heading}: {len(found[name]):,}"), _table(["task", first, second], rows)]
    return html([title, tag("p", said), flips])
