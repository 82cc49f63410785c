// A rollout as a conversation, and its tokens coloured by what was chosen.

import { h } from "./dom.js";
import { asText, figure } from "./format.js";

export function conversation(rollout) {
  if (!rollout.messages.length) return h("p", { class: "quiet" }, "No step of it was recorded.");
  return h("ol", { class: "conversation" }, rollout.messages.map((each) => h("li", { class: `message ${each.role}${each.same ? " same" : ""}` },
    h("span", { class: "role" }, each.role, each.same && " (the same)", each.call && h("em", null, ` ${each.call}`)),
    each.text && h("div", { class: "text" }, each.text),
    each.tool_calls.map((call) => h("div", { class: "call" }, h("b", null, call.name), h("code", null, asText(call.arguments)))))),
    rollout.left_out.length ? h("li", { class: "quiet" }, `Not shown: ${rollout.left_out.join(", ")}`) : null);
}

// by: "probability" or "advantage". A colour never stands alone: masked tokens are struck through, titles have numbers.
export function tokens(rollout, by, most) {
  if (!rollout.sequences.length) return h("p", { class: "quiet" }, "No token ids were recorded.");
  return rollout.sequences.map((sequence) => h("div", null,
    sequence.reason && h("p", { class: "quiet" }, sequence.reason),
    h("pre", { class: "tokens" }, sequence.pieces.map((piece) => {
      if (piece.kind === "context") return h("span", { class: "context" }, piece.text);
      const advantage = rollout.advantage;
      let shade = 0, side = "plus";
      if (by === "probability" && piece.probability !== null) shade = 1 - piece.probability, side = "low";
      if (by === "advantage" && advantage !== null) shade = Math.min(1, Math.abs(advantage) / (most || 1)), side = advantage < 0 ? "minus" : "plus";
      const known = piece.probability === null ? "" : `, probability ${figure(piece.probability)}`;
      return h("span", {
        class: `token ${piece.kind} ${side} s${Math.round(shade * 5)}`,
        title: `token ${piece.id}${known}${advantage === null ? "" : `, advantage ${figure(advantage)}`}${piece.kind === "masked" ? ", not trained on" : ""}`,
      }, piece.text || "\u00b7");
    })),
    sequence.left_out ? h("p", { class: "quiet" }, `${sequence.left_out} more tokens are not shown`) : null));
}
