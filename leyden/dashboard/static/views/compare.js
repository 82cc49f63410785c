// Two to four runs: their curves in one chart, what differs, and the tasks that flipped.

import { lineChart } from "../chart.js";
import { h, table } from "../dom.js";
import { asText, duration, figure, plural } from "../format.js";

export async function show(query, { get, link }) {
  const ids = (query.run ?? "").split(","), name = query.metric ?? "reward";
  const [data, found] = await Promise.all([get("compare", { run: query.run }), get("metric", { run: query.run, name })]);
  const label = (id) => data.runs.find((each) => each.run_id === id).name;
  const rows = [
    ["state", data.runs.map((each) => each.state)],
    ["took", data.runs.map((each) => duration(each.seconds))],
    ...["reward", "val_reward"].map((each) => [each.replace("_", " "), data.runs.map((run) => (run[each] ? `${figure(run[each].first)} → ${figure(run[each].last)}, best ${figure(run[each].best)}` : "-"))]),
    ...Object.entries(data.configuration).map(([each, values]) => [each, values.map((value) => asText(value ?? "-"))]),
    ...Object.entries(data.versions).map(([each, values]) => [each, values.map((value) => String(value).slice(0, 12))]),
  ];
  const smooth = (of) => (of.stage === "val" ? "val" : "smooth");
  return {
    title: "Compare",
    trail: [["Runs", "#/"]],
    body: [
      h("div", { class: "head" }, h("h1", null, `${ids.length} runs beside each other`)),
      h("section", null, h("h2", null, name), lineChart(name, found.curves.map((each) => ({
        label: `${label(each.run)}${each.stage === "val" ? " validation" : ""}`, points: each.points, kind: smooth(each), color: ids.indexOf(each.run),
      })), { height: 280, width: 1100 })),
      table("What differs", [{ title: "", cell: (row) => row[0] },
        ...data.runs.map((run, n) => ({ title: run.name, head: h("a", { class: `key c${n} smooth`, href: link("run", { run: run.run_id }) }, run.name), cell: (row) => row[1][n] }))], rows),
      data.control.some((each) => each?.length) ? h("section", null, h("h2", null, "Changed while they worked"), data.runs.map((run, n) =>
        (data.control[n]?.length ? [h("h3", null, run.name), h("ul", null, data.control[n].map((line) => h("li", null, line)))] : null))) : null,
      data.against_first.map((each, n) => against(each, data.runs[n + 1], data.runs[0], link)),
    ],
  };
}

function against(found, run, first, link) {
  const title = h("h2", null, `${run.name} against ${first.name}`);
  if (found.reason) return h("section", null, title, h("p", { class: "quiet" }, `Their validations cannot be compared: ${found.reason}`));
  const by = found.difference;
  const flipped = (name, text) => (found[name]?.length ? h("details", { class: "card" }, h("summary", null, `${plural(found[name].length, "task")} ${text}`),
    h("ul", null, found[name].slice(0, 50).map((each) => h("li", null, h("code", null, asText(each.task)), h("div", { class: "quiet" }, "before: ", each.before.answer ?? "-"), h("div", null, "after: ", each.after.answer ?? "-"),
      h("a", { href: link("rollout", { run: run.run_id, id: each.after.rollouts.at(-1).rollout_id }) }, "look"))))) : null);
  return h("section", null, title,
    by && h("p", { class: "lead" }, `${plural(found.tasks.same, "same task")}: `, h("b", null, `${by.mean > 0 ? "+" : ""}${figure(by.mean)}`), ` (95 % interval ${figure(by.low)} to ${figure(by.high)}; ${found.better} better, ${found.worse} worse)`),
    flipped("solved", "solved now and not before"), flipped("lost", "solved before and lost now"));
}
