// One run: did it learn, what is wrong, its curves, failures, prompts, and what people asked of it.

import { histogram, lineChart } from "../chart.js";
import { json } from "../api.js";
import { h, table } from "../dom.js";
import { ago, asText, bytes, duration, figure, plural } from "../format.js";

export const trailOf = (link, head) => [["Runs", "#/"], [head.name, link("run", { run: head.run_id })]];

export async function show(query, { get, link }) {
  const data = await get("run", query), head = data.head, id = head.run_id;
  const reward = data.curves.find((each) => each.name === "reward");
  const others = data.curves.filter((each) => each.name !== "reward");
  const shown = query.metrics ? query.metrics.split(",") : ["kl", "entropy", "grad_norm", "response_tokens"];
  return {
    title: head.name,
    trail: [["Runs", "#/"]],
    body: [
      h("div", { class: "head" },
        h("h1", null, head.name, " ", h("span", { class: `state ${head.state}` }, head.state)),
        h("p", { class: "quiet" }, [head.cause, `started ${ago(head.start_time)}, took ${duration(head.seconds)}`,
          head.bytes && bytes(Object.values(head.bytes).reduce((a, b) => a + b, 0))].filter(Boolean).join(" · "))),
      h("nav", { class: "tabs", "aria-label": "Parts of the run" },
        h("a", { href: link("rollouts", { run: id }) }, "Rollouts"),
        h("a", { href: link("workers", { run: id }) }, "Workers and monitor"),
        h("a", { href: link("resources", { run: id }) }, "Resources and releases"),
        h("a", { href: link("review", { run: id }) }, "Review"),
        data.group && h("a", { href: link("group", { run: id, group: data.group.group_id }) }, "A group side by side"),
        json("run", { run: id })),
      learned(data.learned),
      findings(data),
      h("section", null, h("h2", null, "Reward"), reward ? chartOf(reward, 260, 1100) : h("p", { class: "quiet" }, "No step has a reward yet.")),
      others.length ? h("section", null, h("h2", null, "Metrics"),
        h("div", { class: "choices" }, others.map((each) => {
          const on = shown.includes(each.name);
          const next = on ? shown.filter((name) => name !== each.name) : [...shown, each.name];
          return h("a", { class: on ? "choice on" : "choice", "aria-current": on && "true", href: link("run", { run: id, metrics: next.join(",") || "-" }) }, each.name);
        })),
        h("div", { class: "grid" }, others.filter((each) => shown.includes(each.name)).map((each) => h("div", null, h("h3", null, each.name), chartOf(each, 180))))) : null,
      outcomes(data, link, id),
      failures(data.failures, link, id),
      samples(data, link, id),
      prompts(data.prompts),
      facts(data),
    ],
  };
}

function learned(found) {
  if (!found?.basis) return null;
  const by = found.difference;
  return h("p", { class: "lead" }, `${found.basis === "val" ? "Validation" : "Training"} reward `,
    h("b", null, `${figure(found.first[1])} → ${figure(found.last[1])}`), `, best ${figure(found.best[1])} at step ${found.best[0]}. `,
    by ? `The last validation differs from the first by ${by.mean > 0 ? "+" : ""}${figure(by.mean)} (95 % interval ${figure(by.low)} to ${figure(by.high)}).` : found.reason ?? "");
}

export function findings(data) {
  if (!data.findings.length) return h("p", { class: "good" }, "The doctor finds nothing wrong.");
  return h("section", null, h("h2", null, plural(data.findings.length, "finding")),
    h("ol", { class: "findings" }, data.findings.map((each) => h("li", { class: `card ${each.severity}` },
      h("h3", null, each.cause, " ", h("small", null, each.rule)),
      h("ul", null, each.evidence.map((line) => h("li", null, line))),
      h("p", null, each.remedy), each.command && h("pre", null, each.command)))));
}

function chartOf(curve, height, width) {
  const series = [];
  const smooth = curve.smooth.length > 1;
  series.push({ label: smooth ? "raw" : "train", points: curve.train, kind: smooth ? "raw" : "smooth", color: 0 });
  if (smooth) series.push({ label: `mean of ${curve.window}`, points: curve.smooth, kind: "smooth", color: 0 });
  if (curve.val.length) {
    series.push({ label: "validation", kind: "val", color: 1, points: curve.val.map(([at, mean]) => [at, mean]),
      low: curve.val.map((each) => each[2] ?? NaN), high: curve.val.map((each) => each[3] ?? NaN) });
  }
  return [lineChart(curve.name, series, { height, width }), curve.not_finite ? h("p", { class: "quiet" }, plural(curve.not_finite, "value") + " not finite") : null];
}

function outcomes(data, link, id) {
  const found = data.outcomes;
  if (!found) return null;
  const sums = (measure) => (measure ? measure.count * measure.mean : null);
  return h("section", null, h("h2", null, "Outcomes"),
    h("dl", { class: "facts" },
      h("dt", null, "finished"), h("dd", null, h("a", { href: link("rollouts", { run: id }) }, found.finished.toLocaleString("en"))),
      found.failed ? [h("dt", null, "failed"), h("dd", null, h("a", { href: link("rollouts", { run: id, status: "failed" }) }, found.failed.toLocaleString("en")))] : null,
      found.tokens && [h("dt", null, "tokens"), h("dd", null, figure(Math.round(sums(found.tokens))))],
      found.cost && [h("dt", null, "cost"), h("dd", null, figure(sums(found.cost)))],
      found.seconds && [h("dt", null, "a rollout takes"), h("dd", null, duration(found.seconds.mean))]),
    Object.entries(found.rewards).map(([mode, of]) => [h("h3", null, `Rewards of ${mode}`),
      histogram(`rewards of ${mode}`, of.histogram.edges, of.histogram.counts, null, (bar) => {
        location.hash = link("rollouts", { run: id, mode: mode === "all" ? null : mode, min_reward: bar[0], max_reward: bar[2] ? null : bar[1] });
      })]));
}

function failures(found, link, id) {
  if (!found.count) return null;
  return h("section", null, h("h2", null, plural(found.count, "failure")), table("Failures by reason", [
    { title: "reason", cell: (each) => each.reason },
    { title: "kind", cell: (each) => each.reason_kind ?? "" },
    { title: "count", cell: (each) => figure(each.count), number: true },
    { title: "example", cell: (each) => h("a", { href: link("rollout", { run: id, id: each.example }) }, each.example) },
  ], found.groups));
}

function samples(data, link, id) {
  const part = (title, rollouts) => (rollouts?.length ? [h("h3", null, title), table(title, [
    { title: "rollout", cell: (each) => h("a", { href: link("rollout", { run: id, id: each.rollout_id }) }, each.rollout_id) },
    { title: "reward", cell: (each) => figure(each.reward), number: true },
    { title: "task", cell: (each) => short(each.task) },
    { title: "answer", cell: (each) => short(each.answer ?? "") },
  ], rollouts)] : null);
  if (!data.samples?.best?.length) return null;
  return h("section", null, h("h2", null, "Best and worst"), part("Best", data.samples.best), part("Worst", data.samples.worst));
}

const short = (value) => { const text = asText(value); return text.length > 160 ? `${text.slice(0, 160)}…` : text; };

export function prompts(resources) {
  if (!resources.length) return null;
  return h("section", null, h("h2", null, "Prompts"), resources.map((each) => h("details", { class: "card", open: each === resources.at(-1) },
    h("summary", null, `${each.name}, version ${each.version}`),
    h("pre", { class: "diff" }, each.changes.map(([kind, text]) => (kind === "same" ? text : h(kind === "added" ? "ins" : "del", null, text)))))));
}

function facts(data) {
  const head = data.head, options = Object.entries(head.options ?? {});
  return h("section", null, h("h2", null, "How it was started"),
    head.command && h("pre", null, head.command),
    options.length ? h("dl", { class: "facts" }, options.map(([name, value]) => [h("dt", null, name), h("dd", null, asText(value))])) : null,
    h("details", null, h("summary", null, "Versions"), h("dl", { class: "facts" },
      Object.entries(data.configuration.versions ?? {}).map(([name, value]) => [h("dt", null, name), h("dd", null, asText(value))]))),
    data.control.length ? [h("h3", null, "Asked of it while it worked"), h("ul", null, data.control.map((line) =>
      h("li", null, `${ago(line.time)} by ${line.by}: ${line.command} ${line.path ?? ""} ${line.value ?? ""} (${line.state})`)))] : null,
    data.left_out.length ? h("p", { class: "quiet" }, `Left out: ${data.left_out.join("; ")}`) : null);
}
