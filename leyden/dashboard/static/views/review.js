// Judge rollouts by keyboard: a reward, a preference of a pair, a correction or a note. Answers are stored at once, and
// each has the id that was made when its rollout was shown, so that a repeated request counts once.

import { post } from "../api.js";
import { conversation } from "../conversation.js";
import { h, replace } from "../dom.js";
import { asText, figure } from "../format.js";

const WHO = "leyden-reviewer";
const ORDERS = { random: "random", worst: "worst first", uncertain: "most uncertain first", disagree: "where people and rewards disagree" };
const LOOKED_AT = 8; // rollouts for which a partner is looked for
const skipped = new Set();
let state = null, again = null;

const newId = () => `fb-${[...crypto.getRandomValues(new Uint8Array(8))].map((each) => each.toString(16).padStart(2, "0")).join("")}`;

export async function show(query, { get, link, again: redraw, go }) {
  again = redraw;
  const who = query.who ?? localStorage.getItem(WHO), order = query.order ?? "random", pairs = query.pairs === "1";
  const trail = [["Runs", "#/"], ["Run", link("run", { run: query.run })]];
  if (!who) return { title: "Review", trail, body: askWho(query, link, go) };
  localStorage.setItem(WHO, who);
  if (state && state.run === query.run && state.who === who && state.shown?.length) return { title: "Review", trail, same: true, body: page(query, link) };
  const data = await get("review", { run: query.run, who, order, seed: 1 });
  const shown = [];
  if (data.rollouts.length && data.rollouts.every((each) => skipped.has(each))) skipped.clear();
  const waiting = data.rollouts.filter((each) => !skipped.has(each));
  for (const id of waiting.slice(0, pairs ? LOOKED_AT : 1)) {
    const first = await get("rollout", { run: query.run, id });
    const other = pairs && first.group_id ? await partner(query.run, first, data.partners[id], get) : null;
    if (pairs && !other) continue;
    shown.push(first, ...(other ? [other] : []));
    break;
  }
  const said = await Promise.all(shown.map((each) => get("feedback", { run: query.run, id: each.rollout_id })));
  state = { run: query.run, who, order, pairs, data, shown, said, ids: shown.map(newId), message: state?.message ?? "" };
  return { title: "Review", trail, body: page(query, link) };
}

// Another rollout of the same task that waits, too, and whose answer differs.
async function partner(run, first, waiting, get) {
  const group = await get("group", { run, group: first.group_id });
  const other = group.rollouts.find((each) => each.rollout_id !== first.rollout_id && waiting.includes(each.rollout_id) && each.answer !== first.rollout.answer);
  return other ? get("rollout", { run, id: other.rollout_id }) : null;
}

// What was rewarded is not shown, so that it sways nobody.
const unrewarded = (rollout) => ({ ...rollout, messages: rollout.messages.filter((each) => each.role !== "reward") });

function askWho(query, link, go) {
  const field = h("input", { id: "who", required: true, maxlength: 100, autocomplete: "username" });
  return h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); go(link("review", { ...query, who: field.value.trim() })); } },
    h("h1", null, "Review"), h("label", { for: "who" }, "Your name, which is stored with your answers"), field, h("button", { type: "submit" }, "Begin"));
}

function page(query, link) {
  const { data, shown, pairs, order, who } = state, pair = shown.length === 2;
  const choose = (changes, text, on) => h("a", { class: on ? "choice on" : "choice", "aria-current": on && "true", onclick: () => { state = null; }, href: link("review", { ...query, ...changes }) }, text);
  return [
    h("div", { class: "head" }, h("h1", null, "Review"), h("p", { class: "quiet" }, `${who} has judged ${data.judged}; ${data.left.toLocaleString("en")} are left`)),
    h("div", { class: "choices" }, Object.entries(ORDERS).map(([name, text]) => choose({ order: name }, text, order === name)),
      choose({ pairs: pairs ? null : "1" }, "pairs of one task", pairs)),
    h("p", { id: "said", role: "status", class: "quiet" }, state.message),
    shown.length === 0 ? h("p", null, "Nothing is left to judge in this order.") : [
      h("pre", { class: "task" }, asText(shown[0].input)),
      h("div", { class: "answers", role: "group", "aria-label": "Your answer" }, pair
        ? [button("1", "the first is better", () => prefer(0)), button("2", "the second is better", () => prefer(1)), button("s", "skip", skip)]
        : [button("0", "wrong", () => rate(0)), button("5", "half right", () => rate(0.5)), button("1", "right", () => rate(1)), button("c", "correct it", () => write("correction")), button("n", "note", () => write("label")), button("s", "skip", skip)]),
      h("div", { class: pair ? "side" : null }, shown.map((each, n) => h("article", { class: "card" },
        h("h2", null, pair ? `${n + 1}. ` : "", h("a", { href: link("rollout", { run: query.run, id: each.rollout_id }) }, each.rollout_id)),
        state.said[n].length ? h("p", { class: "quiet" }, "already said: ", state.said[n].map((one) => `${one.source}: ${asText(one.value)}`).join("; ")) : null,
        conversation(unrewarded(each.rollout))))),
      h("div", { id: "text" }),
    ],
    data.agreement.length ? h("section", null, h("h2", null, "Agreement with the recorded reward"), h("ul", null, data.agreement.map((each) =>
      h("li", null, `${each.source}: ${figure(100 * each.share)} % of ${each.n}`, each.low === null ? "" : ` (95 % interval ${figure(100 * each.low)} to ${figure(100 * each.high)})`)))) : null,
  ];
}

const button = (key, text, act) => h("button", { type: "button", "data-key": key, onclick: act }, h("kbd", null, key), ` ${text}`);

async function send(answers, message) {
  try {
    await post("review", { run: state.run, who: state.who, answers });
    state = { message };
  } catch (error) {
    replace(document.getElementById("said"), `not stored: ${error.message}`);
    return;
  }
  again();
}

const answer = (n, kind, value) => ({ rollout_id: state.shown[n].rollout_id, kind, value, feedback_id: state.ids[n] });
const rate = (value) => send([answer(0, "reward", value)], `stored: ${value}`);
const prefer = (n) => send([answer(0, "reward", n === 0 ? 1 : 0), answer(1, "reward", n === 1 ? 1 : 0)], `stored: the ${n === 0 ? "first" : "second"} is better`);

function skip() {
  state.shown.forEach((each) => skipped.add(each.rollout_id));
  state = { message: "skipped; it comes again later" };
  again();
}

function write(kind) {
  const field = h("textarea", { id: "written", rows: 3, required: true, maxlength: kind === "label" ? 200 : 100000 });
  replace(document.getElementById("text"), h("form", { class: "card", onsubmit: (event) => {
    event.preventDefault();
    send([answer(0, kind, field.value.trim())], `stored: the ${kind === "label" ? "note" : "correction"}`);
  } }, h("label", { for: "written" }, kind === "label" ? "A note, one line" : "The right answer"), field, h("button", { type: "submit" }, "Store")));
  field.focus();
}

export function key(event) {
  const found = document.querySelector(`.answers [data-key="${CSS.escape(event.key)}"]`);
  found?.click();
  return found !== null;
}
