// The rollouts of a run, filtered by form and by the bars of the histogram.

import { histogram } from "../chart.js";
import { json } from "../api.js";
import { h, table } from "../dom.js";
import { duration, figure, plural } from "../format.js";

const PAGE = 50;

export async function show(query, { get, link }) {
  const data = await get("rollouts", { ...query, limit: PAGE });
  const to = (changes) => link("rollouts", { ...query, offset: null, ...changes });
  const offset = Number(query.offset ?? 0), sort = query.sort ?? "start_time";
  const select = (name, values, any) => h("label", null, name, h("select", {
    id: `filter-${name}`, onchange: (event) => { location.hash = to({ [name]: event.target.value }); },
  }, h("option", { value: "" }, any), values.map((each) => h("option", { value: each, selected: query[name] === each }, each))));
  const heading = (name, title = name) => {
    const active = sort === name, descending = (query.order ?? "desc") === "desc";
    return { title, number: name !== "start_time", sorted: active ? (descending ? "descending" : "ascending") : "none",
      head: h("a", { href: to({ sort: name, order: active && descending ? "asc" : "desc" }) }, title, active ? (descending ? " ↓" : " ↑") : "") };
  };
  const reward = data.reward;
  const filtered = query.min_reward !== undefined || query.max_reward !== undefined;
  return {
    title: "Rollouts",
    trail: [["Runs", "#/"], ["Run", link("run", { run: query.run })]],
    body: [
      h("div", { class: "head" }, h("h1", null, "Rollouts"), h("p", { class: "quiet", "aria-live": "polite" }, `${plural(data.total, "rollout")} fit`)),
      h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
        select("mode", ["train", "val", "test"], "any mode"),
        select("status", ["succeeded", "failed", "cancelled", "running", "queuing"], "any status"),
        select("failure", Object.keys(data.by_failure), "any failure"),
        h("label", null, "id", h("input", { id: "filter-id", type: "search", value: query.id ?? "", onchange: (event) => { location.hash = to({ id: event.target.value }); } })),
        h("a", { class: "button", href: link("rollouts", { run: query.run }) }, "All"),
        json("rollouts", query)),
      reward ? h("section", null, h("h2", null, `Rewards, mean ${figure(reward.mean)}`),
        histogram("rewards", reward.histogram.edges, reward.histogram.counts, filtered ? [reward.histogram.edges[0]] : null, (bar) => {
          location.hash = to(bar ? { min_reward: bar[0], max_reward: bar[2] ? null : bar[1] } : { min_reward: null, max_reward: null });
        }), filtered ? h("a", { href: to({ min_reward: null, max_reward: null }) }, "all rewards") : null) : null,
      table("Rollouts", [
        { title: "rollout", cell: (each) => h("a", { href: link("rollout", { run: query.run, id: each.rollout_id }) }, each.rollout_id) },
        { title: "status", cell: (each) => h("span", { class: `state ${each.status}` }, each.status) },
        { title: "mode", cell: (each) => each.mode ?? "" },
        { title: "step", cell: (each) => figure(each.iteration), number: true },
        { ...heading("reward"), cell: (each) => figure(each.reward) },
        { ...heading("tokens"), cell: (each) => figure(each.tokens) },
        { ...heading("seconds", "took"), cell: (each) => duration(each.seconds) },
        { title: "group", cell: (each) => each.group_id && h("a", { href: link("group", { run: query.run, group: each.group_id }) }, "side by side") },
        { title: "task", cell: (each) => each.task, className: "wide" },
        { title: "answer", cell: (each) => each.reason ?? each.answer ?? "", className: "wide" },
      ], data.rollouts),
      h("nav", { class: "pages", "aria-label": "Pages" },
        offset > 0 ? h("a", { class: "button", href: link("rollouts", { ...query, offset: Math.max(0, offset - PAGE) }) }, "Newer") : null,
        h("span", { class: "quiet" }, data.total ? `${offset + 1} to ${Math.min(offset + PAGE, data.total)} of ${data.total.toLocaleString("en")}` : ""),
        offset + PAGE < data.total ? h("a", { class: "button", href: link("rollouts", { ...query, offset: offset + PAGE }) }, "Older") : null),
    ],
  };
}
