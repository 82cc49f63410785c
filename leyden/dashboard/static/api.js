// The JSON of the server, and the stream of its changes. The token stands in the address behind #token=, which a browser
// never sends, is taken out of the address at once, and is kept for this tab.

import { h } from "./dom.js";

const TOKEN = "leyden-token";

export function takeToken() {
  const found = /^#token=([^&]+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(found[1]));
  history.replaceState(null, "", "#/");
}

export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

const headers = () => {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
};

export class ServerError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export const address = (view, query) => {
  const given = Object.entries(query ?? {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  return `api/${view}${text ? `?${text}` : ""}`;
};

export async function get(view, query, signal) {
  let reply;
  try {
    reply = await fetch(address(view, query), { headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "the server does not answer; is `leyden dashboard` still running?");
  }
  const data = await reply.json().catch(() => ({ error: `status ${reply.status}` }));
  if (!reply.ok) throw new ServerError(reply.status, data.error);
  return data;
}

export async function post(view, data) {
  const reply = await fetch(address(view), { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(data) })
    .catch(() => { throw new ServerError(0, "the server does not answer; the answer is not stored"); });
  const found = await reply.json().catch(() => ({ error: `status ${reply.status}` }));
  if (!reply.ok) throw new ServerError(reply.status, found.error);
  return found;
}

// A link to the JSON of a view. With a token it is fetched, because a link cannot send one.
export function json(view, query) {
  return h("a", { href: address(view, query), target: "_blank", rel: "noopener", onclick: async (event) => {
    if (!sessionStorage.getItem(TOKEN)) return;
    event.preventDefault();
    const text = JSON.stringify(await get(view, query), null, 1);
    open(URL.createObjectURL(new Blob([text], { type: "application/json" })));
  } }, "JSON");
}

// Calls changed(runs) for each change, changed(null) after each new connection, and state(is_live) when it comes and goes.
export async function listen(changed, state) {
  for (;;) {
    try {
      const reply = await fetch("api/events", { headers: headers() });
      if (!reply.ok) throw new ServerError(reply.status, "no events");
      state(true);
      changed(null);
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          if (part.includes("event: changed")) changed(JSON.parse(/^data: (.*)$/m.exec(part)[1]).runs);
        }
      }
    } catch { /* the server is away; it is asked again below */ }
    state(false);
    await new Promise((done) => setTimeout(done, 2000));
  }
}
