// Makes elements. Text is always a text node, so recorded text is never markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const each of children) {
    if (each === null || each === undefined || each === false) continue;
    if (Array.isArray(each)) add(element, each);
    else element.append(each instanceof Node ? each : readable(String(each)));
  }
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Control and bidirectional characters are shown, so that they can neither hide nor move text.
export function readable(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g,
    (each) => `\\x${each.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

export function replace(element, ...children) {
  element.replaceChildren();
  add(element, children);
}

// A table: columns are {title, cell(row), number, className}.
export function table(caption, columns, rows, props) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", props,
      h("caption", { class: "hidden" }, caption),
      h("thead", null, h("tr", null, columns.map((c) =>
        h("th", { scope: "col", class: c.number && "number", "aria-sort": c.sorted }, c.head ?? c.title)))),
      h("tbody", null, rows.map((row) => h("tr", { class: row.rowClass }, columns.map((c, index) => {
        const props = { class: [c.number && "number", c.className].filter(Boolean).join(" ") || null };
        return index === 0 ? h("th", { scope: "row", ...props }, c.cell(row)) : h("td", props, c.cell(row));
      }))))));
}
