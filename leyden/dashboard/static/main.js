// The router: an address behind # is a view, and `views` has a module for each. A view's show(query) returns its elements.

import { get, listen, setToken, takeToken } from "./api.js";
import { h, replace } from "./dom.js";
import * as compare from "./views/compare.js";
import * as group from "./views/group.js";
import * as resources from "./views/resources.js";
import * as review from "./views/review.js";
import * as rollout from "./views/rollout.js";
import * as rollouts from "./views/rollouts.js";
import * as run from "./views/run.js";
import * as runs from "./views/runs.js";
import * as workers from "./views/workers.js";

const views = { runs, run, rollouts, rollout, group, compare, workers, resources, review };

const main = document.getElementById("main"), live = document.getElementById("live"), trail = document.getElementById("trail");
let shown = 0, names = {};

function where() {
  const [path, text] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path in views ? path : "runs", query: Object.fromEntries(new URLSearchParams(text ?? "")) };
}

export const link = (name, query) => {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#/${name}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
};

async function show({ keep = false } = {}) {
  const mine = ++shown, { name, query } = where(), y = scrollY, focused = document.activeElement?.id;
  if (!keep) main.setAttribute("aria-busy", "true");
  let found;
  try {
    found = await views[name].show(query, { get, link, again: () => show({ keep: true }), go: (to) => { location.hash = to; } });
  } catch (error) {
    if (keep && error.status === 0) return; // the stream will say when the server is back
    found = { title: "Not shown", body: error.status === 401 ? askForToken() : [h("h1", null, "Not shown"), h("p", { class: "error", role: "alert" }, error.message)] };
  }
  if (mine !== shown) return;
  if (name === "runs" && found.names) names = found.names;
  if (keep && found.same) return;
  document.title = `${found.title} · Leyden`;
  replace(trail, found.trail?.map(([text, to]) => h("a", { href: to }, text)));
  replace(main, found.body);
  main.removeAttribute("aria-busy");
  if (keep) { scrollTo(0, y); if (focused) document.getElementById(focused)?.focus({ preventScroll: true }); }
  else { scrollTo(0, 0); main.focus({ preventScroll: true }); }
}

function askForToken() {
  const field = h("input", { id: "token", type: "password", autocomplete: "off", required: true });
  return h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); setToken(field.value); start(); show(); } },
    h("label", { for: "token" }, "This dashboard needs its token"), field, h("button", { type: "submit" }, "Open"));
}

let listening = false;
function start() {
  if (listening) return;
  listening = true;
  let first = true, later = null;
  listen((changed) => {
    if (changed === null && first) { first = false; return; } // what is shown is new
    const run = where().query.run;
    if (changed !== null && run && !run.split(",").some((each) => changed.includes(each))) return;
    clearTimeout(later);
    later = setTimeout(() => show({ keep: true }), 200);
  }, (isLive) => {
    live.className = isLive ? "live" : "away";
    replace(live, isLive ? "live" : "the server is away; trying again");
  });
}

takeToken();
addEventListener("hashchange", () => show());
addEventListener("keydown", (event) => {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (views[where().name].key?.(event)) { event.preventDefault(); return; }
  const step = { j: 1, k: -1 }[event.key];
  if (step) {
    const rows = [...main.querySelectorAll("tbody th a")], at = rows.indexOf(document.activeElement);
    rows[Math.max(0, Math.min(rows.length - 1, at + step))]?.focus();
  } else if (event.key === "u") trail.lastElementChild?.click();
});
show().then(start);
