// Line charts and histograms as SVG, with the values at the pointer and at the keyboard's place.

import { h, s, replace } from "./dom.js";
import { figure } from "./format.js";

const PAD = { left: 52, right: 12, top: 10, bottom: 24 };

function ticks(low, high, n) {
  if (!(high > low)) return [low];
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// series: [{label, points: [[x, y]], kind: "raw" | "smooth" | "val", color: 0.., low: [..], high: [..]}]
export function lineChart(title, series, { height = 220, width = 560 } = {}) {
  const W = width;
  const shown = series.filter((each) => each.points.length);
  if (!shown.length) return h("p", { class: "quiet" }, "no values");
  const xs = shown.flatMap((each) => each.points.map((p) => p[0]));
  const ys = shown.flatMap((each) => [...each.points.map((p) => p[1]), ...(each.low ?? []), ...(each.high ?? [])]).filter(Number.isFinite);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  if (y0 === y1) { const room = Math.abs(y0) * 0.1 || 1; y0 -= room; y1 += room; }
  const X = (x) => PAD.left + (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5) * (W - PAD.left - PAD.right);
  const Y = (y) => height - PAD.bottom - ((y - y0) / (y1 - y0)) * (height - PAD.top - PAD.bottom);
  const path = (points) => points.map(([x, y], n) => `${n ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
  const svg = s("svg", { viewBox: `0 0 ${W} ${height}`, class: "chart", role: "img", tabindex: "0", "aria-label": describe(title, shown) });
  for (const y of ticks(y0, y1, 4)) {
    svg.append(s("line", { class: "grid", x1: PAD.left, x2: W - PAD.right, y1: Y(y), y2: Y(y) }),
      s("text", { x: PAD.left - 6, y: Y(y) + 4, "text-anchor": "end" }, figure(y)));
  }
  for (const x of ticks(x0, x1, 6).filter(Number.isInteger)) {
    svg.append(s("text", { x: X(x), y: height - 6, "text-anchor": "middle" }, String(x)));
  }
  for (const each of shown) {
    const group = s("g", { class: `series c${each.color ?? 0} ${each.kind}` });
    if (each.low) {
      each.points.forEach(([x], n) => Number.isFinite(each.low[n]) && group.append(
        s("line", { class: "interval", x1: X(x), x2: X(x), y1: Y(each.low[n]), y2: Y(each.high[n]) })));
    }
    if (each.points.length > 1) group.append(s("path", { d: path(each.points) }));
    if (each.kind === "val" || each.points.length === 1) {
      each.points.forEach(([x, y]) => group.append(s("circle", { cx: X(x), cy: Y(y), r: 3.5 })));
    }
    svg.append(group);
  }
  const readout = h("p", { class: "readout", "aria-live": "polite" }, legend(shown));
  const cursor = s("line", { class: "cursor", y1: PAD.top, y2: height - PAD.bottom, x1: -9, x2: -9 });
  svg.append(cursor);
  const places = [...new Set(xs)].sort((a, b) => a - b);
  let place = places.length - 1;
  const point = (x) => {
    const nearest = places.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best), places[0]);
    place = places.indexOf(nearest);
    cursor.setAttribute("x1", X(nearest)); cursor.setAttribute("x2", X(nearest));
    replace(readout, `step ${nearest}`, shown.map((each) => {
      const found = each.points.find((p) => p[0] === nearest);
      return found ? h("span", { class: `key c${each.color ?? 0} ${each.kind}` }, `${each.label} ${figure(found[1], 4)}`) : null;
    }));
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    point(x0 + (((event.clientX - box.left) / box.width * W - PAD.left) / (W - PAD.left - PAD.right)) * (x1 - x0));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); replace(readout, legend(shown)); });
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(places[Math.max(0, Math.min(places.length - 1, place + by))]);
  });
  return h("figure", null, svg, readout);
}

const legend = (series) => series.map((each) => h("span", { class: `key c${each.color ?? 0} ${each.kind}` }, each.label));

const describe = (title, series) => `${title}: ${series.map((each) =>
  `${each.label} from ${figure(each.points[0][1])} to ${figure(each.points.at(-1)[1])} in ${each.points.length} values`).join("; ")}. The arrow keys read the values.`;

// A histogram whose bars are buttons: choose(low, high) of the chosen bar.
export function histogram(title, edges, counts, chosen, choose) {
  const most = Math.max(...counts, 1);
  return h("div", { class: "bars", role: "group", "aria-label": title }, counts.map((count, n) => {
    const [low, high] = [edges[n], edges[n + 1] ?? edges[n]];
    const pressed = chosen !== null && chosen[0] === low;
    return h("button", {
      type: "button", class: "bar", "aria-pressed": String(pressed), disabled: !count && !pressed,
      "aria-label": `reward ${figure(low)} to ${figure(high)}: ${count}`, title: `${figure(low)} to ${figure(high)}: ${count}`,
      onclick: () => choose(pressed ? null : [low, high, n === counts.length - 1]),
    }, h("span", { class: "fill", style: { height: `${count ? Math.max(4, (count / most) * 100) : 0}%` } }));
  }), h("span", { class: "axis" }, h("span", null, figure(edges[0])), h("span", null, figure(edges.at(-1)))));
}
