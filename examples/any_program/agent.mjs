// Plays guess-the-number with a model. It knows no Leyden: everything it needs stands in its environment.

import { readFileSync } from "node:fs";

const { OPENAI_BASE_URL, OPENAI_API_KEY, LEYDEN_MODEL, LEYDEN_RESOURCES_FILE, TRACEPARENT } = process.env;
const TURNS = 4;

const { secret } = JSON.parse(readFileSync(process.stdin.fd, "utf8"));
const [{ sampling_parameters }] = Object.values(JSON.parse(readFileSync(LEYDEN_RESOURCES_FILE, "utf8")));

async function ask(messages) {
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      authorization: `Bearer ${OPENAI_API_KEY}`,
      traceparent: TRACEPARENT,
    },
    body: JSON.stringify({ model: LEYDEN_MODEL, messages, ...sampling_parameters }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message.content;
}

async function play() {
  let [low, high] = [0, 9];
  const messages = [{ role: "user", content: `guess ${low}..${high}` }];
  for (let turn = 1; turn <= TURNS; turn++) {
    const reply = await ask(messages);
    if (!/^\s*\d+\s*$/.test(reply)) return 0;
    const guess = Number(reply);
    if (guess === secret) return 1;
    if (guess < secret) low = Math.max(low, guess + 1);
    else high = Math.min(high, guess - 1);
    const hint = guess < secret ? "higher" : "lower";
    messages.push({ role: "assistant", content: reply }, { role: "user", content: `${hint} ${low}..${high}` });
  }
  return 0;
}

console.log(await play()); // the last line: the reward
