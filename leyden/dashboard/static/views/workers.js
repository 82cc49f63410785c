// The workers of the run's store, and the series of its monitors.

import { lineChart } from "../chart.js";
import { h, table } from "../dom.js";
import { ago, figure } from "../format.js";

export async function show(query, { get, link }) {
  const data = await get("workers", { run: query.run });
  const series = Object.groupBy ? Object.groupBy(data.samples, (each) => each.name) : {};
  return {
    title: "Workers",
    trail: [["Runs", "#/"], ["Run", link("run", { run: query.run })]],
    body: [
      h("div", { class: "head" }, h("h1", null, "Workers and monitor")),
      data.workers.length ? table("Workers", [
        { title: "worker", cell: (each) => each.worker_id },
        { title: "status", cell: (each) => h("span", { class: `state ${each.status}` }, each.paused ? "paused" : each.status) },
        { title: "heartbeat", cell: (each) => (each.last_heartbeat_time ? ago(each.last_heartbeat_time) : "-") },
        { title: "works on", cell: (each) => each.current_rollout_id && h("a", { href: link("rollout", { run: query.run, id: each.current_rollout_id }) }, each.current_rollout_id) },
        { title: "CPU %", cell: (each) => figure(each.heartbeat_stats?.cpu_percent), number: true },
      ], data.workers) : h("p", { class: "quiet" }, "The store has no workers."),
      Object.keys(series).length ? h("div", { class: "grid" }, Object.entries(series).map(([name, values]) => {
        const newest = values[0].time;
        return h("div", null, h("h3", null, name), lineChart(name, [{ label: "minutes before the newest", kind: "smooth", color: 0, points: values.map((each) => [(each.time - newest) / 60, each.value]).reverse() }], { height: 160 }));
      })) : h("p", { class: "quiet" }, "No monitor has written samples: Trainer(monitor=True), or leyden store --monitor."),
    ],
  };
}
