// All runs, the newest first, with a choice of those to compare.

import { h, table } from "../dom.js";
import { ago, duration, figure } from "../format.js";

const chosen = new Set();

export async function show(query, { get, link, again }) {
  const data = await get("runs");
  const wanted = (query.find ?? "").toLowerCase();
  const runs = data.runs.filter((run) => !wanted || JSON.stringify([run.name, run.tags, run.algorithm, run.model, run.state]).toLowerCase().includes(wanted));
  for (const id of chosen) if (!data.runs.some((run) => run.run_id === id)) chosen.delete(id);
  const pick = (run) => h("input", {
    type: "checkbox", "aria-label": `compare ${run.name}`, checked: chosen.has(run.run_id),
    disabled: chosen.size >= 4 && !chosen.has(run.run_id),
    onchange: (event) => { chosen[event.target.checked ? "add" : "delete"](run.run_id); again(); },
  });
  const course = (reward) => (reward ? `${figure(reward.first)} → ${figure(reward.last)}` : "-");
  return {
    title: "Runs",
    trail: [],
    body: [
      h("div", { class: "head" }, h("h1", null, "Runs"), h("p", { class: "quiet" }, data.source)),
      h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
        h("label", null, "Find", h("input", { id: "find", type: "search", value: query.find ?? "", placeholder: "name, tag, state",
          onchange: (event) => { location.hash = link("runs", { find: event.target.value }); } })),
        h("a", { class: "button", href: link("compare", { run: [...chosen].join(",") }), hidden: chosen.size < 2 }, `Compare ${chosen.size} runs`)),
      runs.length ? table("Runs", [
        { title: "name", cell: (run) => h("a", { href: link("run", { run: run.run_id }) }, run.name) },
        { title: "compare", cell: pick },
        { title: "state", cell: (run) => h("span", { class: `state ${run.state}` }, run.state) },
        { title: "algorithm", cell: (run) => (run.algorithm ?? run.kind ?? "").split(".").at(-1) },
        { title: "reward", cell: (run) => course(run.reward), number: true },
        { title: "validation", cell: (run) => course(run.val_reward), number: true },
        { title: "best", cell: (run) => figure((run.val_reward ?? run.reward)?.best), number: true },
        { title: "steps", cell: (run) => figure(run.iterations), number: true },
        { title: "rollouts", cell: (run) => figure(run.rollouts), number: true },
        { title: "failed", cell: (run) => figure(run.failed), number: true, className: "warn" },
        { title: "took", cell: (run) => duration(run.seconds), number: true },
        { title: "started", cell: (run) => ago(run.start_time) },
        { title: "tags", cell: (run) => run.tags.map((tag) => h("span", { class: "tag" }, tag)) },
      ], runs) : h("p", { class: "quiet" }, wanted ? "No run fits." : "There is no run yet. `leyden init` writes a project that makes one."),
      data.damaged.length ? h("details", { class: "card" }, h("summary", null, `${data.damaged.length} runs cannot be read`),
        h("ul", null, data.damaged.map((each) => h("li", null, each)))) : null,
    ],
  };
}
