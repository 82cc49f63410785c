// Numbers, times and names as people read them.

export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

export const when = (time) => (time ? new Date(time * 1000).toLocaleString() : "-");

export function ago(time) {
  const seconds = Date.now() / 1000 - time;
  for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]]) {
    const n = Math.floor(seconds / size);
    if (n >= 1) return `${n} ${unit}${n > 1 ? "s" : ""} ago`;
  }
  return "just now";
}

export const bytes = (n) => (n >= 1e9 ? `${figure(n / 1e9)} GB` : n >= 1e6 ? `${figure(n / 1e6)} MB` : `${figure(n / 1e3)} kB`);

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

export const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 1));
