// Elements from plain values. Text becomes text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Tell what is not seen from where the focus is. */
export function announce(text) {
  byId("live").textContent = text;
}

/** Return an element; a property that is a function listens to the event of its name. */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Return an element of an SVG picture. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const PATHS = {
  copy: "M9 9h10v10H9zM15 9V5H5v10h4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2.200-5.100M19 4v4h-4",
  rename: "M5 19l1-4L16 5l3 3L9 18z",
  remove: "M6 7h12M10 7V5h4v2M8 7l1 12h6l1-12",
  close: "M7 7l10 10M17 7L7 17",
  before: "M14 6l-6 6 6 6",
  after: "M10 6l6 6-6 6",
  compare: "M4 5h7v14H4zM13 5h7v14h-7z",
};

/** Return a button that shows an icon, and is called by `label`. */
export function iconButton(icon, label, click, properties = {}) {
  const picture = svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" });
  picture.append(svg("path", { d: PATHS[icon] }));
  const own = { type: "button", class: "icon small", "aria-label": label, title: label };
  return el("button", { ...own, ...properties, click }, picture);
}
