// One rollout: its attempts, its conversation, its tokens, and its spans in time.

import { conversation, tokens } from "../conversation.js";
import { json } from "../api.js";
import { h } from "../dom.js";
import { asText, duration, figure, when } from "../format.js";

export async function show(query, { get, link }) {
  const data = await get("rollout", { run: query.run, id: query.id }), rollout = data.rollout;
  const by = query.by ?? (rollout.advantage === null ? "probability" : "advantage");
  return {
    title: data.rollout_id,
    trail: [["Runs", "#/"], ["Run", link("run", { run: query.run })], ["Rollouts", link("rollouts", { run: query.run })]],
    body: [
      h("div", { class: "head" }, h("h1", null, data.rollout_id, " ", h("span", { class: `state ${data.status}` }, data.status)),
        h("p", { class: "quiet" }, [data.mode, data.iteration !== null && `step ${data.iteration}`, `reward ${figure(data.reward)}`,
          rollout.advantage !== null && `advantage ${figure(rollout.advantage)}`, data.tokens && `${figure(data.tokens)} tokens`, duration(data.seconds)].filter(Boolean).join(" · "))),
      h("nav", { class: "tabs", "aria-label": "More" },
        data.group_id && h("a", { href: link("group", { run: query.run, group: data.group_id }) }, "Its group side by side"),
        json("rollout", { run: query.run, id: query.id })),
      h("section", null, h("h2", null, "Task"), h("pre", { class: "task" }, asText(data.input))),
      attempts(data),
      h("section", null, h("h2", null, "Conversation"), conversation(rollout)),
      h("section", null, h("h2", null, "Tokens"),
        h("div", { class: "choices" }, ["probability", "advantage"].map((each) =>
          h("a", { class: by === each ? "choice on" : "choice", "aria-current": by === each && "true", href: link("rollout", { ...query, by: each }) }, `by ${each}`))),
        by === "advantage" && rollout.reason ? h("p", { class: "quiet" }, `The advantage is not known: ${rollout.reason}`) : null,
        data.no_texts ? h("p", { class: "quiet" }, `Shown as ids: ${data.no_texts}`) : null,
        tokens(rollout, by, Math.abs(rollout.advantage ?? 1))),
      waterfall(data.spans, data.n_spans),
    ],
  };
}

function attempts(data) {
  if (data.all_attempts.length < 2 && data.status === "succeeded") return null;
  return h("section", null, h("h2", null, "Attempts"), h("ol", null, data.all_attempts.map((each) =>
    h("li", null, h("span", { class: `state ${each.status}` }, each.status), ` ${when(each.start_time)} `,
      each.metadata?.reason ? h("pre", { class: "error" }, each.metadata.reason) : null))));
}

function waterfall(spans, total) {
  const timed = spans.filter((each) => each.start !== null);
  if (!timed.length) return null;
  const first = Math.min(...timed.map((each) => each.start)), last = Math.max(...timed.map((each) => each.end ?? each.start));
  const whole = Math.max(last - first, 1e-9), known = new Map(timed.map((each) => [each.id, each]));
  const depth = (each) => { let n = 0; for (let at = each; n < 20 && known.has(at.parent); at = known.get(at.parent)) n += 1; return n; };
  return h("section", null, h("h2", null, `Spans (${spans.length < total ? `the first ${spans.length} of ${total.toLocaleString("en")}` : total})`), h("ol", { class: "waterfall" }, timed.map((each) => {
    const start = ((each.start - first) / whole) * 100, width = Math.max((((each.end ?? each.start) - each.start) / whole) * 100, 0.4);
    return h("li", null, h("details", null,
      h("summary", null, h("span", { class: "name", style: { "padding-left": `${depth(each) * 0.8}rem` } }, each.name, each.error !== null && h("em", { class: "error" }, " error")),
        h("span", { class: "time" }, duration((each.end ?? each.start) - each.start)),
        h("span", { class: "track", "aria-hidden": "true" }, h("span", { class: "span", style: { "margin-left": `${Math.min(start, 99.6)}%`, width: `${Math.min(width, 100 - start)}%` } }))),
      each.error && h("p", { class: "error" }, each.error),
      h("dl", { class: "facts" }, Object.entries(each.attributes).map(([name, value]) => [h("dt", null, name), h("dd", null, asText(value))]))));
  })));
}
