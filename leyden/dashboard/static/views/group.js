// The rollouts of one task of a step, side by side: where their answers first differ is marked.

import { conversation } from "../conversation.js";
import { h } from "../dom.js";
import { asText, figure } from "../format.js";

export async function show(query, { get, link }) {
  const data = await get("group", { run: query.run, group: query.group });
  const rollouts = [...data.rollouts].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const best = rollouts[0];
  return {
    title: "Group",
    trail: [["Runs", "#/"], ["Run", link("run", { run: query.run })], ["Rollouts", link("rollouts", { run: query.run })]],
    body: [
      h("div", { class: "head" }, h("h1", null, `${rollouts.length < data.size ? `${rollouts.length} of ${data.size}` : rollouts.length} rollouts of one task`), h("p", { class: "quiet" }, data.estimator ? `credited by ${data.estimator}` : best.reason)),
      h("pre", { class: "task" }, asText(best.task)),
      h("div", { class: "side" }, rollouts.map((each) => h("article", { class: "card" },
        h("h2", null, h("a", { href: link("rollout", { run: query.run, id: each.rollout_id }) }, each.rollout_id)),
        h("p", null, h("span", { class: `state ${each.status}` }, each.status), ` reward `, h("b", null, figure(each.reward)),
          each.advantage !== null ? [", advantage ", h("b", { class: each.advantage < 0 ? "minus" : "plus" }, `${each.advantage > 0 ? "+" : ""}${figure(each.advantage)}`)] : null,
          difference(each, best)),
        conversation(marked(each, best))))),
    ],
  };
}

const said = (rollout) => rollout.messages.map((each) => JSON.stringify([each.role, each.text, each.tool_calls]));

function difference(rollout, best) {
  if (rollout === best) return null;
  const mine = said(rollout), others = said(best);
  const at = mine.findIndex((each, n) => each !== others[n]);
  return h("span", { class: "quiet" }, at < 0 ? ", says the same as the first" : `, differs from the first in message ${at + 1}`);
}

// Messages that the best rollout has too are quiet.
function marked(rollout, best) {
  if (rollout === best) return rollout;
  const others = said(best);
  return { ...rollout, messages: rollout.messages.map((each, n) =>
    (JSON.stringify([each.role, each.text, each.tool_calls]) === others[n] ? { ...each, same: true } : each)) };
}
